// One rank's program from its first to its last step, over packed text and with its peers as
// threads: the same numbers whatever the number of ranks, and one sentence on every rank, never a
// hang, when the run cannot go on.
#include "engine/train/rank_run.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <filesystem>
#include <functional>
#include <optional>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "engine/comm/inproc/inproc_communicator.h"
#include "engine/data/shard_writer.h"
#include "planner/plan.h"
#include "tests/support/engine/engine_harness.h"
#include "tests/support/engine/recording_communicator.h"
#include "tests/unit/data/temp_folder.h"

namespace upipe::testing {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

class RankRunTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string text;
    for (int i = 0; i < 1600; ++i) absl::StrAppend(&text, "line ", i * i, "\n");
    for (const char* name : {data::kTrainShardName, data::kHeldOutShardName}) {
      const auto header = data::WriteByteShard(folder_.Path(name), {text});
      ASSERT_TRUE(header.ok()) << header.status();
    }
  }

  v1::JobSpec Spec(SmallJob job) const {
    job.vocab_size = 257;
    v1::JobSpec spec = MakeSpec(job);
    spec.mutable_data()->set_path(folder_.Path(""));
    return spec;
  }

  v1::RunPlan Plan(const v1::JobSpec& spec) const {
    auto plan = planner::MakeRunPlan(spec, {});
    EXPECT_TRUE(plan.ok()) << plan.status();
    return *std::move(plan);
  }

  struct Result {
    std::vector<absl::Status> statuses;                // [ranks]
    std::vector<std::vector<v1::StepReport>> reports;  // [ranks][steps]
    std::vector<double>
        valid_tokens;  // as rank 0 reduced them, one per training step and evaluation
  };
  using OnStep = std::function<void(int rank, int64_t step)>;
  // Each rank with a plan of its own; `stop` is what each rank is told to watch.
  Result Run(const std::vector<v1::RunPlan>& plans, const OnStep& on_step = {},
             const std::vector<const std::atomic<bool>*>& stop = {}) const {
    const int ranks = static_cast<int>(plans.size());
    Result result{.statuses = std::vector<absl::Status>(ranks),
                  .reports = std::vector<std::vector<v1::StepReport>>(ranks),
                  .valid_tokens = {}};
    const auto comms =
        comm::InprocGroup::Create(ranks, {.deadline = absl::Minutes(1), .observer = {}});
    std::vector<std::thread> threads;
    for (int rank = 0; rank < ranks; ++rank) {
      threads.emplace_back([&, rank] {
        const auto device = train::CreateRankDevice(plans[rank], rank);
        ASSERT_TRUE(device.ok()) << device.status();
        RecordingCommunicator comm(*comms[rank]);
        if (rank == 0) {
          comm.after_all_reduce = [&](const double* values, int64_t count) {
            if (count == optim::StepScalarsView::kNumReduced) {
              result.valid_tokens.push_back(values[1]);  // of the first range of positions
            }
          };
        }
        result.statuses[rank] =
            train::TrainRank({.plan = plans[rank],
                              .rank = rank,
                              .comm = comm,
                              .device = **device,
                              .on_step =
                                  [&, rank](const v1::StepReport& report) {
                                    result.reports[rank].push_back(report);
                                    if (on_step) on_step(rank, report.step());
                                  },
                              .stop_requested = stop.empty() ? nullptr : stop[rank]});
      });
    }
    for (std::thread& thread : threads) thread.join();
    return result;
  }
  Result Run(const v1::JobSpec& spec) const {
    return Run(std::vector<v1::RunPlan>(spec.parallel().ranks(), Plan(spec)));
  }

  data::TempFolder folder_;
};

// Labels are shifted before sharding: the last token of a rank is labelled with the first of the
// next.
TEST_F(RankRunTest, ValidTokensAndLossDoNotDependOnTheNumberOfRanks) {
  double loss = 0, held_out = 0;
  for (int ranks : {1, 2, 3, 5, 8}) {
    SCOPED_TRACE(absl::StrCat(ranks, " ranks"));
    v1::JobSpec spec =
        Spec({.ranks = ranks, .num_heads = 8, .num_kv_heads = 4, .num_layers = 1, .context = 61});
    spec.mutable_train()->set_steps(2);
    const Result result = Run(spec);
    for (const absl::Status& status : result.statuses) ASSERT_TRUE(status.ok()) << status;
    EXPECT_THAT(result.valid_tokens, ElementsAre(61, 61, 61));
    for (const auto& reports : result.reports) {
      ASSERT_EQ(reports.size(), 2u);
      EXPECT_EQ(reports[0].loss(), result.reports[0][0].loss());  // the same bits on every rank
      EXPECT_EQ(reports[1].grad_norm(), result.reports[0][1].grad_norm());
      EXPECT_EQ(reports[1].held_out_loss(), result.reports[0][1].held_out_loss());
    }
    if (ranks == 1) {
      loss = result.reports[0][0].loss();
      held_out = result.reports[0][1].held_out_loss();
    }
    EXPECT_NEAR(result.reports[0][0].loss(), loss, 1e-5 * loss);
    EXPECT_NEAR(result.reports[0][1].held_out_loss(), held_out, 1e-4 * held_out);
  }
}

