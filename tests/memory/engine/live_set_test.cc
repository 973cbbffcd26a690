// The bytes of whole training steps by tag, on the device and on the host, for methods and memory
// policies: a formula each (step_formula.h). A buffer that outgrows its formula by a byte fails.
#include <gtest/gtest.h>

#include <ctime>
#include <iostream>
#include <ostream>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "engine/optim/optimizer.h"
#include "planner/plan.h"
#include "tests/memory/engine/step_formula.h"

namespace upipe::testing {
namespace {

using engine::Place;
using Output = engine::MemoryPolicy::AttentionOutput;

absl::StatusOr<v1::RunPlan> PlanOf(const Point& point) {
  return planner::MakeRunPlan(point.Spec(), {.check_data = false});
}

int64_t PeakOf(const v1::MemoryUsage& memory, const std::string& tag) {
  for (const auto& bytes : memory.tags()) {
    if (bytes.tag() == tag) return bytes.peak_bytes();
  }
  ADD_FAILURE() << "no tag " << tag;
  return -1;
}

void ExpectPool(const v1::MemoryUsage& memory, const kernels::TagBytes& formula,
                bool states_workspace, const char* where) {
  for (int tag = 0; tag < kernels::kNumMemoryTags; ++tag) {
    if (tag == static_cast<int>(kernels::MemoryTag::kWorkspace) && !states_workspace) continue;
    EXPECT_EQ(PeakOf(memory, kernels::kMemoryTagNames[tag]), formula[tag])
        << kernels::kMemoryTagNames[tag] << " on the " << where;
  }
  int64_t at_peak = 0;
  for (const auto& tag : memory.tags()) at_peak += tag.at_peak_bytes();
  EXPECT_EQ(at_peak, memory.peak_bytes());
  EXPECT_GE(memory.arena_bytes(), memory.peak_bytes());
}

struct Case {
  const char* name;
  Point point;
};
void PrintTo(const Case& c, std::ostream* out) { *out << Describe(c.point); }

class LiveSet : public ::testing::TestWithParam<Case> {};

TEST_P(LiveSet, EveryTagIsItsFormula) {
  for (const bool bf16 : {false, true}) {
    Point point = GetParam().point;
    point.bf16 = bf16;
    const auto plan = PlanOf(point);
    ASSERT_TRUE(plan.ok()) << plan.status();
    for (int rank = 0; rank < point.ranks(); ++rank) {
      SCOPED_TRACE(absl::StrCat(Describe(point), ", rank ", rank));
      const StepFormula formula(point, rank);
      const v1::RankPlan& measured = plan->ranks(rank);
      ExpectPool(measured.memory(), formula.Device(), formula.StatesWorkspace(), "device");
      ExpectPool(measured.host_memory(), formula.Host(), /*states_workspace=*/true, "host");
      EXPECT_EQ(measured.memory().attention_peak_bytes(), formula.Attention());
    }
  }
}

Point Small(int ulysses, int64_t u, int64_t heads, int64_t kv_heads) {
  return {
      .ulysses_ranks = ulysses, .heads_per_stage = u, .num_heads = heads, .num_kv_heads = kv_heads};
}
template <typename Change>
Point With(Point point, Change change) {
  change(point);
  return point;
}
Point Paper(v1::Method method) {
  return With(Small(8, 1, 64, 8), [&](Point& p) {
    p.method = method;
    p.head_dim = 16;
    p.context = 4096;
  });
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, LiveSet,
    ::testing::Values(
        Case{"paper_upipe", Paper(v1::METHOD_UPIPE)},
        Case{"paper_ulysses", Paper(v1::METHOD_ULYSSES)},
        Case{"u2_divides_group", Small(4, 2, 32, 8)}, Case{"group_divides_u4", Small(2, 4, 16, 8)},
        Case{"as_many_kv_heads", Small(4, 1, 8, 8)}, Case{"fewer_kv_heads", Small(4, 1, 8, 2)},
        Case{"one_rank", With(Small(1, 1, 4, 1), [](Point& p) { p.context = 1200; })},
        Case{"padded", With(Small(4, 1, 8, 4),
                            [](Point& p) {
                              p.context = 1301;
                              p.tied = true;
                            })},
        Case{"large_vocabulary", With(Small(4, 1, 8, 4), [](Point& p) { p.vocab_size = 100003; })},
        Case{"tied_large_vocabulary", With(Small(4, 1, 8, 4),
                                           [](Point& p) {
                                             p.vocab_size = 100003;
                                             p.tied = true;
                                           })},
        Case{"wide_blocks", With(Small(2, 1, 8, 2),
                                 [](Point& p) {
                                   p.hidden_size = 256;
                                   p.intermediate_size = 2048;
                                   p.num_layers = 3;
                                   p.context = 2048;
                                 })},
        Case{"million_tokens", With(Small(8, 1, 32, 8),
                                    [](Point& p) {
                                      p.head_dim = 128;
                                      p.hidden_size = 4096;
                                      p.intermediate_size = 14336;
                                      p.vocab_size = 128256;
                                      p.context = 1 << 20;
                                    })}),
    [](const auto& info) { return info.param.name; });

Point Method(v1::Method method, int ulysses, int ring, int64_t chunks) {
  return With(Small(ulysses, 1, 16, 8), [&](Point& p) {
    p.method = method;
    p.ring_ranks = ring;
    p.query_chunks = chunks;
    p.context = 1 << 14;
    if (method != v1::METHOD_FPDT) return;
    p.policy.layer_inputs = p.policy.hidden_stream = p.policy.stage_kv = Place::kHost;
  });
}

INSTANTIATE_TEST_SUITE_P(
    Methods, LiveSet,
    ::testing::Values(Case{"upipe", Method(v1::METHOD_UPIPE, 4, 1, 1)},
                      Case{"ulysses", Method(v1::METHOD_ULYSSES, 4, 1, 1)},
                      Case{"ring", Method(v1::METHOD_RING, 1, 4, 1)},
                      Case{"usp_pass", Method(v1::METHOD_USP, 2, 2, 1)},
                      Case{"usp_keep", With(Method(v1::METHOD_USP, 2, 2, 1),
                                            [](Point& p) { p.policy.ring_keeps_kv = true; })},
                      Case{"hybrid", Method(v1::METHOD_UPIPE, 2, 2, 1)},
                      Case{"fpdt", Method(v1::METHOD_FPDT, 4, 1, 4)},
                      Case{"upipe_chunks", Method(v1::METHOD_UPIPE, 4, 1, 4)},
                      Case{"upipe_overlap", With(Method(v1::METHOD_UPIPE, 4, 1, 1),
                                                 [](Point& p) { p.policy.overlap = true; })}),
    [](const auto& info) { return info.param.name; });

Point Deep(int64_t layers, const engine::MemoryPolicy& policy) {
  return With(Small(4, 1, 8, 4), [&](Point& p) {
    p.num_layers = layers;
    p.context = 2048;
    p.policy = policy;
  });
}
Point Stride(int64_t layers, int stride, Place inputs, Place hidden) {
  return Deep(layers,
              {.layer_inputs = inputs, .checkpoint_stride = stride, .hidden_stream = hidden});
}

INSTANTIATE_TEST_SUITE_P(
    Policies, LiveSet,
    ::testing::Values(
        Case{"inputs_on_host", Deep(5, {.layer_inputs = Place::kHost})},
        Case{"stride_two", Stride(5, 2, Place::kDevice, Place::kDevice)},
        Case{"stride_three", Stride(6, 3, Place::kDevice, Place::kDevice)},
        Case{"stride_of_all_layers", Stride(3, 3, Place::kDevice, Place::kDevice)},
        Case{"stride_two_on_host", Stride(5, 2, Place::kHost, Place::kDevice)},
        Case{"stride_three_on_host", Stride(6, 3, Place::kHost, Place::kDevice)},
        Case{"hidden_on_host", Stride(4, 1, Place::kHost, Place::kHost)},
        Case{"hidden_on_host_stride_two", Stride(5, 2, Place::kHost, Place::kHost)},
        Case{"outputs_kept", Deep(5, {.attention_output = Output::kDevice})},
        Case{"outputs_on_host", Deep(5, {.attention_output = Output::kHost})},
        Case{"outputs_kept_stride_two",
             Deep(5, {.attention_output = Output::kDevice, .checkpoint_stride = 2})},
        Case{"outputs_and_hidden_on_host", Deep(4, {.attention_output = Output::kHost,
                                                    .layer_inputs = Place::kHost,
                                                    .hidden_stream = Place::kHost})},
        Case{"optimizer_on_host", Deep(3, {.optimizer = Place::kHost})},
        Case{"optimizer_on_host_tied",
             With(Deep(3, {.optimizer = Place::kHost}), [](Point& p) { p.tied = true; })},
        Case{"optimizer_on_host_large_vocabulary",
             With(Deep(2, {.optimizer = Place::kHost}), [](Point& p) { p.vocab_size = 5003; })},
        Case{"optimizer_on_host_one_rank",
             With(Deep(3, {.optimizer = Place::kHost}), [](Point& p) { p.ulysses_ranks = 1; })},
        Case{"everything_on_host", With(Deep(4, {.attention_output = Output::kHost,
                                                 .layer_inputs = Place::kHost,
                                                 .hidden_stream = Place::kHost,
                                                 .stage_kv = Place::kHost,
                                                 .optimizer = Place::kHost}),
                                        [](Point& p) { p.query_chunks = 4; })}),
    [](const auto& info) { return info.param.name; });

// Gradients that live on the host: one in work, the one before on its way. Never the whole shard.
TEST(LiveSetTest, AtMostTwoLayersOfGradientsAreOnTheDevice) {
  for (const int ranks : {1, 4}) {
    Point point = Deep(16, {.optimizer = Place::kHost});
    point.ulysses_ranks = ranks;
    const auto plan = PlanOf(point);
    ASSERT_TRUE(plan.ok()) << plan.status();
    for (const auto& rank : plan->ranks()) {
      const StepFormula formula(point, rank.rank());
      const int64_t two_layers = 2 * ranks * formula.BlockShard();
      EXPECT_LE(PeakOf(rank.memory(), "gradients"), two_layers);
      EXPECT_EQ(PeakOf(rank.memory(), "optimizer"), 0);
      EXPECT_EQ(PeakOf(rank.host_memory(), "gradients"), formula.Shard());
    }
  }
}

// At long contexts the rank's peak is one stage of the last layer's backward, and nothing but what
// that stage needs.
TEST(LiveSetTest, ThePeakOfALongContextIsOneBackwardStage) {
  const Point point = With(Small(8, 1, 32, 8), [](Point& p) {
    p.head_dim = 128;
    p.hidden_size = 2048;
    p.intermediate_size = 4096;
    p.vocab_size = 1024;
    p.num_layers = 3;
    p.context = 1 << 20;
  });
  const auto plan = PlanOf(point);
  ASSERT_TRUE(plan.ok()) << plan.status();
  for (const auto& rank : plan->ranks()) {
    const StepFormula formula(point, rank.rank());
    // With gradients and moments; weights and gradient of one block, weights of the next.
    const int64_t parameters = 4 * formula.Shard() + 3 * point.ranks() * formula.BlockShard();
    const int64_t inputs = 16 * point.N() + static_cast<int64_t>(sizeof(optim::StepScalars));
    // While queries are projected: the normalised tile, and what turning its heads takes.
    const int64_t projection =
        point.Stored() * kTile * point.hidden_size + formula.ScratchOfRope(kTile);
    EXPECT_EQ(rank.memory().peak_moment(), "backward layer 2 stage 0");
    EXPECT_EQ(rank.memory().peak_bytes(), parameters + inputs + projection +
                                              (1 + point.num_layers) * point.X() +
                                              formula.Attention());
  }
}

// Planning has to be quick enough to be asked often. CPU time, so that a busy machine does not fail
// it.
double DryRunSeconds(const v1::RunPlan& plan) {
  const std::clock_t begin = std::clock();
  const auto dry = planner::DryRunRank(plan, 0);
  EXPECT_TRUE(dry.ok()) << dry.status();
  return static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC;
}

TEST(DryRun, AMillionTokensTakeWellUnderASecond) {
  const Point point = With(Small(8, 1, 32, 8), [](Point& p) {
    p.head_dim = 128;
    p.hidden_size = 4096;
    p.intermediate_size = 14336;
    p.vocab_size = 128256;
    p.context = 1 << 20;
  });
  auto plan = PlanOf(point);
  ASSERT_TRUE(plan.ok()) << plan.status();
  const double two_layers = DryRunSeconds(*plan);
  EXPECT_LT(two_layers, 0.5);
  plan->mutable_spec()->mutable_model()->set_num_layers(32);
  std::cout << absl::StrFormat(
      "dry run of one rank of 8 at 1M tokens: 2 layers %.3f s, 32 layers (8B) %.3f s\n", two_layers,
      DryRunSeconds(*plan));
}

}  // namespace
}  // namespace upipe::testing
