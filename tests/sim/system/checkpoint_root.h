// The checkpoint folder of all jobs as the control plane sees it: whose it is, which summaries and
// manifests lie there, and which of them are damaged. Nothing in it is lost with a machine.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "upipe/v1/report.pb.h"

namespace upipe::sim {

using StepKey = std::pair<int64_t, int64_t>;  // generation, step

struct JobFolder {
  int64_t owner_generation = 0;
  std::string owner_nonce;
  std::map<StepKey, std::set<int>> summaries;  // ranks
  std::map<StepKey, bool> manifests;           // whether damaged
  std::set<StepKey> ever_committed;
  std::set<StepKey> ever_damaged;

  // What rank 0 proposes: the newest manifest that is whole, and problems of newer ones.
  std::optional<StepKey> Newest(std::vector<StepKey>* passed_over) const;
  bool IsWhole(const StepKey& key) const;
  void Damage();  // the newest
  // On the coordinator's order: the newest `keep` up to `newest` stay.
  void Retain(const StepKey& newest, int keep);
};

// By job id.
using CheckpointRoot = std::map<std::string, JobFolder>;

v1::CheckpointRef RefOf(const std::string& job, const StepKey& key);
inline StepKey KeyOf(const v1::CheckpointRef& ref) { return {ref.generation(), ref.step()}; }

}  // namespace upipe::sim
