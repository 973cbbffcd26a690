#include "coordinator/store/sqlite_status.h"

#include <sqlite3.h>

#include "absl/strings/str_cat.h"

namespace upipe::coordinator {
namespace {

absl::Status Make(int code, absl::string_view attempted, const std::string& path,
                  absl::string_view message) {
  const int primary = code & 0xff;
  if (primary == SQLITE_BUSY || primary == SQLITE_LOCKED) {
    return absl::FailedPreconditionError(absl::StrCat(
        "another coordinator holds ", path, "; stop it, or give this one another --state-dir"));
  }
  const std::string text = absl::StrCat(attempted, " ", path, ": ", message);
  if (primary == SQLITE_FULL) return absl::ResourceExhaustedError(text);
  if (primary == SQLITE_CORRUPT || primary == SQLITE_NOTADB) return absl::DataLossError(text);
  return absl::UnavailableError(text);
}

}  // namespace

absl::Status SqliteStatus(sqlite3* db, absl::string_view attempted, const std::string& path) {
  if (db == nullptr) return SqliteStatus(SQLITE_NOMEM, attempted, path);
  return Make(sqlite3_errcode(db), attempted, path, sqlite3_errmsg(db));
}

absl::Status SqliteStatus(int code, absl::string_view attempted, const std::string& path) {
  return Make(code, attempted, path, sqlite3_errstr(code));
}

}  // namespace upipe::coordinator
