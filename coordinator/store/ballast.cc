#include "coordinator/store/ballast.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "common/errors/rpc_error.h"
#include "common/status.h"
#include "common/units.h"

namespace upipe::coordinator {

Ballast::Ballast(std::string dir, int64_t bytes)
    : dir_(std::move(dir)), path_(dir_ + "/ballast"), bytes_(bytes) {
  struct stat file;
  held_ = stat(path_.c_str(), &file) == 0 && file.st_size >= bytes_;
}

absl::Status Ballast::Allocate() {
  const int fd = open(path_.c_str(), O_CREAT | O_WRONLY | O_CLOEXEC, 0600);
  if (fd < 0) {
    return RpcError(Reason::kStateDiskFull,
                    absl::StrCat("cannot create ", path_, ": ", std::strerror(errno)));
  }
  const int error = posix_fallocate(fd, 0, bytes_);
  close(fd);
  if (error != 0) {
    unlink(path_.c_str());
    return RpcError(Reason::kStateDiskFull,
                    absl::StrCat("cannot keep ", FormatBytes(bytes_), " at ", path_, ": ",
                                 std::strerror(error)),
                    {{"needed_bytes", bytes_}});
  }
  held_ = true;
  return absl::OkStatus();
}

absl::Status Ballast::Check() {
  struct statvfs disk;
  if (statvfs(dir_.c_str(), &disk) != 0) {
    return RpcError(Reason::kStateDiskFull, absl::StrCat("cannot read the free space of ", dir_,
                                                         ": ", std::strerror(errno)));
  }
  const int64_t free_bytes =
      static_cast<int64_t>(disk.f_bavail) * static_cast<int64_t>(disk.f_frsize);
  const int64_t needed_bytes = held_ ? bytes_ : 2 * bytes_;
  if (free_bytes < needed_bytes) {
    if (free_bytes < bytes_ / 4) {
      unlink(path_.c_str());
      held_ = false;
    }
    return RpcError(
        Reason::kStateDiskFull,
        absl::StrCat("the state disk at ", dir_, " has ", FormatBytes(free_bytes), " free, ",
                     FormatBytes(needed_bytes), " are needed to accept jobs; free some space"),
        {{"free_bytes", free_bytes}, {"needed_bytes", needed_bytes}});
  }
  return held_ ? absl::OkStatus() : Allocate();
}

}  // namespace upipe::coordinator
