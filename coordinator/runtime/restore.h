// `upipe-coordinator --restore`: a backup becomes the store of a state folder that has none.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"

namespace upipe::coordinator {

struct Restored {
  int64_t bytes = 0;
  int64_t revision = 0;  // of the backup
  int64_t jobs = 0;
};

// Makes `store_path` from `backup_path`. The file is checked whole (`sha256` too unless empty),
// and appears whole or not at all. The next coordinator on it knows that workers may have seen
// later generations, and gets an epoch above all that coordinators since the backup can have had.
// FailedPrecondition: there is a store already, or the file is of another version; DataLoss: the
// file is damaged or no backup.
absl::StatusOr<Restored> RestoreStore(const std::string& backup_path, const std::string& sha256,
                                      const std::string& store_path);

}  // namespace upipe::coordinator