// Ranges end at 4K and 16K whatever the ranks' runs of tokens are; a rank's run may cross both.
TEST_F(RankRunTest, TheLossIsReportedByRangeOfPositions) {
  constexpr int64_t kContext = 16384 + 100;
  std::vector<double> losses;
  for (int ranks : {1, 3}) {
    SCOPED_TRACE(absl::StrCat(ranks, " ranks"));
    v1::JobSpec spec = Spec({.ranks = ranks,
                             .num_heads = 3,
                             .num_kv_heads = 3,
                             .head_dim = 2,
                             .hidden_size = 4,
                             .intermediate_size = 4,
                             .num_layers = 1,
                             .context = kContext});
    spec.mutable_train()->set_steps(1);
    const Result result = Run(spec);
    for (const absl::Status& status : result.statuses) ASSERT_TRUE(status.ok()) << status;
    const v1::StepReport& report = result.reports[0].back();
    for (const auto* ranges : {&report.loss_by_position(), &report.held_out_loss_by_position()}) {
      ASSERT_EQ(ranges->size(), 3);
      const int64_t begins[] = {0, 4096, 16384, kContext};
      double sum = 0;
      for (int i = 0; i < 3; ++i) {
        const v1::PositionLoss& range = ranges->Get(i);
        EXPECT_EQ(range.begin(), begins[i]);
        EXPECT_EQ(range.end(), begins[i + 1]);
        EXPECT_EQ(range.tokens(), begins[i + 1] - begins[i]);
        sum += range.loss() * static_cast<double>(range.tokens());
        if (ranks == 1) losses.push_back(range.loss());
      }
      const bool training = ranges == &report.loss_by_position();
      EXPECT_NEAR(sum / kContext, training ? report.loss() : report.held_out_loss(), 1e-9);
    }
    for (size_t i = 0; i < losses.size(); ++i) {
      const auto& ranges = i < 3 ? report.loss_by_position() : report.held_out_loss_by_position();
      EXPECT_NEAR(ranges.Get(static_cast<int>(i % 3)).loss(), losses[i], 1e-5);
    }
    // Ranges of different text at an untrained model: close, not the same number three times.
    EXPECT_NE(report.loss_by_position(0).loss(), report.loss_by_position(1).loss());
  }
}

// Replicas, groups and micro-steps read the same sequences of the data, held-out ones included.
TEST_F(RankRunTest, A3_DpFsdpAndAccumulationTrainOnTheSameSequences) {
  std::vector<v1::StepReport> expected;
  for (const SmallJob& axes :
       {SmallJob{.ranks = 1, .accumulation = 2}, SmallJob{.ranks = 2, .dp_ranks = 2},
        SmallJob{.ranks = 4, .fsdp_ranks = 2}}) {
    SCOPED_TRACE(
        absl::StrCat(axes.ranks, " ranks, dp ", axes.dp_ranks, ", fsdp ", axes.fsdp_ranks));
    SmallJob job = axes;
    job.context = 61;
    v1::JobSpec spec = Spec(job);
    spec.mutable_train()->set_steps(3);
    spec.mutable_train()->set_eval_sequences(3);  // the second group has but one
    const Result result = Run(spec);
    for (const absl::Status& status : result.statuses) ASSERT_TRUE(status.ok()) << status;
    const std::vector<v1::StepReport>& reports = result.reports[0];
    ASSERT_EQ(reports.size(), 3u);
    if (expected.empty()) expected = reports;
    for (size_t step = 0; step < reports.size(); ++step) {
      EXPECT_EQ(reports[step].tokens(), 2 * 61);
      EXPECT_NEAR(reports[step].loss(), expected[step].loss(), 1e-5 * expected[step].loss());
      EXPECT_NEAR(reports[step].grad_norm(), expected[step].grad_norm(),
                  1e-3 * expected[step].grad_norm());
      EXPECT_EQ(reports[step].loss_by_position(0).tokens(), 2 * 61);
    }
    EXPECT_NE(reports[0].loss(), reports[1].loss());
    EXPECT_NEAR(reports[2].held_out_loss(), expected[2].held_out_loss(),
                1e-4 * expected[2].held_out_loss());
    EXPECT_EQ(reports[2].held_out_loss_by_position(0).tokens(), 3 * 61);
  }
}

