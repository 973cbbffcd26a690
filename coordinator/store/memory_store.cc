#include "coordinator/store/memory_store.h"

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "common/status.h"

namespace upipe::coordinator {

absl::StatusOr<int64_t> MemoryStore::Commit(absl::Span<const Batch> batches) {
  for (const Batch& batch : batches) UPIPE_RETURN_IF_ERROR(ValidateBatch(batch));
  if (batches.empty()) return revision_;
  auto cells = cells_;
  int64_t revision = revision_;
  for (const Batch& batch : batches) {
    for (const Write& write : batch.writes) {
      if (!write.expected_revision) continue;
      const auto found = cells.find(write.key);
      const int64_t current = found == cells.end() ? 0 : found->second.revision;
      if (current != *write.expected_revision) {
        return absl::AbortedError(absl::StrCat("key ", write.key, " has revision ", current,
                                               ", expected ", *write.expected_revision));
      }
    }
    ++revision;
    for (const Write& write : batch.writes) {
      if (write.value) {
        cells[write.key] = {*write.value, revision};
      } else {
        cells.erase(write.key);
      }
    }
  }
  cells_ = std::move(cells);
  return revision_ = revision;
}

absl::StatusOr<std::vector<Entry>> MemoryStore::List(absl::string_view prefix) {
  std::vector<Entry> entries;
  for (auto it = cells_.lower_bound(prefix);
       it != cells_.end() && absl::StartsWith(it->first, prefix); ++it) {
    entries.push_back({it->first, it->second.value, it->second.revision});
  }
  return entries;
}

absl::StatusOr<std::unique_ptr<StoreCopy>> MemoryStore::StartCopy(const std::string&) {
  return absl::UnimplementedError("a store in memory has no file to copy");
}

}  // namespace upipe::coordinator
