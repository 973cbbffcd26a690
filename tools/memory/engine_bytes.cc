#include "tools/memory/engine_bytes.h"

#include <algorithm>
#include <cmath>
#include <map>

#include "common/status.h"
#include "planner/plan.h"

namespace upipe::memory {
namespace {

constexpr int64_t kShort = 64 << 10;  // where the bytes of a layer are found
constexpr int64_t kFewLayers = 2;  // and twice as many: a checkpoint stride of 2 is whole in both

v1::JobSpec SpecOf(const EngineSetup& setup, int64_t num_layers, int64_t context) {
  v1::JobSpec spec;
  spec.set_name("memory");
  spec.mutable_data()->set_path("unused");
  *spec.mutable_model() = setup.model;
  spec.mutable_model()->set_num_layers(num_layers);
  v1::ParallelSpec& parallel = *spec.mutable_parallel();
  parallel.set_ranks(setup.ulysses_ranks * setup.ring_ranks);
  parallel.set_method(setup.method);
  if (setup.method == v1::METHOD_UPIPE) {
    parallel.set_heads_per_stage(setup.ulysses_ranks);
    parallel.set_ring_ranks(setup.ring_ranks);
  }
  *spec.mutable_memory() = setup.memory;
  spec.mutable_train()->set_context(context);
  spec.mutable_train()->set_steps(1);
  spec.mutable_train()->set_dtype(v1::DTYPE_BF16);
  return spec;
}

// The schedule knows no lengths and no layers: that of a short plan serves all.
absl::StatusOr<v1::RunPlan> ShortPlan(const EngineSetup& setup) {
  return planner::MakeRunPlan(SpecOf(setup, kFewLayers, kShort / 16), {.check_data = false});
}

absl::StatusOr<EngineBytes> Run(v1::RunPlan& plan, int64_t num_layers, int64_t context, int rank) {
  plan.mutable_spec()->mutable_model()->set_num_layers(num_layers);
  plan.mutable_spec()->mutable_train()->set_context(context);
  UPIPE_ASSIGN_OR_RETURN(const planner::RankDryRun run, planner::DryRunRank(plan, rank));
  return EngineBytes{.device = run.rank.memory().peak_bytes(),
                     .host = run.rank.host_memory().peak_bytes()};
}

}  // namespace

absl::StatusOr<EngineBytes> WholeStep(const EngineSetup& setup, int64_t context, int rank) {
  UPIPE_ASSIGN_OR_RETURN(v1::RunPlan plan, ShortPlan(setup));
  return Run(plan, setup.model.num_layers(), context, rank);
}

absl::StatusOr<std::vector<EngineBytes>> ComposedSteps(const EngineSetup& setup,
                                                       const std::vector<int64_t>& contexts) {
  UPIPE_ASSIGN_OR_RETURN(v1::RunPlan plan, ShortPlan(setup));
  std::map<int64_t, EngineBytes> runs;
  const auto at = [&](int64_t context) -> absl::StatusOr<EngineBytes> {
    if (const auto run = runs.find(context); run != runs.end()) return run->second;
    UPIPE_ASSIGN_OR_RETURN(runs[context], Run(plan, kFewLayers, context, /*rank=*/0));
    return runs[context];
  };
  UPIPE_ASSIGN_OR_RETURN(const EngineBytes few, at(kShort));
  UPIPE_ASSIGN_OR_RETURN(const EngineBytes twice, Run(plan, 2 * kFewLayers, kShort, /*rank=*/0));
  const int64_t more = setup.model.num_layers() / kFewLayers - 1;
  std::vector<EngineBytes> all;
  for (const int64_t context : contexts) {
    UPIPE_ASSIGN_OR_RETURN(EngineBytes bytes, at(std::min(context, kLongestRun)));
    if (context > kLongestRun) {
      UPIPE_ASSIGN_OR_RETURN(const EngineBytes before, at(kLineFrom));
      const double run =
          static_cast<double>(context - kLongestRun) / static_cast<double>(kLongestRun - kLineFrom);
      const auto grow = [run](int64_t& to, int64_t from) {
        to += std::llround(run * static_cast<double>(to - from));
      };
      grow(bytes.device, before.device);
      grow(bytes.host, before.host);
    }
    bytes.device += more * (twice.device - few.device);
    bytes.host += more * (twice.host - few.host) * context / kShort;
    all.push_back(bytes);
  }
  return all;
}

}  // namespace upipe::memory
