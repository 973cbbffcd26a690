// Folders and files below a checkpoint root: opened relative to a folder's descriptor, never
// through a symbolic link, and with a failpoint before every system call, so that tests can end a
// process between any two of them.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace upipe::checkpoint {

// Closes when it goes. Move-only.
class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int fd) : fd_(fd) {}
  Descriptor(Descriptor&& other) noexcept;
  Descriptor& operator=(Descriptor&& other) noexcept;
  ~Descriptor();
  int get() const { return fd_; }

 private:
  int fd_ = -1;
};

// Every error names the path, and is what the file system said: NotFound, PermissionDenied,
// ResourceExhausted for a full disk, ..
class File {
 public:
  File(Descriptor fd, std::string path) : fd_(std::move(fd)), path_(std::move(path)) {}
  absl::Status WriteAt(int64_t offset, absl::string_view bytes);
  // Durable, and what was written is known to have reached the disk.
  absl::Status Sync();
  // Exactly `bytes` bytes; DataLoss when the file ends before.
  absl::Status ReadAt(int64_t offset, int64_t bytes, void* to) const;
  absl::StatusOr<int64_t> Size() const;
  const std::string& path() const { return path_; }

 private:
  Descriptor fd_;
  std::string path_;
};

class Folder {
 public:
  // Absolute; missing folders are made where `make` says so. A symbolic link may be part of `path`.
  static absl::StatusOr<Folder> OpenRoot(const std::string& path, bool make);
  // A folder in this one; made, durably, where it is missing and `make` says so.
  absl::StatusOr<Folder> Open(const std::string& name, bool make) const;

  // Empty, replacing what was there.
  absl::StatusOr<File> Create(const std::string& name) const;
  absl::StatusOr<File> OpenFile(const std::string& name) const;
  // At most `bytes_max` bytes long, else DataLoss.
  absl::StatusOr<std::string> ReadFile(const std::string& name, int64_t bytes_max) const;
  // All or nothing, durably: written beside, synced, then renamed over `name` unless
  // `before_rename` refuses.
  absl::Status PutFile(const std::string& name, absl::string_view bytes,
                       const std::function<absl::Status()>& before_rename = {}) const;
  // Names in it, ascending.
  absl::StatusOr<std::vector<std::string>> List() const;
  // OK when there was none.
  absl::Status RemoveFile(const std::string& name) const;
  absl::Status RemoveFolder(const std::string& name) const;  // an empty one
  absl::Status Sync() const;
  // FailedPrecondition while another process holds it locked. Until the Folder goes.
  absl::Status Lock() const;

  const std::string& path() const { return path_; }
  std::string PathOf(absl::string_view name) const;

 private:
  Folder(Descriptor fd, std::string path) : fd_(std::move(fd)), path_(std::move(path)) {}
  Descriptor fd_;
  std::string path_;
};

}  // namespace upipe::checkpoint
