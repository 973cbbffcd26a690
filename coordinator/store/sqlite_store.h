// The store in one SQLite file: write-ahead log, synchronous=FULL, exclusively locked for the life
// of the process. SQLite appears in this folder only.
#pragma once

#include <memory>
#include <string>

#include "coordinator/store/store.h"

struct sqlite3;
struct sqlite3_stmt;

namespace upipe::coordinator {

class SqliteStore : public Store {
 public:
  // Opens or creates `path`, through the registered VFS named `vfs` (empty: the system's files).
  // What earlier processes committed is made durable once more, for one of them may have ended at
  // a failed fsync. FailedPrecondition when another process holds it, when it is no store, or when
  // its schema is another version's.
  static absl::StatusOr<std::unique_ptr<SqliteStore>> Open(const std::string& path,
                                                           const std::string& vfs = "");
  ~SqliteStore() override;
  SqliteStore(const SqliteStore&) = delete;
  SqliteStore& operator=(const SqliteStore&) = delete;

  absl::StatusOr<int64_t> Commit(absl::Span<const Batch> batches) override;
  absl::StatusOr<std::vector<Entry>> List(absl::string_view prefix) override;
  int64_t Revision() const override { return revision_; }
  absl::StatusOr<std::unique_ptr<StoreCopy>> StartCopy(const std::string& path) override;

  // Reads every page. DataLoss, with what SQLite found wrong.
  absl::Status CheckIntegrity();

 private:
  SqliteStore(sqlite3* db, std::string path, std::string vfs)
      : db_(db), path_(std::move(path)), vfs_(std::move(vfs)) {}
  absl::Status Exec(const char* sql);
  absl::Status Error(absl::string_view attempted) const;
  absl::StatusOr<int64_t> IntegerOf(const char* sql);
  absl::Status Initialize();
  absl::Status Lock();
  absl::Status RewriteLog();
  absl::Status SyncNames();
  absl::Status PrepareSchema();
  absl::Status Prepare(const char* sql, sqlite3_stmt** statement);
  absl::StatusOr<int64_t> RevisionOf(const std::string& key);
  absl::Status ApplyAll(absl::Span<const Batch> batches, int64_t* revision);
  absl::Status Apply(const Write& write, int64_t revision);
  absl::Status SaveRevision(int64_t revision);

  sqlite3* db_;
  const std::string path_;
  const std::string vfs_;
  sqlite3_stmt* select_revision_ = nullptr;
  sqlite3_stmt* put_ = nullptr;
  sqlite3_stmt* remove_ = nullptr;
  sqlite3_stmt* set_revision_ = nullptr;
  int64_t revision_ = 0;
  absl::Status broken_;  // the first failure; answered from then on
};

}  // namespace upipe::coordinator
