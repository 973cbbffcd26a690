// A copy of an open SQLite store, page by page on its own connection: pages that commits change
// after they were copied are copied again by SQLite.
#pragma once

#include <memory>
#include <string>

#include "coordinator/store/store.h"

struct sqlite3;
struct sqlite3_backup;

namespace upipe::coordinator {

class SqliteCopy : public StoreCopy {
 public:
  // `source` outlives the copy. There is no file at `path`.
  static absl::StatusOr<std::unique_ptr<StoreCopy>> Start(sqlite3* source, const std::string& path,
                                                          const std::string& vfs);
  ~SqliteCopy() override;
  SqliteCopy(const SqliteCopy&) = delete;
  SqliteCopy& operator=(const SqliteCopy&) = delete;

  absl::StatusOr<bool> Step() override;

 private:
  SqliteCopy(std::string path, sqlite3* copy) : path_(std::move(path)), copy_(copy) {}
  absl::Status Close();

  const std::string path_;
  sqlite3* copy_;
  sqlite3_backup* backup_ = nullptr;
};

}  // namespace upipe::coordinator
