#include "engine/checkpoint/files.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "common/failpoint.h"
#include "common/status.h"

namespace upipe::checkpoint {
namespace {

absl::Status FileError(absl::string_view what, absl::string_view path) {
  return absl::ErrnoToStatus(errno, absl::StrCat("cannot ", what, " ", path));
}

// Runs a system call that answers -1 on errors, again when a signal interrupted it.
template <typename Call>
auto Repeat(const Call& call) {
  decltype(call()) result;
  do {
    result = call();
  } while (result < 0 && errno == EINTR);
  return result;
}

}  // namespace

#define UPIPE_BEFORE_SYSTEM_CALL() \
  UPIPE_RETURN_IF_ERROR(Failpoint(failpoints::kCheckpointSystemCall))

Descriptor::Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}

Descriptor& Descriptor::operator=(Descriptor&& other) noexcept {
  std::swap(fd_, other.fd_);
  return *this;
}

Descriptor::~Descriptor() {
  if (fd_ >= 0) close(fd_);
}

absl::Status File::WriteAt(int64_t offset, absl::string_view bytes) {
  while (!bytes.empty()) {
    UPIPE_BEFORE_SYSTEM_CALL();
    const ssize_t written =
        Repeat([&] { return pwrite(fd_.get(), bytes.data(), bytes.size(), offset); });
    if (written < 0) return FileError("write", path_);
    offset += written;
    bytes.remove_prefix(written);
  }
  return absl::OkStatus();
}

absl::Status File::Sync() {
  UPIPE_BEFORE_SYSTEM_CALL();
  return Repeat([&] { return fsync(fd_.get()); }) < 0 ? FileError("sync", path_) : absl::OkStatus();
}

absl::Status File::ReadAt(int64_t offset, int64_t bytes, void* to) const {
  char* next = static_cast<char*>(to);
  while (bytes > 0) {
    UPIPE_BEFORE_SYSTEM_CALL();
    const ssize_t got =
        Repeat([&] { return pread(fd_.get(), next, static_cast<size_t>(bytes), offset); });
    if (got < 0) return FileError("read", path_);
    if (got == 0) {
      return absl::DataLossError(
          absl::StrCat(path_, " ends at byte ", offset, ", ", bytes, " bytes too early"));
    }
    next += got;
    offset += got;
    bytes -= got;
  }
  return absl::OkStatus();
}

absl::StatusOr<int64_t> File::Size() const {
  UPIPE_BEFORE_SYSTEM_CALL();
  struct stat info;
  if (fstat(fd_.get(), &info) != 0) return FileError("examine", path_);
  if (!S_ISREG(info.st_mode)) {
    return absl::DataLossError(absl::StrCat(path_, " is not a regular file"));
  }
  return info.st_size;
}

