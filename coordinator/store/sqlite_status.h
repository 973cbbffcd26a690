// SQLite's result codes as statuses.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

struct sqlite3;

namespace upipe::coordinator {

// The error of the connection's last call, which did what `attempted` says to `path`.
// FailedPrecondition: another process holds the file; ResourceExhausted: the disk is full;
// DataLoss: the file is damaged; else Unavailable.
absl::Status SqliteStatus(sqlite3* db, absl::string_view attempted, const std::string& path);
// The same for a bare code.
absl::Status SqliteStatus(int code, absl::string_view attempted, const std::string& path);

}  // namespace upipe::coordinator
