#include "coordinator/store/store.h"

#include <set>

#include "absl/strings/str_cat.h"

namespace upipe::coordinator {

absl::Status ValidateBatch(const Batch& batch) {
  if (batch.writes.empty()) return absl::InvalidArgumentError("a batch without writes");
  if (batch.writes.size() > kMaxBatchWrites) {
    return absl::InvalidArgumentError(absl::StrCat(
        "a batch of ", batch.writes.size(), " writes, at most ", kMaxBatchWrites, " are allowed"));
  }
  size_t bytes = 0;
  std::set<absl::string_view> keys;
  for (const Write& write : batch.writes) {
    if (write.key.empty()) return absl::InvalidArgumentError("a write without a key");
    if (!keys.insert(write.key).second) {
      return absl::InvalidArgumentError(absl::StrCat("key ", write.key, " twice in one batch"));
    }
    bytes += write.key.size() + (write.value ? write.value->size() : 0);
  }
  if (bytes > kMaxBatchBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("a batch of ", bytes, " bytes, at most ", kMaxBatchBytes, " are allowed"));
  }
  return absl::OkStatus();
}

}  // namespace upipe::coordinator