absl::StatusOr<Folder> Folder::OpenRoot(const std::string& path, bool make) {
  if (path.empty() || path[0] != '/') {
    return absl::InvalidArgumentError(absl::StrCat("'", path, "' is not an absolute path"));
  }
  const auto open_folder = [](const std::string& name) -> absl::StatusOr<Folder> {
    UPIPE_BEFORE_SYSTEM_CALL();
    Descriptor fd(open(name.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    if (fd.get() < 0) return FileError("open folder", name);
    return Folder(std::move(fd), name);
  };
  std::string so_far;
  for (const absl::string_view part : absl::StrSplit(path, '/', absl::SkipEmpty())) {
    const std::string parent = so_far.empty() ? "/" : so_far;
    absl::StrAppend(&so_far, "/", part);
    if (!make) continue;
    UPIPE_BEFORE_SYSTEM_CALL();
    if (mkdir(so_far.c_str(), 0777) == 0) {
      UPIPE_ASSIGN_OR_RETURN(const Folder above, open_folder(parent));
      UPIPE_RETURN_IF_ERROR(above.Sync());
    } else if (const int error = errno; error != EEXIST && access(so_far.c_str(), F_OK) != 0) {
      errno = error;
      return FileError("make folder", so_far);
    }
  }
  return open_folder(so_far.empty() ? "/" : so_far);
}

std::string Folder::PathOf(absl::string_view name) const { return absl::StrCat(path_, "/", name); }

absl::StatusOr<Folder> Folder::Open(const std::string& name, bool make) const {
  if (make) {
    UPIPE_BEFORE_SYSTEM_CALL();
    if (mkdirat(fd_.get(), name.c_str(), 0777) == 0) {
      UPIPE_RETURN_IF_ERROR(Sync());
    } else if (errno != EEXIST) {
      return FileError("make folder", PathOf(name));
    }
  }
  UPIPE_BEFORE_SYSTEM_CALL();
  Descriptor fd(openat(fd_.get(), name.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  if (fd.get() < 0) return FileError("open folder", PathOf(name));
  return Folder(std::move(fd), PathOf(name));
}

absl::StatusOr<File> Folder::Create(const std::string& name) const {
  UPIPE_BEFORE_SYSTEM_CALL();
  Descriptor fd(
      openat(fd_.get(), name.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW | O_CLOEXEC, 0666));
  if (fd.get() < 0) return FileError("create", PathOf(name));
  return File(std::move(fd), PathOf(name));
}

absl::StatusOr<File> Folder::OpenFile(const std::string& name) const {
  UPIPE_BEFORE_SYSTEM_CALL();
  Descriptor fd(openat(fd_.get(), name.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
  if (fd.get() < 0) return FileError("open", PathOf(name));
  return File(std::move(fd), PathOf(name));
}

absl::StatusOr<std::string> Folder::ReadFile(const std::string& name, int64_t bytes_max) const {
  UPIPE_ASSIGN_OR_RETURN(const File file, OpenFile(name));
  UPIPE_ASSIGN_OR_RETURN(const int64_t bytes, file.Size());
  if (bytes > bytes_max) {
    return absl::DataLossError(
        absl::StrCat(file.path(), " has ", bytes, " bytes, at most ", bytes_max, " are expected"));
  }
  std::string content(static_cast<size_t>(bytes), '\0');
  UPIPE_RETURN_IF_ERROR(file.ReadAt(0, bytes, content.data()));
  return content;
}

absl::Status Folder::PutFile(const std::string& name, absl::string_view bytes,
                             const std::function<absl::Status()>& before_rename) const {
  const std::string beside = absl::StrCat(name, ".tmp");
  const auto put = [&]() -> absl::Status {
    UPIPE_ASSIGN_OR_RETURN(File file, Create(beside));
    UPIPE_RETURN_IF_ERROR(file.WriteAt(0, bytes));
    UPIPE_RETURN_IF_ERROR(file.Sync());
    if (before_rename) UPIPE_RETURN_IF_ERROR(before_rename());
    UPIPE_BEFORE_SYSTEM_CALL();
    if (renameat(fd_.get(), beside.c_str(), fd_.get(), name.c_str()) != 0) {
      return FileError("rename into place", PathOf(name));
    }
    return Sync();
  };
  const absl::Status status = put();
  if (!status.ok()) RemoveFile(beside).IgnoreError();
  return status;
}

absl::StatusOr<std::vector<std::string>> Folder::List() const {
  UPIPE_BEFORE_SYSTEM_CALL();
  const int fd = openat(fd_.get(), ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  DIR* entries = fd < 0 ? nullptr : fdopendir(fd);
  if (entries == nullptr) {
    const absl::Status error = FileError("list", path_);
    if (fd >= 0) close(fd);
    return error;
  }
  std::vector<std::string> names;
  errno = 0;
  while (const dirent* entry = readdir(entries)) {
    const absl::string_view name = entry->d_name;
    if (name != "." && name != "..") names.emplace_back(name);
  }
  const absl::Status error = errno == 0 ? absl::OkStatus() : FileError("list", path_);
  closedir(entries);
  UPIPE_RETURN_IF_ERROR(error);
  std::sort(names.begin(), names.end());
  return names;
}

absl::Status Folder::RemoveFile(const std::string& name) const {
  UPIPE_BEFORE_SYSTEM_CALL();
  if (unlinkat(fd_.get(), name.c_str(), 0) == 0 || errno == ENOENT) return absl::OkStatus();
  return FileError("remove", PathOf(name));
}

absl::Status Folder::RemoveFolder(const std::string& name) const {
  UPIPE_BEFORE_SYSTEM_CALL();
  if (unlinkat(fd_.get(), name.c_str(), AT_REMOVEDIR) == 0 || errno == ENOENT) {
    return absl::OkStatus();
  }
  return FileError("remove folder", PathOf(name));
}

absl::Status Folder::Sync() const {
  UPIPE_BEFORE_SYSTEM_CALL();
  return Repeat([&] { return fsync(fd_.get()); }) < 0 ? FileError("sync folder", path_)
                                                      : absl::OkStatus();
}

absl::Status Folder::Lock() const {
  UPIPE_BEFORE_SYSTEM_CALL();
  if (Repeat([&] { return flock(fd_.get(), LOCK_EX | LOCK_NB); }) == 0) return absl::OkStatus();
  if (errno != EWOULDBLOCK) return FileError("lock", path_);
  return absl::FailedPreconditionError(
      absl::StrCat(path_,
                   " belongs to a process that is training there; wait for its end, or use "
                   "another checkpoint.path or name"));
}

}  // namespace upipe::checkpoint
