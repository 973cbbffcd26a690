// One plain HTTP GET, as Prometheus endpoints answer it: what support-bundle reads metrics with.
#pragma once

#include <cstddef>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace upipe::client {

struct HttpLimits {
  absl::Duration time = absl::Seconds(2);  // the whole exchange
  size_t bytes = 4 << 20;                  // of the answer; the rest is cut off
};

// The body of http://`address``path`; `address` is host:port. Unavailable or DeadlineExceeded in
// words, or Unknown with the server's status line.
absl::StatusOr<std::string> HttpGet(const std::string& address, const std::string& path,
                                    const HttpLimits& limits = {});

}  // namespace upipe::client
