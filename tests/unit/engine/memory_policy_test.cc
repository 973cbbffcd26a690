// Where layer inputs, attention outputs, the hidden stream and the optimizer's state live changes
// no bit of what is learnt, under any timing; and what leaves the device is gone from it.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <optional>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "tests/support/engine/engine_harness.h"

namespace upipe::testing {
namespace {

constexpr int64_t kSteps = 2;
constexpr v1::Place kHost = v1::PLACE_HOST;

struct Outcome {
  std::vector<double> losses, norms;
  Tensors gradients, weights, first_moments, second_moments;
  friend bool operator==(const Outcome&, const Outcome&) = default;
};

// Seeded delays of every task and NaN in freed blocks, or neither.
enum class Timing { kPlain, kDelayed };

Outcome Train(const SmallJob& job, Timing timing) {
  const auto plan = MakePlan(MakeSpec(job));
  EXPECT_TRUE(plan.ok()) << plan.status();
  if (!plan.ok()) return {};
  const int64_t per_step = train::SequencesPerStep(plan->spec());
  Outcome outcome;
  Collector gradients, weights, first, second;
  const absl::Status status = RunRanks(
      {.plan = *plan,
       .adjust =
           [&](int rank, kernels::DeviceOptions& options) {
             if (timing == Timing::kPlain) return;
             options.test_delay = kernels::StreamDelay{.seed = static_cast<uint64_t>(rank) + 1,
                                                       .longest = absl::Microseconds(20)};
             options.test_poison_freed = true;
           }},
      [&](Rank rank) -> absl::Status {
        auto& parameters = rank.step.parameters();
        for (int64_t step = 1; step <= kSteps; ++step) {
          std::vector<Sequence> sequences;
          for (int64_t i = 0; i < per_step; ++i) {
            sequences.push_back(MakeSequence(plan->spec(), step * per_step + i));
          }
          UPIPE_ASSIGN_OR_RETURN(const auto result, RunStep(rank, step, sequences));
          EXPECT_FALSE(result.skipped) << "rank " << rank.rank << " step " << step;
          if (rank.rank != 0) continue;
          outcome.losses.push_back(result.loss);
          outcome.norms.push_back(result.grad_norm);
        }
        UPIPE_RETURN_IF_ERROR(gradients.Add(rank, parameters.gradients()));
        UPIPE_RETURN_IF_ERROR(weights.Add(rank, parameters.weights()));
        UPIPE_RETURN_IF_ERROR(first.Add(rank, parameters.first_moments()));
        return second.Add(rank, parameters.second_moments());
      });
  EXPECT_TRUE(status.ok()) << status;
  outcome.gradients = gradients.tensors();
  outcome.weights = weights.tensors();
  outcome.first_moments = first.tensors();
  outcome.second_moments = second.tensors();
  return outcome;
}

// Five layers, so that strides leave segments of unequal length, and tokens of more than one tile.
SmallJob Base(int ranks, bool bf16) {
  return {
      .ranks = ranks, .num_layers = 5, .context = 520 * ranks - 7, .qk_norm = bf16, .bf16 = bf16};
}

// What differs, for the message of a failure.
std::string Difference(const Outcome& a, const Outcome& b) {
  std::string text;
  const auto compare = [&](const char* what, const Tensors& x, const Tensors& y) {
    for (const auto& [name, values] : x) {
      if (y.count(name) == 0 || y.at(name) == values) continue;
      absl::StrAppend(&text, "\n  ", what, " of ", name, ": ", RelativeError(values, y.at(name)));
    }
  };
  compare("gradient", a.gradients, b.gradients);
  compare("weights", a.weights, b.weights);
  return text;
}

struct Variant {
  const char* name;
  SmallJob policy;  // only its memory policy is looked at
  friend void PrintTo(const Variant& variant, std::ostream* out) { *out << variant.name; }
};

SmallJob With(SmallJob job, const SmallJob& policy) {
  job.attention_output = policy.attention_output;
  job.layer_inputs = policy.layer_inputs;
  job.hidden_stream = policy.hidden_stream;
  job.optimizer = policy.optimizer;
  job.stride = policy.stride;
  return job;
}

class Policies : public ::testing::TestWithParam<Variant> {};

TEST_P(Policies, ChangeNoBit) {
  for (const int ranks : {1, 2}) {
    for (const bool bf16 : {false, true}) {
      SCOPED_TRACE(absl::StrCat(ranks, " ranks ", bf16 ? "bf16" : "fp32"));
      static std::map<std::pair<int, bool>, Outcome> plain;
      const SmallJob base = Base(ranks, bf16);
      if (!plain.count({ranks, bf16})) plain[{ranks, bf16}] = Train(base, Timing::kPlain);
      const Outcome& expected = plain[{ranks, bf16}];
      ASSERT_EQ(expected.losses.size(), static_cast<size_t>(kSteps));
      const Outcome outcome =
          Train(With(base, GetParam().policy), ranks == 2 ? Timing::kDelayed : Timing::kPlain);
      EXPECT_EQ(outcome.losses, expected.losses);
      EXPECT_EQ(outcome.norms, expected.norms);
      EXPECT_TRUE(outcome == expected) << Difference(outcome, expected);
    }
  }
}

constexpr v1::AttentionOutput kKept = v1::ATTENTION_OUTPUT_DEVICE;
constexpr v1::AttentionOutput kKeptOnHost = v1::ATTENTION_OUTPUT_HOST;

INSTANTIATE_TEST_SUITE_P(
    Variants, Policies,
    ::testing::Values(
        Variant{"recompute", {}}, Variant{"layer_inputs_host", {.layer_inputs = kHost}},
        Variant{"stride2", {.stride = 2}}, Variant{"stride5", {.stride = 5}},
        Variant{"layer_inputs_host_stride3", {.layer_inputs = kHost, .stride = 3}},
        Variant{"attention_output_device", {.attention_output = kKept}},
        Variant{"attention_output_host", {.attention_output = kKeptOnHost}},
        Variant{"attention_output_device_stride2", {.attention_output = kKept, .stride = 2}},
        Variant{"attention_output_host_layer_inputs_host_stride2",
                {.attention_output = kKeptOnHost, .layer_inputs = kHost, .stride = 2}},
        Variant{"hidden_stream_host", {.layer_inputs = kHost, .hidden_stream = kHost}},
        Variant{"hidden_stream_host_stride3",
                {.layer_inputs = kHost, .hidden_stream = kHost, .stride = 3}},
        Variant{"hidden_stream_host_attention_output_host_stride2",
                {.attention_output = kKeptOnHost,
                 .layer_inputs = kHost,
                 .hidden_stream = kHost,
                 .stride = 2}},
        Variant{"optimizer_host", {.optimizer = kHost}},
        Variant{"everything_host",
                {.attention_output = kKeptOnHost,
                 .layer_inputs = kHost,
                 .hidden_stream = kHost,
                 .optimizer = kHost,
                 .stride = 2}}),
    [](const auto& info) { return info.param.name; });

// The optimizer's place under every way a gradient shard comes about: alone, shared, of replicas,
// accumulated, and the embedding's two halves.
TEST(OptimizerOnHost, ChangesNoBitOnAnyAxis) {
  for (SmallJob job : {SmallJob{.ranks = 1, .accumulation = 2},
                       SmallJob{.ranks = 2, .dp_ranks = 2, .accumulation = 2},
                       SmallJob{.ranks = 2, .fsdp_ranks = 2},
                       SmallJob{.ranks = 4, .fsdp_ranks = 2, .accumulation = 2},
                       SmallJob{.ranks = 6, .dp_ranks = 3}}) {
    for (const bool tied : {false, true}) {
      job.tie_embeddings = tied;
      job.bf16 = tied;
      job.optimizer = {};
      SCOPED_TRACE(absl::StrCat(job.ranks, " ranks, dp ", job.dp_ranks, ", fsdp ", job.fsdp_ranks,
                                tied ? ", tied, bf16" : ""));
      const Outcome expected = Train(job, Timing::kPlain);
      job.optimizer = kHost;
      EXPECT_TRUE(Train(job, Timing::kDelayed) == expected);
    }
  }
}

int64_t PeakOf(const v1::MemoryUsage& memory, const std::string& tag) {
  for (const v1::TagBytes& bytes : memory.tags()) {
    if (bytes.tag() == tag) return bytes.peak_bytes();
  }
  ADD_FAILURE() << "no tag " << tag;
  return -1;
}

// Bytes of each unit, and of the rank's shard of it, in the order of the backward pass.
struct Units {
  std::vector<int64_t> whole, shard;
  explicit Units(const v1::RunPlan& plan) {
    const v1::JobSpec& spec = plan.spec();
    const parallel::Mesh mesh = parallel::Mesh::From(spec.parallel());
    const auto layout =
        model::ParameterLayout::Make(model::ModelConfig::From(spec.model(), spec.train().context()),
                                     mesh.shard_ranks(), mesh.dp_ranks);
    for (const model::ParameterUnit* unit : layout.Units()) {
      whole.insert(whole.begin(), 4 * unit->num_elements);
      shard.insert(shard.begin(), 4 * unit->shard_elements);
    }
  }
  int64_t AllShards() const {
    int64_t sum = 0;
    for (const int64_t bytes : shard) sum += bytes;
    return sum;
  }
};

// A unit's gradient beside what is left of the one before: the reduced shard on its way to the
// host (of a rank that shares nothing, all of it).
TEST(OptimizerOnHost, AtMostTwoUnitsOfGradientsAreOnTheDevice) {
  for (const int ranks : {1, 2, 3}) {
    SCOPED_TRACE(absl::StrCat(ranks, " ranks"));
    const auto plan = MakePlan(MakeSpec({.ranks = ranks, .num_layers = 6, .optimizer = kHost}));
    ASSERT_TRUE(plan.ok()) << plan.status();
    const Units units(*plan);
    int64_t gradients = 0, gathered = 0;
    for (size_t i = 0; i < units.whole.size(); ++i) {
      const int64_t left = i == 0 ? 0 : units.shard[i - 1];
      const int64_t own = ranks == 1 ? 0 : units.shard[i];
      gradients = std::max(gradients, units.whole[i] + std::max(left, own));
      if (i > 0) gathered = std::max(gathered, units.whole[i - 1] + units.whole[i]);
    }
    const auto largest = *std::max_element(units.whole.begin(), units.whole.end());
    EXPECT_LE(gradients, 2 * largest);
    for (const v1::RankPlan& rank : plan->ranks()) {
      EXPECT_EQ(PeakOf(rank.memory(), "gradients"), gradients);
      EXPECT_EQ(PeakOf(rank.memory(), "weights"), gathered);
      EXPECT_EQ(PeakOf(rank.memory(), "optimizer"), 0);
      EXPECT_EQ(PeakOf(rank.host_memory(), "weights"), units.AllShards());
      EXPECT_EQ(PeakOf(rank.host_memory(), "gradients"), units.AllShards());
      EXPECT_EQ(PeakOf(rank.host_memory(), "optimizer"), 2 * units.AllShards());
    }
  }
}

// [N, d] tensors on the device and on the host, kept inputs and those rebuilt included.
TEST(LayerInputs, LiveWhereThePolicySays) {
  constexpr int kLayers = 5;
  for (const int stride : {1, 2, 3, 5}) {
    SCOPED_TRACE(absl::StrCat("stride ", stride));
    const int kept = (kLayers + stride - 1) / stride;
    // The last segment is rebuilt while all are held; the one before it is a whole one.
    const int last = kLayers - (kept - 1) * stride;
    const int held = std::max(kept + last - 1, kept > 1 ? kept - 1 + stride - 1 : 0);
    const auto residual = [&](std::optional<v1::Place> inputs, std::optional<v1::Place> stream) {
      SmallJob job = Base(2, false);
      job.layer_inputs = inputs;
      job.hidden_stream = stream;
      job.stride = stride;
      const auto plan = MakePlan(MakeSpec(job));
      EXPECT_TRUE(plan.ok()) << plan.status();
      const int64_t x = plan->tokens_per_rank() * job.hidden_size * 4;
      const auto& rank = plan->ranks(1);
      EXPECT_EQ(PeakOf(rank.memory(), "residual") % x, 0);
      EXPECT_EQ(PeakOf(rank.host_memory(), "residual") % x, 0);
      return std::pair(PeakOf(rank.memory(), "residual") / x,
                       PeakOf(rank.host_memory(), "residual") / x);
    };
    using Xs = std::pair<int64_t, int64_t>;
    EXPECT_EQ(residual({}, {}), Xs(held + 1, 0));
    EXPECT_EQ(residual(kHost, {}), Xs(1, held));
    EXPECT_EQ(residual(kHost, kHost), Xs(0, held + 1));
  }
}

}  // namespace
}  // namespace upipe::testing
