#include "coordinator/runtime/backup.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <future>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "common/errors/rpc_error.h"
#include "common/sha256.h"
#include "common/status.h"
#include "common/units.h"

namespace upipe::coordinator {
namespace {

constexpr size_t kPieceBytes = size_t{256} << 10;

absl::Status Busy(absl::string_view message) { return RpcError(Reason::kCoordinatorBusy, message); }

absl::Status Failed(absl::string_view attempted, const std::string& path) {
  return RpcError(Reason::kBackupFailed,
                  absl::StrCat("cannot ", attempted, " ", path, ": ", std::strerror(errno)));
}

absl::Status Send(int file, const std::string& path, int64_t revision, BackupReader& reader) {
  struct stat status;
  if (fstat(file, &status) != 0) return Failed("look at", path);
  Sha256 sum;
  for (int64_t sent = 0; sent < status.st_size;) {
    v1::BackupResponse piece;
    std::string& data = *piece.mutable_data();
    data.resize(std::min<int64_t>(kPieceBytes, status.st_size - sent));
    const ssize_t got = pread(file, data.data(), data.size(), sent);
    if (got <= 0) return Failed("read", path);
    data.resize(got);
    sum.Update(data);
    sent += got;
    if (sent == status.st_size) {
      piece.set_revision(revision);
      piece.set_sha256(sum.Hex());
    }
    if (!reader.Write(std::move(piece))) return RpcError(Reason::kCallerLeft, "the reader left");
  }
  return absl::OkStatus();
}

}  // namespace

BackupThread::BackupThread(Options options, Loop& loop)
    : options_(std::move(options)), loop_(loop) {
  unlink(options_.copy_path.c_str());
  thread_ = std::thread([this] { Run(); });
}

BackupThread::~BackupThread() {
  readers_.Close();
  thread_.join();
}

void BackupThread::Start(std::shared_ptr<BackupReader> reader) {
  if (busy_.exchange(true)) {
    return reader->End(Busy("another backup is being sent; try again when it has ended"));
  }
  readers_.TryPush(std::move(reader));
}

void BackupThread::Run() {
  while (std::optional<std::shared_ptr<BackupReader>> reader = readers_.Pop()) {
    const absl::Status status = Serve(**reader);
    busy_ = false;
    (*reader)->End(status);
  }
}

absl::Status BackupThread::CheckRoom() const {
  std::error_code error;
  const std::filesystem::path store(options_.store_path);
  const int64_t bytes = static_cast<int64_t>(std::filesystem::file_size(store, error));
  const std::filesystem::space_info disk = std::filesystem::space(store.parent_path(), error);
  if (error) {
    return RpcError(Reason::kBackupFailed,
                    absl::StrCat("cannot look at ", store.string(), ": ", error.message()));
  }
  const int64_t needed = bytes + options_.min_free_bytes;
  if (static_cast<int64_t>(disk.available) >= needed) return absl::OkStatus();
  return RpcError(
      Reason::kStateDiskFull,
      absl::StrCat("a copy of the store needs ", FormatBytes(needed), " free at ",
                   store.parent_path().string(), ", there are ",
                   FormatBytes(static_cast<int64_t>(disk.available)), "; free some space"),
      {{"needed_bytes", needed}, {"free_bytes", static_cast<int64_t>(disk.available)}});
}

absl::Status BackupThread::Serve(BackupReader& reader) {
  UPIPE_RETURN_IF_ERROR(CheckRoom());
  const std::string& path = options_.copy_path;
  const absl::Cleanup remove = [&path] { unlink(path.c_str()); };
  const auto promise = std::make_shared<std::promise<absl::StatusOr<int64_t>>>();
  const bool posted = loop_.Post(BackupCall{
      path, [promise](absl::StatusOr<int64_t> revision) { promise->set_value(revision); }});
  if (!posted) return Busy("the coordinator is busy or shutting down; try again");
  UPIPE_ASSIGN_OR_RETURN(const int64_t revision, promise->get_future().get());
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) return Failed("read", path);
  const absl::Cleanup close_file = [file] { close(file); };
  return Send(file, path, revision, reader);
}

}  // namespace upipe::coordinator
