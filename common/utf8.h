// Text from outside (files, logs, flags) held to UTF-8: what proto strings must be, since one bad
// byte makes the whole message unreadable for its receiver.
#pragma once

#include <cstddef>
#include <string>

#include "absl/strings/string_view.h"

namespace upipe {

// Bytes of the well-formed UTF-8 character at the start of `text`, which is not empty; 0 when it is
// none (overlong, surrogate, cut off).
size_t Utf8Length(absl::string_view text);

// `text` with '?' for each byte outside UTF-8, cut between characters to at most `bytes_max` bytes.
std::string ToUtf8(absl::string_view text, size_t bytes_max);

}  // namespace upipe
