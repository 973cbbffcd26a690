// A gzipped tar archive (POSIX ustar), written as it grows. What `tar xzf` reads; small enough to
// need no library beyond zlib.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace upipe::client {

class TarGzip {
 public:
  using Sink = std::function<absl::Status(absl::string_view bytes)>;
  // Every file carries `time`. The first error of `sink` is what every later call returns.
  TarGzip(absl::Time time, Sink sink);
  ~TarGzip();

  // One regular file, mode 0600. `path` is relative, of at most 255 bytes that split at a '/' into
  // a folder of at most 155 and a name of at most 100.
  absl::Status Add(const std::string& path, absl::string_view content);
  // The end of the archive. Nothing may be added after.
  absl::Status Finish();

 private:
  struct Stream;
  absl::Status Deflate(absl::string_view bytes, bool last);

  const absl::Time time_;
  const Sink sink_;
  std::unique_ptr<Stream> stream_;
  absl::Status status_;
};

}  // namespace upipe::client
