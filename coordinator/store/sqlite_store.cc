#include "coordinator/store/sqlite_store.h"

#include <sqlite3.h>

#include <algorithm>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "coordinator/store/sqlite_copy.h"
#include "coordinator/store/sqlite_status.h"

namespace upipe::coordinator {
namespace {

constexpr int kSchemaVersion = 1;
constexpr int kCheckpointPages = 1000;  // 4 MB of log

// SQLite's own would swallow the errors of a checkpoint: a failed fsync is never retried.
int CheckpointLongLog(void*, sqlite3* db, const char* schema, int pages) {
  if (pages < kCheckpointPages) return SQLITE_OK;
  return sqlite3_wal_checkpoint_v2(db, schema, SQLITE_CHECKPOINT_PASSIVE, nullptr, nullptr);
}

// Bound text and blobs outlive the step: SQLITE_STATIC needs no copy.
void BindBytes(sqlite3_stmt* statement, int column, absl::string_view bytes) {
  sqlite3_bind_blob64(statement, column, bytes.empty() ? "" : bytes.data(), bytes.size(),
                      SQLITE_STATIC);
}

std::string ColumnBytes(sqlite3_stmt* statement, int column) {
  const int size = sqlite3_column_bytes(statement, column);
  if (size == 0) return "";
  return std::string(static_cast<const char*>(sqlite3_column_blob(statement, column)), size);
}

// The smallest string above every string that starts with `prefix`; empty when there is none.
std::string PrefixEnd(absl::string_view prefix) {
  std::string end(prefix);
  while (!end.empty() && static_cast<unsigned char>(end.back()) == 0xff) end.pop_back();
  if (!end.empty()) end.back() = static_cast<char>(static_cast<unsigned char>(end.back()) + 1);
  return end;
}

}  // namespace

absl::StatusOr<std::unique_ptr<SqliteStore>> SqliteStore::Open(const std::string& path,
                                                               const std::string& vfs) {
  sqlite3* db = nullptr;
  const int flags = SQLITE_OPEN_READWRITE | SQLITE_OPEN_CREATE | SQLITE_OPEN_NOMUTEX;
  const int rc = sqlite3_open_v2(path.c_str(), &db, flags, vfs.empty() ? nullptr : vfs.c_str());
  std::unique_ptr<SqliteStore> store(new SqliteStore(db, path, vfs));
  if (rc != SQLITE_OK) return store->Error("open");
  UPIPE_RETURN_IF_ERROR(store->Initialize());
  return store;
}

SqliteStore::~SqliteStore() {
  for (sqlite3_stmt* statement : {select_revision_, put_, remove_, set_revision_}) {
    sqlite3_finalize(statement);
  }
  sqlite3_close(db_);
}

absl::Status SqliteStore::Error(absl::string_view attempted) const {
  return SqliteStatus(db_, attempted, path_);
}

absl::Status SqliteStore::Exec(const char* sql) {
  if (sqlite3_exec(db_, sql, nullptr, nullptr, nullptr) != SQLITE_OK) return Error(sql);
  return absl::OkStatus();
}

absl::Status SqliteStore::Prepare(const char* sql, sqlite3_stmt** statement) {
  if (sqlite3_prepare_v2(db_, sql, -1, statement, nullptr) != SQLITE_OK) return Error(sql);
  return absl::OkStatus();
}

absl::StatusOr<int64_t> SqliteStore::IntegerOf(const char* sql) {
  sqlite3_stmt* query = nullptr;
  UPIPE_RETURN_IF_ERROR(Prepare(sql, &query));
  const int rc = sqlite3_step(query);
  const int64_t value = rc == SQLITE_ROW ? sqlite3_column_int64(query, 0) : 0;
  const absl::Status error =
      rc == SQLITE_ROW    ? absl::OkStatus()
      : rc == SQLITE_DONE ? absl::DataLossError(absl::StrCat(sql, " ", path_, ": there is no row"))
                          : Error(sql);
  sqlite3_finalize(query);
  if (!error.ok()) return error;
  return value;
}

absl::Status SqliteStore::Initialize() {
  UPIPE_RETURN_IF_ERROR(Lock());
  UPIPE_RETURN_IF_ERROR(RewriteLog());
  UPIPE_RETURN_IF_ERROR(SyncNames());
  UPIPE_RETURN_IF_ERROR(PrepareSchema());
  UPIPE_RETURN_IF_ERROR(Exec("COMMIT"));
  UPIPE_RETURN_IF_ERROR(Prepare("SELECT revision FROM entry WHERE key=?1", &select_revision_));
  UPIPE_RETURN_IF_ERROR(
      Prepare("INSERT INTO entry VALUES(?1, ?2, ?3) ON CONFLICT(key) DO UPDATE "
              "SET value=excluded.value, revision=excluded.revision",
              &put_));
  UPIPE_RETURN_IF_ERROR(Prepare("DELETE FROM entry WHERE key=?1", &remove_));
  UPIPE_RETURN_IF_ERROR(Prepare("UPDATE head SET revision=?1", &set_revision_));
  UPIPE_ASSIGN_OR_RETURN(revision_, IntegerOf("SELECT revision FROM head"));
  return absl::OkStatus();
}

// The exclusive lock is taken by the first write: BEGIN IMMEDIATE, which stays open.
absl::Status SqliteStore::Lock() {
  for (const char* sql : {"PRAGMA locking_mode=EXCLUSIVE", "PRAGMA journal_mode=WAL",
                          "PRAGMA synchronous=FULL", "BEGIN IMMEDIATE"}) {
    UPIPE_RETURN_IF_ERROR(Exec(sql));
  }
  sqlite3_wal_hook(db_, CheckpointLongLog, nullptr);
  return absl::OkStatus();
}

// After a failed fsync the kernel shows the log's bytes as clean, and no later fsync writes them:
// commits that follow would hang on a hole. The same bytes written again are dirty again.
absl::Status SqliteStore::RewriteLog() {
  sqlite3_file* log = nullptr;
  sqlite3_file_control(db_, "main", SQLITE_FCNTL_JOURNAL_POINTER, &log);
  if (log == nullptr || log->pMethods == nullptr) return absl::OkStatus();
  sqlite3_int64 size = 0;
  int rc = log->pMethods->xFileSize(log, &size);
  std::vector<char> piece(size_t{64} << 10);
  for (sqlite3_int64 at = 0; rc == SQLITE_OK && at < size; at += piece.size()) {
    const int bytes = static_cast<int>(std::min<sqlite3_int64>(piece.size(), size - at));
    rc = log->pMethods->xRead(log, piece.data(), bytes, at);
    if (rc == SQLITE_OK) rc = log->pMethods->xWrite(log, piece.data(), bytes, at);
  }
  if (rc == SQLITE_OK && size > 0) rc = log->pMethods->xSync(log, SQLITE_SYNC_NORMAL);
  if (rc == SQLITE_OK) return absl::OkStatus();
  return SqliteStatus(rc, "rewrite the log of", path_);
}

// An earlier process may have ended between making a file and syncing its name, and SQLite does
// that only for files it makes itself. Removing any file syncs the folder.
absl::Status SqliteStore::SyncNames() {
  sqlite3_vfs* vfs = sqlite3_vfs_find(vfs_.empty() ? nullptr : vfs_.c_str());
  const std::string name = path_ + "-names";
  std::vector<char> memory(vfs->szOsFile);
  sqlite3_file* file = reinterpret_cast<sqlite3_file*>(memory.data());
  const int flags = SQLITE_OPEN_READWRITE | SQLITE_OPEN_CREATE | SQLITE_OPEN_SUPER_JOURNAL;
  int rc = vfs->xOpen(vfs, name.c_str(), file, flags, nullptr);
  if (file->pMethods != nullptr) file->pMethods->xClose(file);
  if (rc == SQLITE_OK) rc = vfs->xDelete(vfs, name.c_str(), /*syncDir=*/1);
  return rc == SQLITE_OK ? absl::OkStatus() : SqliteStatus(rc, "sync the folder of", path_);
}

absl::Status SqliteStore::PrepareSchema() {
  UPIPE_ASSIGN_OR_RETURN(const int64_t version, IntegerOf("PRAGMA user_version"));
  UPIPE_ASSIGN_OR_RETURN(const int64_t tables, IntegerOf("SELECT count(*) FROM sqlite_schema"));
  if (version == kSchemaVersion) return absl::OkStatus();
  if (version == 0 && tables == 0) {
    return Exec(
        "CREATE TABLE entry(key BLOB PRIMARY KEY, value BLOB NOT NULL, revision INTEGER NOT NULL) "
        "WITHOUT ROWID; CREATE TABLE head(revision INTEGER NOT NULL); INSERT INTO head VALUES(0);"
        "PRAGMA user_version=1");
  }
  return absl::FailedPreconditionError(absl::StrCat(
      path_, " has schema version ", version, " and ", tables, " tables, this coordinator reads ",
      "version ", kSchemaVersion, "; use the matching release or another --state-dir"));
}

absl::Status SqliteStore::CheckIntegrity() {
  sqlite3_stmt* query = nullptr;
  UPIPE_RETURN_IF_ERROR(Prepare("PRAGMA integrity_check(1)", &query));
  const int rc = sqlite3_step(query);
  const std::string found = rc == SQLITE_ROW ? ColumnBytes(query, 0) : "";
  const absl::Status error = rc == SQLITE_ROW ? absl::OkStatus() : Error("check");
  sqlite3_finalize(query);
  if (!error.ok() || found == "ok") return error;
  return absl::DataLossError(absl::StrCat(path_, " is damaged: ", found));
}

absl::StatusOr<std::unique_ptr<StoreCopy>> SqliteStore::StartCopy(const std::string& path) {
  if (!broken_.ok()) return broken_;
  return SqliteCopy::Start(db_, path, vfs_);
}

absl::StatusOr<int64_t> SqliteStore::RevisionOf(const std::string& key) {
  BindBytes(select_revision_, 1, key);
  const int rc = sqlite3_step(select_revision_);
  const int64_t revision = rc == SQLITE_ROW ? sqlite3_column_int64(select_revision_, 0) : 0;
  const absl::Status error =
      rc == SQLITE_ROW || rc == SQLITE_DONE ? absl::OkStatus() : Error("read");
  sqlite3_reset(select_revision_);
  if (!error.ok()) return error;
  return revision;
}

absl::Status SqliteStore::Apply(const Write& write, int64_t revision) {
  sqlite3_stmt* statement = write.value ? put_ : remove_;
  BindBytes(statement, 1, write.key);
  if (write.value) {
    BindBytes(statement, 2, *write.value);
    sqlite3_bind_int64(statement, 3, revision);
  }
  const absl::Status error =
      sqlite3_step(statement) == SQLITE_DONE ? absl::OkStatus() : Error("write");
  sqlite3_reset(statement);
  return error;
}

absl::Status SqliteStore::SaveRevision(int64_t revision) {
  sqlite3_bind_int64(set_revision_, 1, revision);
  const absl::Status error =
      sqlite3_step(set_revision_) == SQLITE_DONE ? absl::OkStatus() : Error("write");
  sqlite3_reset(set_revision_);
  return error;
}

absl::Status SqliteStore::ApplyAll(absl::Span<const Batch> batches, int64_t* revision) {
  for (const Batch& batch : batches) {
    for (const Write& write : batch.writes) {
      if (!write.expected_revision) continue;
      UPIPE_ASSIGN_OR_RETURN(const int64_t current, RevisionOf(write.key));
      if (current != *write.expected_revision) {
        return absl::AbortedError(absl::StrCat("key ", write.key, " has revision ", current,
                                               ", expected ", *write.expected_revision));
      }
    }
    ++*revision;
    for (const Write& write : batch.writes) UPIPE_RETURN_IF_ERROR(Apply(write, *revision));
  }
  return SaveRevision(*revision);
}

absl::StatusOr<int64_t> SqliteStore::Commit(absl::Span<const Batch> batches) {
  if (!broken_.ok()) return broken_;
  for (const Batch& batch : batches) UPIPE_RETURN_IF_ERROR(ValidateBatch(batch));
  if (batches.empty()) return revision_;
  int64_t revision = revision_;
  absl::Status status = Exec("BEGIN IMMEDIATE");
  if (status.ok()) status = ApplyAll(batches, &revision);
  if (absl::IsAborted(status)) {
    broken_ = Exec("ROLLBACK");
    return broken_.ok() ? status : broken_;
  }
  if (status.ok()) status = Exec("COMMIT");
  if (!status.ok()) return broken_ = status;
  return revision_ = revision;
}

absl::StatusOr<std::vector<Entry>> SqliteStore::List(absl::string_view prefix) {
  if (!broken_.ok()) return broken_;
  const std::string end = PrefixEnd(prefix);
  sqlite3_stmt* query = nullptr;
  UPIPE_RETURN_IF_ERROR(Prepare(
      end.empty() ? "SELECT key, value, revision FROM entry WHERE key>=?1 ORDER BY key"
                  : "SELECT key, value, revision FROM entry WHERE key>=?1 AND key<?2 ORDER BY key",
      &query));
  BindBytes(query, 1, prefix);
  if (!end.empty()) BindBytes(query, 2, end);
  std::vector<Entry> entries;
  int rc = SQLITE_ROW;
  while ((rc = sqlite3_step(query)) == SQLITE_ROW) {
    entries.push_back(
        {ColumnBytes(query, 0), ColumnBytes(query, 1), sqlite3_column_int64(query, 2)});
  }
  const absl::Status error = rc == SQLITE_DONE ? absl::OkStatus() : Error("read");
  sqlite3_finalize(query);
  if (!error.ok()) return error;
  return entries;
}

}  // namespace upipe::coordinator