// Documents are those of the data wherever a rank's tokens lie; no label crosses their bounds.
TEST_F(RankRunTest, PackedDocumentsAreTheSameOnEveryLayoutOfTokens) {
  std::vector<std::string> texts;
  for (int i = 0; i < 400; ++i) texts.push_back(std::string(3 + i % 29, 'a' + i % 26));
  const std::vector<absl::string_view> packed(texts.begin(), texts.end());
  for (const char* name : {data::kTrainShardName, data::kHeldOutShardName}) {
    std::filesystem::remove(folder_.Path(name));
    const auto header = data::WriteByteShard(folder_.Path(name), packed);
    ASSERT_TRUE(header.ok()) << header.status();
  }
  std::vector<double> losses;
  for (const v1::Documents documents :
       {v1::DOCUMENTS_JOIN, v1::DOCUMENTS_SEPARATE, v1::DOCUMENTS_RESTART}) {
    std::optional<v1::StepReport> alone;
    for (SmallJob job :
         {SmallJob{.ranks = 1}, SmallJob{.ranks = 3}, SmallJob{.ranks = 4, .ring_ranks = 2},
          SmallJob{.ranks = 2, .query_chunks = 3}}) {
      SCOPED_TRACE(absl::StrCat("documents ", static_cast<int>(documents), ", ", job.ranks,
                                " ranks, ring ", job.ring_ranks));
      job.documents = documents;
      job.context = 101;
      v1::JobSpec spec = Spec(job);
      spec.mutable_train()->set_steps(1);
      const Result result = Run(spec);
      for (const absl::Status& status : result.statuses) ASSERT_TRUE(status.ok()) << status;
      const v1::StepReport& report = result.reports[0][0];
      if (!alone) alone = report;
      EXPECT_NEAR(report.loss(), alone->loss(), 1e-5 * alone->loss());
      EXPECT_NEAR(report.grad_norm(), alone->grad_norm(), 1e-4 * alone->grad_norm());
      EXPECT_EQ(report.loss_by_position(0).tokens(), alone->loss_by_position(0).tokens());
      EXPECT_EQ(report.loss_by_position(0).tokens() == 101, documents == v1::DOCUMENTS_JOIN);
    }
    losses.push_back(alone->loss());
  }
  EXPECT_NE(losses[0], losses[1]);
  EXPECT_NEAR(losses[1], losses[2], 1e-5 * losses[1]);  // rotary attention sees distances only
}

TEST_F(RankRunTest, TooManySkippedStepsInARowEndTheRunWithASentence) {
  v1::JobSpec spec = Spec({.ranks = 3});
  spec.mutable_train()->set_steps(12);
  spec.mutable_optimizer()->set_learning_rate(1e30);  // the first update destroys the weights
  spec.mutable_optimizer()->set_max_skipped_steps(4);
  const Result result = Run(spec);
  for (int rank = 0; rank < 3; ++rank) {
    SCOPED_TRACE(absl::StrCat("rank ", rank));
    EXPECT_EQ(result.statuses[rank].code(), absl::StatusCode::kFailedPrecondition)
        << result.statuses[rank];
    EXPECT_THAT(std::string(result.statuses[rank].message()),
                AllOf(HasSubstr("4 updates in a row were skipped up to step 5"),
                      HasSubstr("valid tokens 24"), HasSubstr("optimizer.learning_rate")));
    const auto& reports = result.reports[rank];
    ASSERT_EQ(reports.size(), 5u);
    for (int64_t step = 1; step <= 5; ++step) {
      EXPECT_EQ(reports[step - 1].skipped(), step > 1) << "step " << step;
      EXPECT_EQ(reports[step - 1].skipped_steps_total(), step - 1) << "step " << step;
    }
  }
}

