#include "coordinator/store/sqlite_copy.h"

#include <sqlite3.h>

#include "common/status.h"
#include "coordinator/store/sqlite_status.h"

namespace upipe::coordinator {
namespace {

constexpr int kStepPages = 64;

}  // namespace

absl::StatusOr<std::unique_ptr<StoreCopy>> SqliteCopy::Start(sqlite3* source,
                                                             const std::string& path,
                                                             const std::string& vfs) {
  sqlite3* copy = nullptr;
  const int flags = SQLITE_OPEN_READWRITE | SQLITE_OPEN_CREATE | SQLITE_OPEN_NOMUTEX;
  const int rc = sqlite3_open_v2(path.c_str(), &copy, flags, vfs.empty() ? nullptr : vfs.c_str());
  std::unique_ptr<SqliteCopy> made(new SqliteCopy(path, copy));
  if (rc != SQLITE_OK) return SqliteStatus(copy, "open", path);
  // It is read once and thrown away: it need not survive anything.
  if (sqlite3_exec(copy, "PRAGMA journal_mode=OFF; PRAGMA synchronous=OFF", nullptr, nullptr,
                   nullptr) != SQLITE_OK) {
    return SqliteStatus(copy, "prepare", path);
  }
  made->backup_ = sqlite3_backup_init(copy, "main", source, "main");
  if (made->backup_ == nullptr) return SqliteStatus(copy, "begin", path);
  return made;
}

SqliteCopy::~SqliteCopy() { (void)Close(); }

absl::Status SqliteCopy::Close() {
  const int finished = sqlite3_backup_finish(backup_);
  backup_ = nullptr;
  const int closed = sqlite3_close(copy_);
  copy_ = nullptr;
  if (finished != SQLITE_OK) return SqliteStatus(finished, "copy to", path_);
  return closed == SQLITE_OK ? absl::OkStatus() : SqliteStatus(closed, "close", path_);
}

absl::StatusOr<bool> SqliteCopy::Step() {
  const int rc = sqlite3_backup_step(backup_, kStepPages);
  if (rc == SQLITE_OK) return false;
  if (rc != SQLITE_DONE) return SqliteStatus(rc, "copy to", path_);
  UPIPE_RETURN_IF_ERROR(Close());
  return true;
}

}  // namespace upipe::coordinator
