#include "coordinator/store/sqlite_store.h"

#include <sqlite3.h>

#include "absl/strings/str_cat.h"
#include "common/status.h"

namespace upipe::coordinator {
namespace {

constexpr int kSchemaVersion = 1;

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

absl::StatusOr<std::unique_ptr<SqliteStore>> SqliteStore::Open(const std::string& path) {
  sqlite3* db = nullptr;
  const int flags = SQLITE_OPEN_READWRITE | SQLITE_OPEN_CREATE | SQLITE_OPEN_NOMUTEX;
  const int rc = sqlite3_open_v2(path.c_str(), &db, flags, nullptr);
  std::unique_ptr<SqliteStore> store(new SqliteStore(db, path));
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
  const int code = db_ == nullptr ? SQLITE_NOMEM : sqlite3_errcode(db_);
  if (code == SQLITE_BUSY || code == SQLITE_LOCKED) {
    return absl::FailedPreconditionError(absl::StrCat(
        "another coordinator holds ", path_, "; stop it, or give this one another --state-dir"));
  }
  const std::string text = absl::StrCat(attempted, " ", path_, ": ",
                                        db_ == nullptr ? "out of memory" : sqlite3_errmsg(db_));
  if (code == SQLITE_FULL) return absl::ResourceExhaustedError(text);
  if (code == SQLITE_CORRUPT || code == SQLITE_NOTADB) return absl::DataLossError(text);
  return absl::UnavailableError(text);
}

absl::Status SqliteStore::Exec(const char* sql) {
  if (sqlite3_exec(db_, sql, nullptr, nullptr, nullptr) != SQLITE_OK) return Error(sql);
  return absl::OkStatus();
}

absl::Status SqliteStore::Prepare(const char* sql, sqlite3_stmt** statement) {
  if (sqlite3_prepare_v2(db_, sql, -1, statement, nullptr) != SQLITE_OK) return Error(sql);
  return absl::OkStatus();
}

absl::Status SqliteStore::Initialize() {
  // The exclusive lock is taken by the first write; BEGIN IMMEDIATE makes that happen here.
  for (const char* sql : {"PRAGMA locking_mode=EXCLUSIVE", "PRAGMA journal_mode=WAL",
                          "PRAGMA synchronous=FULL", "BEGIN IMMEDIATE"}) {
    UPIPE_RETURN_IF_ERROR(Exec(sql));
  }
  sqlite3_stmt* version_query = nullptr;
  UPIPE_RETURN_IF_ERROR(Prepare("PRAGMA user_version", &version_query));
  const bool has_row = sqlite3_step(version_query) == SQLITE_ROW;
  const int version = has_row ? sqlite3_column_int(version_query, 0) : -1;
  sqlite3_finalize(version_query);
  if (version != 0 && version != kSchemaVersion) {
    return absl::FailedPreconditionError(
        absl::StrCat(path_, " has schema version ", version, ", this coordinator reads version ",
                     kSchemaVersion, "; use the matching release or another --state-dir"));
  }
  if (version == 0) {
    UPIPE_RETURN_IF_ERROR(Exec(
        "CREATE TABLE entry(key BLOB PRIMARY KEY, value BLOB NOT NULL, revision INTEGER NOT NULL) "
        "WITHOUT ROWID; CREATE TABLE head(revision INTEGER NOT NULL); INSERT INTO head VALUES(0);"
        "PRAGMA user_version=1"));
  }
  UPIPE_RETURN_IF_ERROR(Exec("COMMIT"));
  UPIPE_RETURN_IF_ERROR(Prepare("SELECT revision FROM entry WHERE key=?1", &select_revision_));
  UPIPE_RETURN_IF_ERROR(
      Prepare("INSERT INTO entry VALUES(?1, ?2, ?3) ON CONFLICT(key) DO UPDATE "
              "SET value=excluded.value, revision=excluded.revision",
              &put_));
  UPIPE_RETURN_IF_ERROR(Prepare("DELETE FROM entry WHERE key=?1", &remove_));
  UPIPE_RETURN_IF_ERROR(Prepare("UPDATE head SET revision=?1", &set_revision_));
  sqlite3_stmt* head = nullptr;
  UPIPE_RETURN_IF_ERROR(Prepare("SELECT revision FROM head", &head));
  const bool found = sqlite3_step(head) == SQLITE_ROW;
  if (found) revision_ = sqlite3_column_int64(head, 0);
  sqlite3_finalize(head);
  if (!found) return absl::DataLossError(absl::StrCat(path_, " has no head revision"));
  return absl::OkStatus();
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