TEST_F(RankRunTest, AnyRankAskedToStopStopsAllBeforeTheSameStep) {
  v1::JobSpec spec = Spec({.ranks = 3});
  spec.mutable_train()->set_steps(1000);
  std::atomic<bool> asked{false}, never{false};
  const Result result = Run(std::vector<v1::RunPlan>(3, Plan(spec)),
                            [&](int rank, int64_t step) {
                              if (rank == 2 && step == 2) asked = true;
                            },
                            {&never, &asked, &never});
  const size_t steps = result.reports[0].size();
  EXPECT_GE(steps, 2u);
  EXPECT_LE(steps, 4u);
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(result.statuses[rank],
              absl::CancelledError(absl::StrCat("asked to stop before step ", steps + 1)));
    EXPECT_EQ(result.reports[rank].size(), steps) << "rank " << rank;
  }
}

TEST_F(RankRunTest, RanksWithAnotherScheduleAreNamedBeforeTheFirstStep) {
  const SmallJob job{.ranks = 4, .heads_per_rank = 1, .num_heads = 8, .num_kv_heads = 4};
  SmallJob other = job;
  other.heads_per_rank = 2;
  std::vector<v1::RunPlan> plans(4, Plan(Spec(job)));
  plans[2] = Plan(Spec(other));
  const Result result = Run(plans);
  for (int rank = 0; rank < 4; ++rank) {
    EXPECT_EQ(result.statuses[rank].code(), absl::StatusCode::kFailedPrecondition)
        << result.statuses[rank];
    EXPECT_THAT(std::string(result.statuses[rank].message()),
                AllOf(HasSubstr("head-chunk schedule"), HasSubstr("not so rank 2")));
    EXPECT_TRUE(result.reports[rank].empty());
  }
}

// One rank fails in the middle of a step, with collectives under way that its peers wait in.
TEST_F(RankRunTest, ARankThatRunsOutOfMemoryEndsAllOfThemWithTheCause) {
  std::vector<v1::RunPlan> plans(4, Plan(Spec({.ranks = 4, .num_heads = 8, .num_kv_heads = 2})));
  auto& memory = *plans[3].mutable_ranks(3)->mutable_memory();
  memory.set_arena_bytes(memory.arena_bytes() - 256);
  const Result result = Run(plans);
  for (const absl::Status& status : result.statuses) {
    EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("device arena exhausted"));
  }
}

TEST_F(RankRunTest, ReportsAgreeWithThePlan) {
  v1::JobSpec spec = Spec({.ranks = 3, .num_heads = 6, .num_kv_heads = 3, .context = 25});
  spec.mutable_train()->set_steps(3);
  spec.mutable_train()->set_eval_every(2);
  const v1::RunPlan plan = Plan(spec);
  const Result result = Run(spec);
  for (int rank = 0; rank < 3; ++rank) {
    SCOPED_TRACE(absl::StrCat("rank ", rank));
    ASSERT_TRUE(result.statuses[rank].ok()) << result.statuses[rank];
    ASSERT_EQ(result.reports[rank].size(), 3u);
    const v1::RankPlan& planned = plan.ranks(rank);
    for (const v1::StepReport& report : result.reports[rank]) {
      EXPECT_EQ(std::vector<int64_t>(report.bytes_sent_to_peer().begin(),
                                     report.bytes_sent_to_peer().end()),
                std::vector<int64_t>(planned.bytes_sent_to_peer().begin(),
                                     planned.bytes_sent_to_peer().end()));
      EXPECT_EQ(report.has_held_out_loss(), report.step() >= 2);
      EXPECT_EQ(report.total_steps(), 3);
      EXPECT_EQ(report.tokens(), 25);
      EXPECT_GT(report.tokens_per_second(), 0);
    }
    EXPECT_EQ(result.reports[rank].back().memory().DebugString(), planned.memory().DebugString());
    EXPECT_EQ(result.reports[rank].back().host_memory().DebugString(),
              planned.host_memory().DebugString());
  }
}

TEST_F(RankRunTest, ARankThatCannotReadItsDataEndsAllOfThemWithTheCause) {
  const v1::JobSpec spec = Spec({.ranks = 3});
  std::vector<v1::RunPlan> plans(3, Plan(spec));
  plans[1].mutable_spec()->mutable_data()->set_path(folder_.Path("absent"));
  const Result result = Run(plans);
  for (const absl::Status& status : result.statuses) {
    EXPECT_EQ(status.code(), absl::StatusCode::kNotFound) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("absent/train.tokens"));
  }
}

}  // namespace
}  // namespace upipe::testing
