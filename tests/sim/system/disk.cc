#include "tests/sim/system/disk.h"

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "common/check.h"
#include "common/status.h"
#include "upipe/v1/store.pb.h"

namespace upipe::sim {

using coordinator::Batch;
using coordinator::Entry;
using coordinator::Write;

absl::StatusOr<int64_t> Disk::Commit(absl::Span<const Batch> batches) {
  for (const Batch& batch : batches) {
    UPIPE_RETURN_IF_ERROR(coordinator::ValidateBatch(batch));
    for (const Write& write : batch.writes) {
      if (!write.expected_revision) continue;
      const auto found = cells_.find(write.key);
      const int64_t current = found == cells_.end() ? 0 : found->second.revision;
      if (current != *write.expected_revision) {
        return absl::AbortedError(absl::StrCat("key ", write.key, " has revision ", current,
                                               ", expected ", *write.expected_revision));
      }
    }
    ++revision_;
    for (const Write& write : batch.writes) {
      if (write.value) {
        cells_[write.key] = {*write.value, revision_};
      } else {
        cells_.erase(write.key);
      }
    }
  }
  return revision_;
}

absl::StatusOr<std::vector<Entry>> Disk::List(absl::string_view prefix) {
  std::vector<Entry> entries;
  for (auto at = cells_.lower_bound(prefix);
       at != cells_.end() && absl::StartsWith(at->first, prefix); ++at) {
    entries.push_back({at->first, at->second.value, at->second.revision});
  }
  return entries;
}

const std::string* Disk::Find(const std::string& key) const {
  const auto found = cells_.find(key);
  return found == cells_.end() ? nullptr : &found->second.value;
}

void Disk::MarkRestored() {
  constexpr int64_t kEpochsSkipped = int64_t{1} << 20;
  Cell& cell = cells_["meta/epoch"];
  v1::EpochRecord epoch;
  UPIPE_CHECK(epoch.ParseFromString(cell.value));
  epoch.set_epoch(epoch.epoch() + kEpochsSkipped);
  epoch.set_restored(true);
  cell = {epoch.SerializeAsString(), ++revision_};
}

}  // namespace upipe::sim
