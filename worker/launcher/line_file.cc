#include "worker/launcher/line_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "absl/strings/str_cat.h"
#include "common/status.h"

namespace upipe::worker {

LineFileReader::~LineFileReader() {
  for (const Part& part : parts_) close(part.fd);
}

absl::StatusOr<bool> LineFileReader::Open(const std::string& path) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
  if (fd < 0 && (errno == ENOENT || errno == ENOTDIR)) return false;
  if (fd < 0) return absl::ErrnoToStatus(errno, absl::StrCat("cannot open ", path));
  struct stat info;
  const bool known = fstat(fd, &info) == 0 && S_ISREG(info.st_mode);
  const bool open_already = known && std::any_of(parts_.begin(), parts_.end(), [&](const Part& it) {
                              return it.device == info.st_dev && it.inode == info.st_ino;
                            });
  if (!known || open_already) {
    close(fd);
    if (!known) return absl::InternalError(absl::StrCat(path, " is no file"));
    return true;
  }
  parts_.push_back({fd, info.st_dev, info.st_ino});
  return true;
}

// The newest file is opened first: one that is turned over in between is then found open, and not
// missed.
absl::Status LineFileReader::Refresh() {
  UPIPE_ASSIGN_OR_RETURN(const bool there, Open(path_));
  if (began_) return absl::OkStatus();
  UPIPE_ASSIGN_OR_RETURN(const bool older, Open(path_ + ".1"));
  std::reverse(parts_.begin(), parts_.end());
  if (!there && !older) return absl::NotFoundError(absl::StrCat("there is no ", path_));
  began_ = true;
  return absl::OkStatus();
}

absl::StatusOr<LogPiece> LineFileReader::Read(int64_t offset, int64_t bytes_max) {
  UPIPE_RETURN_IF_ERROR(Refresh());
  std::vector<int64_t> begins;
  int64_t end = 0;
  for (const Part& part : parts_) {
    struct stat info;
    if (fstat(part.fd, &info) != 0) {
      return absl::ErrnoToStatus(errno, absl::StrCat("cannot read ", path_));
    }
    begins.push_back(end);
    end += info.st_size;
  }
  LogPiece piece;
  piece.offset = offset < 0 ? std::max<int64_t>(0, end + offset) : std::min(offset, end);
  if (piece.offset == end) return piece;
  const size_t at =
      std::upper_bound(begins.begin(), begins.end(), piece.offset) - begins.begin() - 1;
  const int64_t part_end = at + 1 < begins.size() ? begins[at + 1] : end;
  piece.data.resize(static_cast<size_t>(std::min(part_end - piece.offset, bytes_max)));
  const ssize_t got =
      pread(parts_[at].fd, piece.data.data(), piece.data.size(), piece.offset - begins[at]);
  if (got < 0) return absl::ErrnoToStatus(errno, absl::StrCat("cannot read ", path_));
  piece.data.resize(static_cast<size_t>(got));
  return piece;
}

}  // namespace upipe::worker
