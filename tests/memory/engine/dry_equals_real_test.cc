// The planner's promise: what a rank takes is what its dry run said, to the byte, by tag, at the
// peak and in the arena, of the device and of the host, and so is what it sends to each peer. The
// real devices get pools of exactly the planned size, so one byte more would fail by itself.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <optional>
#include <ostream>
#include <tuple>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/spec/yaml_spec.h"
#include "common/status.h"
#include "engine/train/rank_run.h"
#include "tests/memory/engine/schedule_point.h"
#include "tests/support/engine/engine_harness.h"

namespace upipe::testing {
namespace {

void ExpectTraffic(const comm::CommStats& before, const comm::CommStats& after,
                   const v1::RankPlan& planned) {
  ASSERT_EQ(static_cast<int>(after.bytes_sent_to_peer.size()), planned.bytes_sent_to_peer_size());
  for (int peer = 0; peer < planned.bytes_sent_to_peer_size(); ++peer) {
    EXPECT_EQ(after.bytes_sent_to_peer[peer] - before.bytes_sent_to_peer[peer],
              planned.bytes_sent_to_peer(peer))
        << "from rank " << planned.rank() << " to " << peer;
  }
}

// Trains and evaluates on real devices, and compares every rank's pools and traffic with the plan.
void ExpectDryEqualsReal(const v1::JobSpec& spec, int64_t steps) {
  const auto plan = MakePlan(spec);
  ASSERT_TRUE(plan.ok()) << plan.status();
  const Sequence sequence = MakeSequence(spec, 1);
  const bool evaluates = plan->spec().train().eval_sequences() > 0;
  const absl::Status status = RunRanks({.plan = *plan}, [&](Rank rank) -> absl::Status {
    const v1::RankPlan& planned = plan->ranks(rank.rank);
    for (int64_t step = 1; step <= steps; ++step) {
      const comm::CommStats before = rank.context.comm().stats();
      UPIPE_RETURN_IF_ERROR(rank.step.Vote({}).status());
      UPIPE_RETURN_IF_ERROR(RunStep(rank, step, sequence).status());
      ExpectTraffic(before, rank.context.comm().stats(), planned);
      if (evaluates) UPIPE_RETURN_IF_ERROR(Evaluate(rank, step, {sequence}).status());
    }
    kernels::Device& device = rank.context.device();
    EXPECT_EQ(train::ToMessage(device.allocator().stats()).DebugString(),
              planned.memory().DebugString())
        << "device of rank " << rank.rank;
    EXPECT_EQ(train::ToMessage(device.host_allocator().stats()).DebugString(),
              planned.host_memory().DebugString())
        << "host of rank " << rank.rank;
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

struct Shape {
  const char* name;
  SmallJob job;
  std::optional<int64_t> eval_sequences = {};
  int threads = 1;
};
void PrintTo(const Shape& shape, std::ostream* out) { *out << shape.name; }

class DryEqualsReal : public ::testing::TestWithParam<Shape> {};

TEST_P(DryEqualsReal, ToTheByte) {
  v1::JobSpec spec = MakeSpec(GetParam().job);
  if (GetParam().eval_sequences)
    spec.mutable_train()->set_eval_sequences(*GetParam().eval_sequences);
  spec.mutable_parallel()->set_threads_per_rank(GetParam().threads);
  ExpectDryEqualsReal(spec, 2);
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, DryEqualsReal,
    ::testing::Values(
        Shape{"heads28_on_8_ranks",
              {.ranks = 8, .num_heads = 28, .num_kv_heads = 4, .context = 50}},
        Shape{"heads28_on_8_ranks_u3",
              {.ranks = 8, .heads_per_rank = 3, .num_heads = 28, .num_kv_heads = 4, .context = 50}},
        Shape{"one_kv_head", {.ranks = 4, .heads_per_rank = 2, .num_heads = 8, .num_kv_heads = 1}},
        Shape{"fewer_kv_heads_than_ranks", {.ranks = 4, .num_heads = 8, .num_kv_heads = 2}},
        Shape{"kv_heads_not_divisible_by_ranks",
              {.ranks = 4, .heads_per_rank = 3, .num_heads = 12, .num_kv_heads = 6, .context = 31}},
        Shape{"ranks_without_heads", {.ranks = 5, .num_heads = 3, .num_kv_heads = 3}},
        Shape{"tokens_not_divisible_by_tile",
              {.ranks = 2, .num_heads = 2, .num_kv_heads = 1, .context = 1301}},
        Shape{"context_shorter_than_ranks", {.ranks = 4, .context = 3}},
        Shape{"tied_embeddings", {.ranks = 3, .vocab_size = 211, .tie_embeddings = true}},
        Shape{"one_rank_one_token", {.ranks = 1, .heads_per_rank = 4, .context = 1}},
        Shape{"ulysses", {.ranks = 4, .num_heads = 8, .method = v1::METHOD_ULYSSES}},
        Shape{"no_evaluation", {.ranks = 2}, 0},
        Shape{"two_threads", {.ranks = 2, .context = 700}, 1, 2},
        Shape{"reference_backend", {.ranks = 2, .backend = "reference"}}),
    [](const auto& info) { return info.param.name; });

// ---- every method with every policy

struct Method {
  const char* name;
  v1::Method method;
  int ulysses_ranks, ring_ranks;
};
struct Policy {
  const char* name;
  engine::MemoryPolicy policy;
  int64_t query_chunks = 1;
};
void PrintTo(const Method& method, std::ostream* out) { *out << method.name; }
void PrintTo(const Policy& policy, std::ostream* out) { *out << policy.name; }

using engine::Place;
using Output = engine::MemoryPolicy::AttentionOutput;

class EveryPolicy : public ::testing::TestWithParam<std::tuple<Method, Policy>> {};

// Heads that no number of ranks divides, a context that is padded, layers that no stride divides.
Point PointOf(const Method& method, const Policy& policy) {
  Point point{.method = method.method,
              .ulysses_ranks = method.ulysses_ranks,
              .ring_ranks = method.ring_ranks,
              .query_chunks = policy.query_chunks,
              .num_heads = 6,
              .num_kv_heads = 3,
              .num_layers = 3,
              .context = 75,
              .policy = policy.policy};
  if (method.method == v1::METHOD_FPDT) {
    point.policy.layer_inputs = Place::kHost;
    point.policy.hidden_stream = Place::kHost;
    point.policy.stage_kv = Place::kHost;
    point.query_chunks = std::max<int64_t>(point.query_chunks, 2);
  }
  return point;
}

// Refused when a job is submitted (common/spec/parallel_rules.cc).
bool IsRefused(const Point& point) {
  return (point.policy.stage_kv == Place::kHost && point.ring_ranks > 1) ||
         (point.policy.hidden_stream == Place::kHost &&
          point.policy.attention_output == Output::kDevice) ||
         (point.policy.ring_keeps_kv && point.ring_ranks == 1);
}

TEST_P(EveryPolicy, ToTheByte) {
  const auto& [method, policy] = GetParam();
  Point point = PointOf(method, policy);
  if (IsRefused(point)) {
    EXPECT_EQ(MakePlan(point.Spec()).status().code(), absl::StatusCode::kInvalidArgument);
    return;
  }
  for (const bool bf16 : {false, true}) {
    SCOPED_TRACE(bf16 ? "bf16" : "fp32");
    point.bf16 = bf16;
    ExpectDryEqualsReal(point.Spec(), bf16 ? 1 : 2);
  }
}

INSTANTIATE_TEST_SUITE_P(
    Methods, EveryPolicy,
    ::testing::Combine(
        ::testing::Values(
            Method{"upipe", v1::METHOD_UPIPE, 4, 1}, Method{"ulysses", v1::METHOD_ULYSSES, 4, 1},
            Method{"ring", v1::METHOD_RING, 1, 4}, Method{"usp", v1::METHOD_USP, 2, 2},
            Method{"hybrid", v1::METHOD_UPIPE, 2, 2}, Method{"fpdt", v1::METHOD_FPDT, 4, 1}),
        ::testing::Values(
            Policy{"plain", {}},
            Policy{"chunks", {}, 4}, Policy{"overlap", {.overlap = true}},
            Policy{"keep", {.ring_keeps_kv = true}},
            Policy{"keep_chunks_overlap", {.overlap = true, .ring_keeps_kv = true}, 3},
            Policy{"outputs", {.attention_output = Output::kDevice}},
            Policy{"outputs_on_host", {.attention_output = Output::kHost, .checkpoint_stride = 2}},
            Policy{"inputs_on_host", {.layer_inputs = Place::kHost, .checkpoint_stride = 2}},
            Policy{"hidden_on_host",
                   {.layer_inputs = Place::kHost, .hidden_stream = Place::kHost, .overlap = true}},
            Policy{"kv_on_host", {.stage_kv = Place::kHost}, 3},
            Policy{"optimizer_on_host", {.optimizer = Place::kHost}},
            Policy{"all_on_host",
                   {.attention_output = Output::kHost,
                    .layer_inputs = Place::kHost,
                    .hidden_stream = Place::kHost,
                    .stage_kv = Place::kHost,
                    .overlap = true,
                    .optimizer = Place::kHost},
                   3})),
    [](const auto& info) {
      return absl::StrCat(std::get<0>(info.param).name, "_", std::get<1>(info.param).name);
    });

// The copy of a checkpoint is in the plan, where the optimizer lives on the host too.
TEST(DryEqualsReal, WithCheckpoints) {
  for (const auto place : {v1::PLACE_DEVICE, v1::PLACE_HOST}) {
    for (const int dp_ranks : {1, 2}) {
      SCOPED_TRACE(absl::StrCat("optimizer ", place, ", dp ", dp_ranks));
      v1::JobSpec spec = MakeSpec({.ranks = 4, .dp_ranks = dp_ranks, .optimizer = place});
      spec.mutable_checkpoint()->set_path("/checkpoints");
      const auto plan = MakePlan(spec);
      ASSERT_TRUE(plan.ok()) << plan.status();
      std::vector<Sequence> sequences;
      for (int i = 0; i < dp_ranks; ++i) sequences.push_back(MakeSequence(spec, 1 + i));
      const absl::Status status = RunRanks({.plan = *plan}, [&](Rank rank) -> absl::Status {
        UPIPE_RETURN_IF_ERROR(rank.step.Vote({}).status());
        UPIPE_RETURN_IF_ERROR(RunStep(rank, 1, sequences).status());
        UPIPE_RETURN_IF_ERROR(Evaluate(rank, 1, sequences).status());
        UPIPE_RETURN_IF_ERROR(rank.step.TakeSnapshot().status());
        kernels::Device& device = rank.context.device();
        const v1::RankPlan& planned = plan->ranks(rank.rank);
        EXPECT_EQ(train::ToMessage(device.allocator().stats()).DebugString(),
                  planned.memory().DebugString());
        EXPECT_EQ(train::ToMessage(device.host_allocator().stats()).DebugString(),
                  planned.host_memory().DebugString());
        return absl::OkStatus();
      });
      EXPECT_TRUE(status.ok()) << status;
    }
  }
}

TEST(DryEqualsReal, TheDemo) {
  const auto spec = ReadJobSpecFile(
      absl::StrCat(std::getenv("UPIPE_SOURCE_DIR"), "/deploy/samples/demo.yaml"), {});
  ASSERT_TRUE(spec.ok()) << spec.status();
  ExpectDryEqualsReal(*spec, 1);
}

}  // namespace
}  // namespace upipe::testing
