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
  // Opens or creates `path`. FailedPrecondition when another process holds it, or when its schema
  // is another version's.
  static absl::StatusOr<std::unique_ptr<SqliteStore>> Open(const std::string& path);
  ~SqliteStore() override;
  SqliteStore(const SqliteStore&) = delete;
  SqliteStore& operator=(const SqliteStore&) = delete;

  absl::StatusOr<int64_t> Commit(absl::Span<const Batch> batches) override;
  absl::StatusOr<std::vector<Entry>> List(absl::string_view prefix) override;
  int64_t Revision() const override { return revision_; }

 private:
  SqliteStore(sqlite3* db, std::string path) : db_(db), path_(std::move(path)) {}
  absl::Status Exec(const char* sql);
  absl::Status Error(absl::string_view attempted) const;
  absl::Status Initialize();
  absl::Status Prepare(const char* sql, sqlite3_stmt** statement);
  absl::StatusOr<int64_t> RevisionOf(const std::string& key);
  absl::Status ApplyAll(absl::Span<const Batch> batches, int64_t* revision);
  absl::Status Apply(const Write& write, int64_t revision);
  absl::Status SaveRevision(int64_t revision);

  sqlite3* db_;
  std::string path_;
  sqlite3_stmt* select_revision_ = nullptr;
  sqlite3_stmt* put_ = nullptr;
  sqlite3_stmt* remove_ = nullptr;
  sqlite3_stmt* set_revision_ = nullptr;
  int64_t revision_ = 0;
  absl::Status broken_;  // the first failure; answered from then on
};

}  // namespace upipe::coordinator
