// The one rule for loss and gradients over every way to share out the sequences of a step: dp
// replicas, fsdp groups, accumulation, context ranks. A1 .. J55 in names count the faults that
// users of other systems have reported.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <mutex>
#include <ostream>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "tests/support/engine/engine_harness.h"

namespace upipe::testing {
namespace {

constexpr int64_t kSteps = 3;
constexpr int kSequencesPerStep = 4;

struct Layout {
  const char* name;
  SmallJob job;
  friend void PrintTo(const Layout& layout, std::ostream* out) { *out << layout.name; }
};

SmallJob Job(SmallJob axes) {
  axes.context = 30;  // padded on most layouts
  axes.tie_embeddings = true;
  axes.accumulation = kSequencesPerStep / (axes.dp_ranks * axes.fsdp_ranks);
  return axes;
}

// Sequences of very different numbers of labels, one of none: a mean over sequences, ranks or
// micro-steps instead of over tokens is far off.
std::vector<Sequence> SequencesOf(const v1::JobSpec& spec, int64_t step) {
  std::vector<Sequence> sequences;
  for (int i = 0; i < kSequencesPerStep; ++i) {
    Sequence sequence = MakeSequence(spec, 10 * step + i);
    constexpr int64_t kLabelled[] = {30, 3, 0, 17};
    std::fill(sequence.labels.begin(), sequence.labels.end() - kLabelled[i], -1);
    sequences.push_back(std::move(sequence));
  }
  return sequences;
}

struct Outcome {
  std::vector<train::StepResult> steps;  // of rank 0
  Tensors gradients;                     // of the first step, mean over tokens
  Tensors weights;                       // after the last
};

// Trains; every rank must see the same loss and the same norm, to the bit, and replicas must end
// with the same weights.
Outcome Train(const SmallJob& job, double clip_norm) {
  v1::JobSpec spec = MakeSpec(job);
  spec.mutable_optimizer()->set_clip_norm(clip_norm);
  const auto plan = MakePlan(spec);
  EXPECT_TRUE(plan.ok()) << plan.status();
  if (!plan.ok()) return {};
  const Tensors initial = RandomWeights(*plan, 11);
  Outcome outcome;
  Collector gradients, weights;
  std::vector<std::vector<train::StepResult>> by_rank(job.ranks);
  std::vector<std::vector<float>> shards(job.ranks);
  const absl::Status status = RunRanks({.plan = *plan}, [&](Rank rank) -> absl::Status {
    UPIPE_RETURN_IF_ERROR(SetWeights(rank, initial));
    auto& parameters = rank.step.parameters();
    for (int64_t step = 1; step <= kSteps; ++step) {
      UPIPE_ASSIGN_OR_RETURN(auto result, RunStep(rank, step, SequencesOf(spec, step)));
      by_rank[rank.rank].push_back(result);
      if (step > 1) continue;
      UPIPE_RETURN_IF_ERROR(
          gradients.Add(rank, parameters.gradients(), 1 / by_rank[rank.rank][0].valid_tokens));
    }
    UPIPE_ASSIGN_OR_RETURN(shards[rank.rank], ReadShard(rank, parameters.weights()));
    return weights.Add(rank, parameters.weights());
  });
  EXPECT_TRUE(status.ok()) << status;
  if (!status.ok()) return {};
  const int replica = job.ranks / job.dp_ranks;
  for (int rank = 1; rank < job.ranks; ++rank) {
    for (int64_t step = 0; step < kSteps; ++step) {
      EXPECT_EQ(by_rank[rank][step].loss, by_rank[0][step].loss) << "rank " << rank;
      EXPECT_EQ(by_rank[rank][step].grad_norm, by_rank[0][step].grad_norm) << "rank " << rank;
      EXPECT_EQ(by_rank[rank][step].valid_tokens, by_rank[0][step].valid_tokens);
    }
    if (rank >= replica) {
      EXPECT_EQ(shards[rank], shards[rank - replica]) << "rank " << rank << " is no replica";
    }
  }
  outcome.steps = by_rank[0];
  outcome.gradients = gradients.tensors();
  outcome.weights = weights.tensors();
  return outcome;
}

constexpr double kClipNorm = 0.05;  // far below the norms here: every step clips

class DataAxes : public ::testing::TestWithParam<Layout> {
 protected:
  static void SetUpTestSuite() {
    SmallJob job = Job({});
    single_ = new Outcome(Train(job, kClipNorm));
    job.backend = "reference";
    reference_ = new Outcome(Train(job, kClipNorm));
  }
  static void TearDownTestSuite() {
    delete single_;
    delete reference_;
  }
  static inline Outcome *single_, *reference_;  // one rank, four micro-steps
};

TEST_P(DataAxes, A1_A4_A5_A6_A12_J55_TheSameStepHoweverItIsSharedOut) {
  const Outcome outcome = Train(Job(GetParam().job), kClipNorm);
  ASSERT_EQ(outcome.steps.size(), static_cast<size_t>(kSteps));
  ASSERT_EQ(reference_->steps.size(), static_cast<size_t>(kSteps));
  for (int64_t step = 0; step < kSteps; ++step) {
    const train::StepResult& expected = reference_->steps[step];
    SCOPED_TRACE(absl::StrCat("step ", step + 1));
    EXPECT_EQ(outcome.steps[step].valid_tokens, 50);
    EXPECT_NEAR(outcome.steps[step].loss, expected.loss, 2e-6 * expected.loss);
    EXPECT_NEAR(outcome.steps[step].grad_norm, expected.grad_norm, 2e-5 * expected.grad_norm);
    EXPECT_GT(outcome.steps[step].grad_norm, 2 * kClipNorm);
  }
  double squares = 0;
  for (const auto& [name, gradient] : reference_->gradients) {
    const double naive = RelativeError(single_->gradients.at(name), gradient);
    EXPECT_LE(RelativeError(outcome.gradients.at(name), gradient),
              3 * naive + std::numeric_limits<float>::epsilon() / 2)
        << name << ", plain error " << naive;
    for (const float value : outcome.gradients.at(name)) squares += double{value} * value;
  }
  // The reported norm is that of all gradients, counted once.
  EXPECT_NEAR(outcome.steps[0].grad_norm, std::sqrt(squares), 1e-5 * std::sqrt(squares));
}

INSTANTIATE_TEST_SUITE_P(
    Layouts, DataAxes,
    ::testing::Values(Layout{"dp2_accumulation2", {.ranks = 2, .dp_ranks = 2}},
                      Layout{"fsdp2_accumulation2", {.ranks = 2, .fsdp_ranks = 2}},
                      Layout{"dp4", {.ranks = 4, .dp_ranks = 4}},
                      Layout{"fsdp4", {.ranks = 4, .fsdp_ranks = 4}},
                      Layout{"dp2_fsdp2", {.ranks = 4, .fsdp_ranks = 2, .dp_ranks = 2}},
                      Layout{"ulysses2_accumulation4", {.ranks = 2}},
                      Layout{"dp2_ulysses2", {.ranks = 4, .dp_ranks = 2}},
                      Layout{"fsdp2_ulysses3", {.ranks = 6, .fsdp_ranks = 2}},
                      Layout{
                          "dp2_fsdp2_ring2",
                          {.ranks = 8, .method = v1::METHOD_RING, .fsdp_ranks = 2, .dp_ranks = 2}},
                      Layout{"dp2_ring2", {.ranks = 4, .ring_ranks = 2, .dp_ranks = 2}}),
    [](const auto& info) { return info.param.name; });

// The gradient of a step over several sequences is the sum of those of steps over one.
TEST(DataAxesTest, A5_AccumulatedGradientsAreTheSumOfSingleOnes) {
  for (const int ranks : {1, 2}) {
    SmallJob job = Job({.ranks = ranks});
    v1::JobSpec spec = MakeSpec(job);
    const std::vector<Sequence> sequences = SequencesOf(spec, 1);
    const Tensors initial = RandomWeights(*MakePlan(spec), 11);
    const auto gradients_of = [&](const v1::JobSpec& of, absl::Span<const Sequence> step) {
      const auto plan = MakePlan(of);
      EXPECT_TRUE(plan.ok()) << plan.status();
      Collector gradients;
      const absl::Status status = RunRanks({.plan = *plan}, [&](Rank rank) -> absl::Status {
        UPIPE_RETURN_IF_ERROR(SetWeights(rank, initial));
        UPIPE_RETURN_IF_ERROR(RunStep(rank, 1, step).status());
        return gradients.Add(rank, rank.step.parameters().gradients());
      });
      EXPECT_TRUE(status.ok()) << status;
      return gradients.tensors();
    };
    const Tensors together = gradients_of(spec, sequences);
    spec.mutable_train()->set_gradient_accumulation(1);
    Tensors sum;
    for (const Sequence& sequence : sequences) {
      for (const auto& [name, gradient] : gradients_of(spec, absl::MakeConstSpan(&sequence, 1))) {
        std::vector<float>& total = sum[name];
        total.resize(gradient.size());
        for (size_t i = 0; i < gradient.size(); ++i) total[i] += gradient[i];
      }
    }
    for (const auto& [name, gradient] : sum) {
      EXPECT_LE(RelativeError(together.at(name), gradient), 2e-6) << name;
    }
  }
}

// Held-out losses are sums over the same tokens whatever the groups; one without labels adds zeros.
TEST(DataAxesTest, A2_A8_EvaluationSumsOverGroups) {
  const v1::JobSpec alone = MakeSpec(Job({}));
  std::vector<Sequence> sequences = SequencesOf(alone, 1);
  const Tensors initial = RandomWeights(*MakePlan(alone), 11);
  double loss = 0, count = 0;
  const auto add = [&](const optim::StepScalars::ByPosition& by_position) {
    const auto total = optim::TotalOf(by_position);
    loss += total.loss;
    count += total.count;
  };
  const auto plan = MakePlan(alone);
  ASSERT_TRUE(plan.ok()) << plan.status();
  absl::Status status = RunRanks({.plan = *plan}, [&](Rank rank) -> absl::Status {
    UPIPE_RETURN_IF_ERROR(SetWeights(rank, initial));
    for (const Sequence& sequence : sequences) {
      UPIPE_ASSIGN_OR_RETURN(const auto result,
                             Evaluate(rank, 1, absl::MakeConstSpan(&sequence, 1)));
      add(result);
    }
    return absl::OkStatus();
  });
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_EQ(count, 50);
  const double expected = loss;
  for (const SmallJob& axes : {SmallJob{.ranks = 4, .dp_ranks = 4},
                               SmallJob{.ranks = 8, .fsdp_ranks = 2, .dp_ranks = 2}}) {
    const auto layout = MakePlan(MakeSpec(Job(axes)));
    ASSERT_TRUE(layout.ok()) << layout.status();
    std::mutex mutex;
    std::vector<double> losses;
    loss = count = 0;
    status = RunRanks({.plan = *layout}, [&](Rank rank) -> absl::Status {
      UPIPE_RETURN_IF_ERROR(SetWeights(rank, initial));
      UPIPE_ASSIGN_OR_RETURN(const auto result, Evaluate(rank, 1, sequences));
      const std::lock_guard lock(mutex);
      if (rank.rank == 0) add(result);
      losses.push_back(optim::TotalOf(result).loss);
      return absl::OkStatus();
    });
    ASSERT_TRUE(status.ok()) << status;
    EXPECT_EQ(count, 50);
    EXPECT_NEAR(loss, expected, 1e-6 * expected);
    for (const double of_rank : losses) EXPECT_EQ(of_rank, loss);
  }
}

// dp, fsdp and accumulation only share the sequences of a step out.
TEST(DataAxesTest, A3_EveryLayoutTrainsOnTheSameSequences) {
  for (const SmallJob& axes :
       {SmallJob{}, SmallJob{.ranks = 2, .dp_ranks = 2}, SmallJob{.ranks = 4, .fsdp_ranks = 4},
        SmallJob{.ranks = 8, .fsdp_ranks = 2, .dp_ranks = 2}}) {
    const auto plan = MakePlan(MakeSpec(Job(axes)));
    ASSERT_TRUE(plan.ok()) << plan.status();
    const v1::JobSpec& spec = plan->spec();
    EXPECT_EQ(train::SequencesPerStep(spec), kSequencesPerStep);
    const int64_t groups = axes.dp_ranks * axes.fsdp_ranks;
    int64_t next = 0;
    for (int64_t step = 1; step <= 3; ++step) {
      for (int64_t micro = 0; micro < kSequencesPerStep / groups; ++micro) {
        for (int64_t group = 0; group < groups; ++group) {
          EXPECT_EQ(train::SequenceOf(spec, step, micro, group), next++);
        }
      }
    }
  }
}

}  // namespace
}  // namespace upipe::testing
