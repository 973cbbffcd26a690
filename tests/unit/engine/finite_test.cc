// What a step does when there is nothing to learn from, or when numbers run away: ranks without
// labels add exact zeros and stay in every collective; a step without any label or with a
// non-finite gradient changes nothing on any rank.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "engine/comm/inproc/inproc_communicator.h"
#include "engine/train/rank_run.h"
#include "tests/support/engine/engine_harness.h"
#include "tests/support/engine/recording_communicator.h"

namespace upipe::testing {
namespace {

v1::RunPlan PlanOf(const v1::JobSpec& spec) {
  auto plan = MakePlan(spec);
  EXPECT_TRUE(plan.ok()) << plan.status();
  return *std::move(plan);
}

// The bits of a shard, so that NaN equals itself.
std::vector<uint32_t> Bits(Rank rank, const kernels::TensorView& shard) {
  const auto values = ReadShard(rank, shard);
  EXPECT_TRUE(values.ok()) << values.status();
  std::vector<uint32_t> bits(values->size());
  std::memcpy(bits.data(), values->data(), values->size() * sizeof(float));
  return bits;
}

// Everything an update may change on a rank.
struct State {
  std::vector<uint32_t> weights, first_moments, second_moments;
  friend bool operator==(const State&, const State&) = default;
};
State StateOf(Rank rank) {
  auto& parameters = rank.step.parameters();
  return {Bits(rank, parameters.weights()), Bits(rank, parameters.first_moments()),
          Bits(rank, parameters.second_moments())};
}

// What one rank puts into the reductions of a step.
struct Contribution {
  double loss = std::nan(""), count = std::nan("");  // before they are summed over ranks
  double squares = std::nan("");
  int64_t nonzero_gradients = 0, reduced_gradients = 0;
  size_t collectives = 0;
  bool skipped = true;
};

// One step of `sequences` over recorded communicators.
std::vector<Contribution> RecordStep(const v1::RunPlan& plan,
                                     absl::Span<const Sequence> sequences) {
  const int ranks = plan.spec().parallel().ranks();
  const auto comms =
      comm::InprocGroup::Create(ranks, {.deadline = absl::Minutes(1), .observer = {}});
  std::vector<Contribution> contributions(ranks);
  std::vector<absl::Status> statuses(ranks);
  const auto run = [&](int rank) -> absl::Status {
    Contribution& mine = contributions[rank];
    RecordingCommunicator comm(*comms[rank]);
    UPIPE_ASSIGN_OR_RETURN(const auto device, train::CreateRankDevice(plan, rank));
    const auto streams = engine::RankStreams::Create(*device, rank);
    const engine::RankContext context = MakeContext(plan, *device, streams, comm);
    UPIPE_ASSIGN_OR_RETURN(const auto step, train::TrainStep::Create(context, plan));
    comm.Clear();
    comm.before_reduce_scatter = [&](const float* values, int64_t count) {
      mine.reduced_gradients += count;
      for (int64_t i = 0; i < count; ++i) mine.nonzero_gradients += values[i] != 0 ? 1 : 0;
    };
    comm.before_all_reduce = [&](const double* values, int64_t count) {
      if (count != optim::StepScalarsView::kNumReduced) return;
      mine.loss = values[0];
      mine.count = values[1];
      mine.squares = values[count - 1];
    };
    UPIPE_ASSIGN_OR_RETURN(const auto result, RunStep({rank, context, *step}, 1, sequences));
    mine.collectives = comm.recorded().size();
    mine.skipped = result.skipped;
    return context.stream().Synchronize();
  };
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      statuses[rank] = run(rank);
      if (!statuses[rank].ok()) comms[rank]->Abort(statuses[rank]);
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const absl::Status& status : statuses) EXPECT_TRUE(status.ok()) << status;
  return contributions;
}

void ExpectExactZero(const Contribution& rank) {
  EXPECT_EQ(rank.loss, 0);
  EXPECT_FALSE(std::signbit(rank.loss));
  EXPECT_EQ(rank.count, 0);
  EXPECT_GT(rank.reduced_gradients, 0);
  EXPECT_EQ(rank.nonzero_gradients, 0);
}

TEST(Finite, ARankOfPaddingAddsExactZerosAndJoinsEverything) {
  const v1::RunPlan plan =
      PlanOf(MakeSpec({.ranks = 5, .num_heads = 6, .num_kv_heads = 3, .context = 3}));
  const auto ranks = RecordStep(plan, {MakeSequence(plan.spec(), 1)});
  for (int rank = 0; rank < 5; ++rank) {
    SCOPED_TRACE(absl::StrCat("rank ", rank));
    EXPECT_EQ(ranks[rank].collectives, ranks[0].collectives);
    EXPECT_FALSE(ranks[rank].skipped);
    if (rank >= 3) {
      ExpectExactZero(ranks[rank]);
    } else {
      EXPECT_GT(ranks[rank].loss, 0);
      EXPECT_EQ(ranks[rank].count, 1);
      EXPECT_GT(ranks[rank].nonzero_gradients, 0);
    }
  }
}

TEST(Finite, TheLastRanksTokensWithoutLabelsAddExactZeros) {
  const v1::RunPlan plan = PlanOf(MakeSpec({.ranks = 3, .context = 30}));
  Sequence sequence = MakeSequence(plan.spec(), 1);
  std::fill(sequence.labels.begin() + 20, sequence.labels.end(), -1);
  const auto ranks = RecordStep(plan, {sequence});
  ExpectExactZero(ranks[2]);
  EXPECT_EQ(ranks[0].count, 10);
  EXPECT_EQ(ranks[1].count, 10);
}

// Tokens without labels still shape what later tokens see: no loss of their own, but gradients.
TEST(Finite, EarlyTokensWithoutLabelsStillGetGradients) {
  const v1::RunPlan plan = PlanOf(MakeSpec({.ranks = 3, .context = 30}));
  Sequence sequence = MakeSequence(plan.spec(), 1);
  std::fill(sequence.labels.begin(), sequence.labels.begin() + 10, -1);
  const auto ranks = RecordStep(plan, {sequence});
  EXPECT_EQ(ranks[0].loss, 0);
  EXPECT_EQ(ranks[0].count, 0);
  EXPECT_GT(ranks[0].nonzero_gradients, 0);
}

// A whole replica, or a whole micro-step of a group, without a label: the others' step is the step.
TEST(Finite, A7_A8_A10_GroupsAndMicroStepsWithoutLabelsAddExactZeros) {
  const v1::RunPlan plan =
      PlanOf(MakeSpec({.ranks = 4, .context = 24, .dp_ranks = 2, .accumulation = 2}));
  std::vector<Sequence> sequences;
  for (int i = 0; i < 4; ++i) sequences.push_back(MakeSequence(plan.spec(), i));
  // Group 0 takes 0 and 2, group 1 takes 1 and 3.
  for (const int i : {1, 2, 3}) {
    std::fill(sequences[i].labels.begin(), sequences[i].labels.end(), -1);
  }
  const auto ranks = RecordStep(plan, sequences);
  for (int rank = 0; rank < 4; ++rank) {
    SCOPED_TRACE(absl::StrCat("rank ", rank));
    EXPECT_EQ(ranks[rank].collectives, ranks[0].collectives);
    EXPECT_FALSE(ranks[rank].skipped);
    if (rank < 2) {
      EXPECT_EQ(ranks[rank].count, 12);
      EXPECT_GT(ranks[rank].squares, 0);
      continue;
    }
    EXPECT_EQ(ranks[rank].loss, 0);
    EXPECT_FALSE(std::signbit(ranks[rank].loss));
    EXPECT_EQ(ranks[rank].count, 0);
    EXPECT_EQ(ranks[rank].squares, 0);  // its replica's shards are counted by rank - 2
  }
}

TEST(Finite, AStepWithoutAnyLabelChangesNothingOnAnyRank) {
  v1::JobSpec spec = MakeSpec({.ranks = 3, .context = 25});
  spec.mutable_optimizer()->set_min_learning_rate(3e-4);  // the same rate at every step
  const v1::RunPlan plan = PlanOf(spec);
  const Sequence learnt = MakeSequence(plan.spec(), 1);
  Sequence empty = learnt;
  std::fill(empty.labels.begin(), empty.labels.end(), -1);
  std::vector<State> with_empty_steps(3), without(3);
  for (const bool skip_some : {true, false}) {
    const absl::Status status = RunRanks({.plan = plan}, [&](Rank rank) -> absl::Status {
      int64_t step = 0;
      const auto train_empty = [&]() -> absl::Status {
        const State before = StateOf(rank);
        UPIPE_ASSIGN_OR_RETURN(const auto result, RunStep(rank, ++step, empty));
        EXPECT_TRUE(result.skipped);
        EXPECT_EQ(result.valid_tokens, 0);
        EXPECT_TRUE(StateOf(rank) == before) << "rank " << rank.rank;
        return absl::OkStatus();
      };
      for (int i = 0; i < 3; ++i) {
        if (skip_some) UPIPE_RETURN_IF_ERROR(train_empty());
        UPIPE_ASSIGN_OR_RETURN(const auto result, RunStep(rank, ++step, learnt));
        EXPECT_FALSE(result.skipped);
        EXPECT_EQ(result.valid_tokens, 25);
      }
      (skip_some ? with_empty_steps : without)[rank.rank] = StateOf(rank);
      return absl::OkStatus();
    });
    ASSERT_TRUE(status.ok()) << status;
  }
  EXPECT_TRUE(with_empty_steps == without) << "a skipped step moved the bias correction's clock";
}

// A weight of a rank's shard that every token meets. Host memory: the device is a CPU and its
// stream idle.
float* FirstBlockWeight(Rank rank) {
  auto& parameters = rank.step.parameters();
  for (const auto& piece : parameters.pieces()) {
    if (piece.tensor->name.find(".layers.") == std::string::npos) continue;
    return static_cast<float*>(parameters.weights().At(piece.shard_begin));
  }
  return nullptr;
}

TEST(Finite, ANonFiniteGradientOnOneRankSkipsTheUpdateOnAll) {
  const v1::RunPlan plan = PlanOf(MakeSpec({.ranks = 4, .context = 24}));
  const Sequence sequence = MakeSequence(plan.spec(), 1);
  for (const float bad :
       {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
    const absl::Status status = RunRanks({.plan = plan}, [&](Rank rank) -> absl::Status {
      UPIPE_RETURN_IF_ERROR(RunStep(rank, 1, sequence).status());
      float* weight = FirstBlockWeight(rank);
      const float good = *weight;
      if (rank.rank == 2) *weight = bad;
      const State before = StateOf(rank);
      UPIPE_ASSIGN_OR_RETURN(const auto result, RunStep(rank, 2, sequence));
      EXPECT_TRUE(result.skipped) << "rank " << rank.rank;
      EXPECT_FALSE(std::isfinite(result.grad_norm));
      EXPECT_TRUE(StateOf(rank) == before) << "rank " << rank.rank;
      *weight = good;
      UPIPE_ASSIGN_OR_RETURN(const auto recovered, RunStep(rank, 3, sequence));
      EXPECT_FALSE(recovered.skipped) << "rank " << rank.rank;
      EXPECT_TRUE(std::isfinite(recovered.loss));
      return absl::OkStatus();
    });
    EXPECT_TRUE(status.ok()) << status;
  }
}

}  // namespace
}  // namespace upipe::testing
