#include "coordinator/runtime/restore.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "common/sha256.h"
#include "common/status.h"
#include "coordinator/store/sqlite_store.h"
#include "upipe/v1/store.pb.h"

namespace upipe::coordinator {
namespace {

namespace fs = std::filesystem;

// Coordinators start less often between a backup and its use.
constexpr int64_t kEpochsSinceBackup = int64_t{1} << 20;

absl::Status Failed(absl::string_view attempted, const std::string& path) {
  return absl::UnavailableError(
      absl::StrCat("cannot ", attempted, " ", path, ": ", std::strerror(errno)));
}

absl::Status Sync(const std::string& path) {
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) return Failed("open", path);
  const absl::Cleanup close_file = [file] { close(file); };
  return fsync(file) == 0 ? absl::OkStatus() : Failed("sync", path);
}

// Copies and returns the SHA-256 of what was copied.
absl::StatusOr<std::string> CopyFile(const std::string& from, const std::string& to) {
  std::ifstream in(from, std::ios::binary);
  if (!in) return Failed("read", from);
  std::ofstream out(to, std::ios::binary | std::ios::trunc);
  std::vector<char> piece(size_t{1} << 20);
  Sha256 sum;
  while (in.read(piece.data(), piece.size()), in.gcount() > 0) {
    sum.Update({piece.data(), static_cast<size_t>(in.gcount())});
    out.write(piece.data(), in.gcount());
  }
  if (in.bad()) return Failed("read", from);
  out.close();
  if (!out) return Failed("write", to);
  return sum.Hex();
}

absl::Status RefuseExisting(const std::string& store_path) {
  for (const char* suffix : {"", "-wal", "-journal"}) {
    if (!fs::exists(store_path + suffix)) continue;
    return absl::FailedPreconditionError(
        absl::StrCat("there is a store already at ", store_path, suffix,
                     "; restore into another --state-dir, or move it away first"));
  }
  return absl::OkStatus();
}

absl::Status MarkRestored(Store& store, absl::string_view backup_path) {
  UPIPE_ASSIGN_OR_RETURN(const std::vector<Entry> epochs, store.List("meta/epoch"));
  v1::EpochRecord epoch;
  if (epochs.empty() || !epoch.ParseFromString(epochs.front().value)) {
    return absl::DataLossError(
        absl::StrCat(backup_path, " is no backup of a coordinator: it has no epoch"));
  }
  epoch.set_epoch(epoch.epoch() + kEpochsSinceBackup);
  epoch.set_restored(true);
  const std::vector<Batch> batches = {
      Batch{{Write{"meta/epoch", epoch.SerializeAsString(), epochs.front().revision}}}};
  return store.Commit(batches).status();
}

}  // namespace

absl::StatusOr<Restored> RestoreStore(const std::string& backup_path, const std::string& sha256,
                                      const std::string& store_path) {
  UPIPE_RETURN_IF_ERROR(RefuseExisting(store_path));
  const std::string copy_path = store_path + ".restoring";
  const absl::Cleanup remove = [&copy_path] {
    for (const char* suffix : {"", "-wal", "-journal"}) unlink((copy_path + suffix).c_str());
  };
  UPIPE_ASSIGN_OR_RETURN(const std::string sum, CopyFile(backup_path, copy_path));
  if (!sha256.empty() && sum != sha256) {
    return absl::DataLossError(
        absl::StrCat(backup_path, " has SHA-256 ", sum, ", not ", sha256, " as was asked for"));
  }
  Restored restored;
  restored.bytes = static_cast<int64_t>(fs::file_size(copy_path));
  {
    UPIPE_ASSIGN_OR_RETURN(const std::unique_ptr<SqliteStore> store, SqliteStore::Open(copy_path));
    UPIPE_RETURN_IF_ERROR(store->CheckIntegrity());
    restored.revision = store->Revision();
    UPIPE_ASSIGN_OR_RETURN(const std::vector<Entry> jobs, store->List("job/"));
    restored.jobs = static_cast<int64_t>(jobs.size());
    UPIPE_RETURN_IF_ERROR(MarkRestored(*store, backup_path));
  }
  if (fs::exists(copy_path + "-wal")) {  // closing moves the log into the file
    return absl::UnavailableError(absl::StrCat("could not finish ", copy_path));
  }
  UPIPE_RETURN_IF_ERROR(Sync(copy_path));
  // Unlike a rename, a link never takes the place of a store that came meanwhile.
  if (link(copy_path.c_str(), store_path.c_str()) != 0) return Failed("create", store_path);
  UPIPE_RETURN_IF_ERROR(Sync(fs::path(store_path).parent_path()));
  return restored;
}

}  // namespace upipe::coordinator
