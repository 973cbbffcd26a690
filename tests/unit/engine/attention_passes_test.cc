// How often queries and keys cross device memory between projection and exchange, and attention's
// output after it, as a dry run of a CUDA device counts them: RoPE reads a projection once and
// writes what is sent, no copy packs it, and of the output the way home is the only one.
#include <gtest/gtest.h>

#include <map>
#include <string>
#include <tuple>

#include "engine/comm/dry/dry_communicator.h"
#include "kernels/device_factory.h"
#include "kernels/dry/cuda_stand_in.h"
#include "tests/support/engine/engine_harness.h"

namespace upipe::testing {
namespace {

// Has a device count what stages of attention do, and nothing else, in `stages`.
class StageCounter final : public engine::MomentObserver {
 public:
  explicit StageCounter(kernels::DryDevice& device) : device_(device) {}
  void Begin(const engine::Moment& moment) override {
    device_.CountInto(moment.stage >= 0 ? &stages : nullptr);
  }
  kernels::DryCounts stages;

 private:
  kernels::DryDevice& device_;
};

// What attention's stages cost in a forward pass of rank 1, by op.
std::map<std::string, kernels::DryOpCount> StageCosts(const v1::RunPlan& plan) {
  const auto device = kernels::CreateDryDevice("cuda", kernels::kCudnnAttention);
  EXPECT_TRUE(device.ok()) << device.status();
  const auto streams = engine::RankStreams::Create(**device, 1);
  comm::DryCommunicator comm(1, plan.spec().parallel().ranks());
  StageCounter counter(**device);
  const engine::RankContext context({.device = **device,
                                     .streams = streams,
                                     .comm = comm,
                                     .observer = &counter,
                                     .storage = model::StorageTypeOf(plan.spec().train()),
                                     .mesh = parallel::Mesh::From(plan.spec().parallel())});
  const auto step = train::TrainStep::Create(context, plan);
  EXPECT_TRUE(step.ok()) << step.status();
  EXPECT_TRUE((*step)->Evaluate(1, {}).ok());
  return counter.stages.by_op();
}

SmallJob Job(v1::Method method, int ring_ranks, int64_t heads_per_rank) {
  return {.ranks = 4,
          .heads_per_rank = heads_per_rank,
          .num_heads = 8,
          .num_kv_heads = 8,
          .head_dim = 16,
          .num_layers = 1,
          .context = 64,
          .method = method,
          .bf16 = true,
          .ring_ranks = ring_ranks};
}

TEST(AttentionPasses, RopeIsThePackOfQueriesAndKeys) {
  for (const auto& [method, ring_ranks, heads_per_rank] : {std::tuple{v1::METHOD_UPIPE, 1, 1},
                                                           {v1::METHOD_UPIPE, 1, 2},
                                                           {v1::METHOD_ULYSSES, 1, 2},
                                                           {v1::METHOD_USP, 2, 4},
                                                           {v1::METHOD_UPIPE, 2, 1}}) {
    const SmallJob job = Job(method, ring_ranks, heads_per_rank);
    SCOPED_TRACE(v1::Method_Name(method) + " u " + std::to_string(heads_per_rank));
    const auto plan = MakePlan(MakeSpec(job));
    ASSERT_TRUE(plan.ok()) << plan.status();
    auto costs = StageCosts(*plan);
    const double tokens = static_cast<double>(plan->tokens_per_rank());
    const double bytes_of_heads = tokens * static_cast<double>(job.head_dim) * 2;
    const kernels::DryOpCount rope = costs["rope"], copies = costs["strided_copy"];
    const double queries_and_keys = 2.0 * static_cast<double>(job.num_heads) * bytes_of_heads;
    const double positions = static_cast<double>(rope.calls) * tokens * sizeof(int64_t);
    EXPECT_EQ(rope.cost.bytes_written, queries_and_keys);
    EXPECT_EQ(rope.cost.bytes_read, queries_and_keys + positions);
    // Outputs go home; those of a ring, merged in fp32, are rounded first.
    const double output = static_cast<double>(job.num_heads) * bytes_of_heads;
    EXPECT_EQ(copies.cost.bytes_written, ring_ranks == 1 ? output : 2 * output);
  }
}

}  // namespace
}  // namespace upipe::testing
