// A file that appears whole or not at all: written beside its place, synced, then renamed over it.
#pragma once

#include <sys/types.h>

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace upipe::client {

class NewFile {
 public:
  // FILE_UNWRITABLE names the path and why; a folder, link or device is never replaced. Unless
  // `mode` lets others, less the umask, only its owner may read the file.
  static absl::StatusOr<NewFile> Create(const std::string& path, mode_t mode = 0600);
  NewFile(NewFile&& other) noexcept;
  NewFile& operator=(NewFile&&) = delete;
  // Removes what was not committed.
  ~NewFile();

  absl::Status Write(absl::string_view bytes);
  // On disk and in its place. Once; nothing is written after.
  absl::Status Commit();

  int64_t bytes() const { return bytes_; }

 private:
  NewFile(std::string path, std::string temporary, int fd);
  absl::Status Failure(const std::string& what, int error) const;

  std::string path_;
  std::string temporary_;
  int fd_;
  int64_t bytes_ = 0;
};

}  // namespace upipe::client
