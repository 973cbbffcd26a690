// Where plaintext may be served without being asked for.
#pragma once

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace upipe {

// True when "host:port" or "[v6]:port" names this machine alone: localhost, ::1 or a dotted
// 127.x.x.x address. Names are not resolved.
bool IsLoopback(absl::string_view listen);

// Whether plaintext may be served on "host:port". InvalidArgument for what is no such address,
// FailedPrecondition beyond loopback without `insecure_listen`.
absl::Status CheckListen(absl::string_view listen, bool insecure_listen);

}  // namespace upipe
