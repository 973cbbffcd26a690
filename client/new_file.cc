#include "client/new_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/errors/rpc_error.h"
#include "common/ids.h"

namespace upipe::client {

NewFile::NewFile(std::string path, std::string temporary, int fd)
    : path_(std::move(path)), temporary_(std::move(temporary)), fd_(fd) {}

NewFile::NewFile(NewFile&& other) noexcept
    : path_(std::move(other.path_)),
      temporary_(std::move(other.temporary_)),
      fd_(std::exchange(other.fd_, -1)),
      bytes_(other.bytes_) {}

NewFile::~NewFile() {
  if (fd_ < 0) return;
  close(fd_);
  unlink(temporary_.c_str());
}

absl::Status NewFile::Failure(const std::string& what, int error) const {
  return RpcError(Reason::kFileUnwritable, absl::StrCat("cannot ", what, ": ", strerror(error)),
                  {{"file", path_}});
}

absl::StatusOr<NewFile> NewFile::Create(const std::string& path, mode_t mode) {
  std::error_code none;
  const std::filesystem::file_status there = std::filesystem::symlink_status(path, none);
  if (std::filesystem::exists(there) && !std::filesystem::is_regular_file(there)) {
    return RpcError(Reason::kFileUnwritable,
                    absl::StrCat("cannot write ", path,
                                 ": it is no regular file, and would be replaced by one"),
                    {{"file", path}});
  }
  std::string temporary = absl::StrCat(path, ".", RandomNonce().substr(0, 8), ".part");
  const int fd = open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, mode);
  if (fd < 0) {
    return RpcError(Reason::kFileUnwritable,
                    absl::StrCat("cannot write ", path, ": ", strerror(errno)), {{"file", path}});
  }
  return NewFile(path, std::move(temporary), fd);
}

absl::Status NewFile::Write(absl::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t written = write(fd_, bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return Failure(absl::StrCat("write ", temporary_), errno);
    bytes.remove_prefix(static_cast<size_t>(written));
    bytes_ += written;
  }
  return absl::OkStatus();
}

absl::Status NewFile::Commit() {
  if (fsync(fd_) != 0) return Failure(absl::StrCat("sync ", temporary_), errno);
  if (rename(temporary_.c_str(), path_.c_str()) != 0) {
    return Failure(absl::StrCat("rename ", temporary_, " to ", path_), errno);
  }
  close(std::exchange(fd_, -1));
  std::filesystem::path folder = std::filesystem::path(path_).parent_path();
  if (folder.empty()) folder = ".";
  const int fd = open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) return Failure(absl::StrCat("open ", folder.string()), errno);
  const int failed = fsync(fd);
  const int error = errno;
  close(fd);
  return failed == 0 ? absl::OkStatus() : Failure(absl::StrCat("sync ", folder.string()), error);
}

}  // namespace upipe::client
