#include "tests/sim/system/checkpoint_root.h"

#include "absl/strings/str_cat.h"

namespace upipe::sim {

std::optional<StepKey> JobFolder::Newest(std::vector<StepKey>* passed_over) const {
  for (auto at = manifests.rbegin(); at != manifests.rend(); ++at) {
    if (!at->second) return at->first;
    passed_over->push_back(at->first);
  }
  return std::nullopt;
}

bool JobFolder::IsWhole(const StepKey& key) const {
  const auto found = manifests.find(key);
  return found != manifests.end() && !found->second;
}

void JobFolder::Damage() {
  if (manifests.empty()) return;
  manifests.rbegin()->second = true;
  ever_damaged.insert(manifests.rbegin()->first);
}

void JobFolder::Retain(const StepKey& newest, int keep) {
  int kept = 0;
  for (auto at = manifests.upper_bound(newest); at != manifests.begin();) {
    --at;
    if (++kept > keep) at = manifests.erase(at);
  }
  std::erase_if(summaries, [&](const auto& entry) {
    return entry.first < newest && !manifests.contains(entry.first);
  });
}

v1::CheckpointRef RefOf(const std::string& job, const StepKey& key) {
  v1::CheckpointRef ref;
  ref.set_generation(key.first);
  ref.set_step(key.second);
  ref.set_manifest_sha256(absl::StrCat(job, "/", key.first, "/", key.second));
  return ref;
}

}  // namespace upipe::sim
