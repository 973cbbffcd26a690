// Plans of a job small enough to run dry a hundred times a second.
#pragma once

#include <string>
#include <vector>

#include "absl/strings/str_join.h"
#include "common/check.h"
#include "common/spec/yaml_spec.h"
#include "planner/plan.h"

namespace upipe::planner {

inline v1::RunPlan TinyPlan(const std::vector<std::string>& overrides) {
  constexpr char kJob[] = R"(name: tiny
model: {vocab_size: 64, hidden_size: 32, num_layers: 3, num_heads: 8, num_kv_heads: 2, head_dim: 8,
  intermediate_size: 48}
data: {path: none}
parallel: {ranks: 4, method: upipe, heads_per_stage: 4}
train: {context: 256, steps: 3}
)";
  const auto spec = ParseJobSpecYaml(kJob, "job.yaml", overrides);
  UPIPE_CHECK(spec.ok()) << spec.status();
  auto plan = MakeRunPlan(*spec, {.check_data = false});
  UPIPE_CHECK(plan.ok()) << absl::StrJoin(overrides, " ") << ": " << plan.status();
  return *std::move(plan);
}

}  // namespace upipe::planner
