// Checkpoints while a job trains: none of their failures, nor a slow disk, stops it or changes a
// bit; leaving waits for the last one.
#include "engine/train/checkpointing.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <filesystem>
#include <future>
#include <string>
#include <vector>

#include "common/failpoint.h"
#include "tests/support/engine/checkpointed_run.h"
#include "tests/unit/data/temp_folder.h"

namespace upipe::testing {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

constexpr int64_t kSteps = 6;

// But those that only say that this machine's disk is slower than a step.
std::vector<std::string> FailuresIn(const CheckpointedResult& result) {
  std::vector<std::string> failures;
  for (const v1::CheckpointProblem& problem : result.problems) {
    if (problem.message().find("still being written") == std::string::npos)
      failures.push_back(problem.message());
  }
  return failures;
}

class CheckpointingTest : public ::testing::Test {
 protected:
  void SetUp() override { WriteSmallCorpus(folder_.Path("corpus")); }
  void TearDown() override { ASSERT_TRUE(ArmFailpoints("").ok()); }

  v1::RunPlan Plan(const std::string& root, int64_t every = 1, int keep = 100) const {
    v1::JobSpec spec = MakeSpec({.ranks = 3, .vocab_size = 257});
    spec.mutable_data()->set_path(folder_.Path("corpus"));
    spec.mutable_train()->set_steps(kSteps);
    spec.mutable_checkpoint()->set_path(folder_.Path(root));
    spec.mutable_checkpoint()->set_every_steps(every);
    spec.mutable_checkpoint()->set_keep(keep);
    auto plan = MakePlan(spec);
    EXPECT_TRUE(plan.ok()) << plan.status();
    return *std::move(plan);
  }
  std::string UndisturbedSum() const {
    const CheckpointedResult result = RunCheckpointed({.plan = Plan("undisturbed", /*every=*/100)});
    EXPECT_TRUE(result.ok()) << result.DebugString();
    return result.commits.empty() ? "" : result.commits.back().content_sha256();
  }

  data::TempFolder folder_;
};

TEST_F(CheckpointingTest, EveryIntervalAndTheLastStepAlways) {
  const CheckpointedResult result = RunCheckpointed({.plan = Plan("root", /*every=*/4)});
  ASSERT_TRUE(result.ok()) << result.DebugString();
  ASSERT_THAT(result.commits, SizeIs(2));
  EXPECT_EQ(result.commits[0].step(), 4);
  EXPECT_EQ(result.commits[1].step(), kSteps);
  EXPECT_THAT(result.problems, IsEmpty());
}

TEST_F(CheckpointingTest, ThePlanCountsTheCopy) {
  const v1::RunPlan with = Plan("root");
  v1::JobSpec spec = with.spec();
  spec.clear_checkpoint();
  const auto without = MakePlan(spec);
  ASSERT_TRUE(without.ok()) << without.status();
  for (int rank = 0; rank < 3; ++rank) {
    int64_t copy = 0;
    for (const v1::TagBytes& tag : with.ranks(rank).host_memory().tags()) {
      if (tag.tag() == "checkpoint") copy = tag.peak_bytes();
    }
    EXPECT_GE(copy * 3, 12 * with.num_parameters());  // three fp32 values for each, and padding
    EXPECT_EQ(with.ranks(rank).host_memory().peak_bytes(),
              without->ranks(rank).host_memory().peak_bytes() + copy);
    EXPECT_EQ(with.ranks(rank).memory().DebugString(), without->ranks(rank).memory().DebugString());
  }
  EXPECT_GT(train::CheckpointPatience(with), absl::Minutes(1));
  EXPECT_EQ(train::CheckpointPatience(*without), absl::ZeroDuration());
}

TEST_F(CheckpointingTest, AFullDiskIsAProblemAndTheJobGoesOn) {
  const std::string expected = UndisturbedSum();
  for (const char* point : {"checkpoint.shard_part:enospc:5", "checkpoint.shard_synced:eio:4",
                            "checkpoint.before_manifest:enospc:2"}) {
    SCOPED_TRACE(point);
    ASSERT_TRUE(ArmFailpoints(point).ok());
    const CheckpointedResult result = RunCheckpointed({.plan = Plan(point)});
    ASSERT_TRUE(result.ok()) << result.DebugString();
    ASSERT_FALSE(FailuresIn(result).empty());
    EXPECT_THAT(FailuresIn(result)[0], HasSubstr("failpoint"));
    EXPECT_LT(result.commits.size(), static_cast<size_t>(kSteps));
    ASSERT_FALSE(result.commits.empty());
    EXPECT_EQ(result.commits.back().step(), kSteps);
    EXPECT_EQ(result.commits.back().content_sha256(), expected);
    // What failed has left nothing.
    for (const v1::CheckpointRef& ref : result.commits) {
      EXPECT_TRUE(
          std::filesystem::remove_all(folder_.Path(absl::StrCat(point, "/job/g1/s", ref.step()))));
    }
    EXPECT_TRUE(std::filesystem::is_empty(folder_.Path(absl::StrCat(point, "/job/g1"))));
  }
}

TEST_F(CheckpointingTest, ASlowDiskSkipsIntervalsAndNeverBlocksAStep) {
  const std::string expected = UndisturbedSum();
  std::promise<void> released;
  std::shared_future<void> release = released.get_future().share();
  const CheckpointedResult result =
      RunCheckpointed({.plan = Plan("root"),
                       .on_step =
                           [&](int rank, int64_t step) {
                             if (rank == 0 && step == 4) released.set_value();
                           },
                       .may_commit =
                           [&](int rank) {
                             if (rank == 0)
                               release.wait();  // the first summary: until step 4 is trained
                             return absl::OkStatus();
                           }});
  ASSERT_TRUE(result.ok()) << result.DebugString();
  ASSERT_GE(result.problems.size(), 2u) << result.DebugString();
  EXPECT_EQ(result.problems[0].step(), 2);
  EXPECT_THAT(result.problems[0].message(),
              HasSubstr("skipped: the checkpoint of step 1 is still being written"));
  EXPECT_EQ(result.problems[1].step(), 3);
  EXPECT_EQ(result.commits.front().step(), 1);
  EXPECT_EQ(result.commits.back().step(), kSteps);
  EXPECT_EQ(result.commits.back().content_sha256(), expected);
}

TEST_F(CheckpointingTest, ALastCheckpointThatCannotBeWrittenFailsTheRun) {
  const CheckpointedResult result =
      RunCheckpointed({.plan = Plan("root", /*every=*/100), .may_commit = [](int rank) {
                         return rank == 1 ? absl::ResourceExhaustedError("rank 1's disk is full")
                                          : absl::OkStatus();
                       }});
  for (const absl::Status& status : result.statuses) {
    EXPECT_THAT(std::string(status.message()), HasSubstr("could not be written in 3 tries"));
  }
  EXPECT_EQ(result.statuses[1].code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(result.statuses[1].message()), HasSubstr("rank 1's disk is full"));
  EXPECT_THAT(result.commits, IsEmpty());
  EXPECT_THAT(result.reports, SizeIs(kSteps));
  ASSERT_THAT(result.problems, SizeIs(3));
}

TEST_F(CheckpointingTest, ALastCheckpointWaitsForRoom) {
  std::atomic<int> asked{0};
  const CheckpointedResult result =
      RunCheckpointed({.plan = Plan("root", /*every=*/100),
                       .may_commit =
                           [&asked](int rank) {
                             // Room comes while rank 1 waits after the tries that follow at once.
                             return rank == 1 && ++asked <= 3
                                        ? absl::ResourceExhaustedError("rank 1's disk is full")
                                        : absl::OkStatus();
                           },
                       .patience_at_end = absl::Milliseconds(1)});
  ASSERT_TRUE(result.ok()) << result.DebugString();
  EXPECT_THAT(result.problems, SizeIs(3));
  ASSERT_THAT(result.commits, SizeIs(1));
  EXPECT_EQ(result.commits[0].step(), kSteps);
}

TEST_F(CheckpointingTest, AStopEndsTheWaitForRoom) {
  std::atomic<bool> stop{false};
  std::atomic<int> asked{0};
  const CheckpointedResult result =
      RunCheckpointed({.plan = Plan("root", /*every=*/100),
                       .stop = &stop,
                       .may_commit =
                           [&](int rank) {
                             if (rank == 1 && ++asked == 4) stop = true;
                             return rank == 1
                                        ? absl::ResourceExhaustedError("rank 1's disk is full")
                                        : absl::OkStatus();
                           },
                       .patience_at_end = absl::Hours(1)});
  for (const absl::Status& status : result.statuses) {
    EXPECT_THAT(std::string(status.message()), HasSubstr("could not be written in 4 tries"));
  }
}

TEST_F(CheckpointingTest, ALastCheckpointIsTriedAgain) {
  ASSERT_TRUE(ArmFailpoints("checkpoint.manifest_in_place:eio:1").ok());
  const CheckpointedResult result = RunCheckpointed({.plan = Plan("root", /*every=*/100)});
  EXPECT_TRUE(result.ok()) << result.DebugString();
  EXPECT_THAT(result.problems, SizeIs(1));
  ASSERT_THAT(result.commits, SizeIs(1));
  EXPECT_EQ(result.commits[0].step(), kSteps);
}

TEST_F(CheckpointingTest, AStopIsACheckpointOnEveryRankAtOneStep) {
  std::atomic<bool> stop{false};
  const CheckpointedResult result = RunCheckpointed({.plan = Plan("root", /*every=*/100),
                                                     .on_step =
                                                         [&stop](int rank, int64_t step) {
                                                           if (rank == 2 && step == 3) stop = true;
                                                         },
                                                     .stop = &stop});
  ASSERT_THAT(result.commits, SizeIs(1)) << result.DebugString();
  const int64_t left = result.commits[0].step();
  EXPECT_GE(left, 3);
  for (const absl::Status& status : result.statuses) {
    EXPECT_EQ(status, absl::CancelledError(absl::StrCat("asked to stop before step ", left + 1)));
  }
}

TEST_F(CheckpointingTest, AStopWhoseCheckpointFailsLeavesAllTheSame) {
  std::atomic<bool> stop{true};
  CheckpointedRun run{.plan = Plan("root", /*every=*/100), .stop = &stop};
  const CheckpointedResult at_once = RunCheckpointed(run);  // nothing to write before step 1
  EXPECT_THAT(at_once.commits, IsEmpty());
  EXPECT_THAT(at_once.problems, IsEmpty());
  EXPECT_EQ(at_once.statuses[0], absl::CancelledError("asked to stop before step 1"));
  stop = false;
  run.generation = 2;
  run.on_step = [&stop](int, int64_t step) {
    if (step == 2) stop = true;
  };
  run.may_commit = [](int) { return absl::ResourceExhaustedError("full"); };
  const CheckpointedResult result = RunCheckpointed(run);
  for (const absl::Status& status : result.statuses)
    EXPECT_TRUE(absl::IsCancelled(status)) << status;
  EXPECT_THAT(result.commits, IsEmpty());
  EXPECT_FALSE(result.problems.empty());
}

TEST_F(CheckpointingTest, AStopWhileRestoringLeavesAtOnce) {
  const v1::RunPlan plan = Plan("root", /*every=*/3);
  std::atomic<bool> stop{false};
  const auto stop_at_3 = [&stop](int, int64_t step) {
    if (step == 3) stop = true;
  };
  RunCheckpointed({.plan = plan, .on_step = stop_at_3, .stop = &stop});
  const CheckpointedResult result = RunCheckpointed({.plan = plan, .generation = 2, .stop = &stop});
  EXPECT_TRUE(result.choice.newest.has_value());
  for (const absl::Status& status : result.statuses)
    EXPECT_TRUE(absl::IsCancelled(status)) << status;
  EXPECT_THAT(result.reports, IsEmpty());
}

TEST_F(CheckpointingTest, KeepsTheNewest) {
  const CheckpointedResult result =
      RunCheckpointed({.plan = Plan("root", /*every=*/1, /*keep=*/2), .retain = true});
  ASSERT_TRUE(result.ok()) << result.DebugString();
  EXPECT_THAT(FailuresIn(result), IsEmpty()) << result.DebugString();
  int whole = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder_.Path("root/job/g1"))) {
    whole += std::filesystem::exists(entry.path() / "MANIFEST") ? 1 : 0;
  }
  EXPECT_EQ(whole, 2);
}

TEST_F(CheckpointingTest, AShardThatSpoilsAfterTheChoiceFailsByName) {
  const v1::RunPlan plan = Plan("root");
  ASSERT_TRUE(RunCheckpointed({.plan = plan}).ok());
  const auto job = checkpoint::JobFolder::Open(folder_.Path("root"), "job");
  ASSERT_TRUE(job.ok());
  const auto choice = job->FindNewest(train::CheckpointFacts(plan));
  ASSERT_TRUE(choice.ok() && choice->newest.has_value());
  const std::string shard = absl::StrCat("root/job/g1/s", kSteps, "/rank-1.shard");
  std::string bytes = folder_.Read(shard);
  bytes[200] ^= 1;
  folder_.Write(shard, bytes);
  const auto from = job->Open(*choice->newest);
  ASSERT_TRUE(from.ok()) << from.status();
  const absl::Status status =
      RunRanks({.plan = plan}, [&](Rank rank) { return rank.step.Restore(**from, nullptr); });
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("rank-1.shard"), HasSubstr("damaged")));
}

// Which promise a run that goes on keeps, by what its manifest and its plan say.
TEST(WhyNotBitIdentical, NamesWhatIsUnlike) {
  v1::RunPlan plan = *MakePlan(MakeSpec({}));
  v1::CheckpointManifest stored = train::CheckpointFacts(plan);
  stored.add_shards()->set_arithmetic("AVX2");
  EXPECT_EQ(train::WhyNotBitIdentical(stored, plan, 0, "AVX2"), "");
  EXPECT_EQ(train::WhyNotBitIdentical(stored, plan, 0, "AVX3"),
            "rank 0 computed with AVX2 and goes on with AVX3");
  v1::CheckpointManifest by_another = stored;
  by_another.set_attention_kernel("cuda cudnn 9.19 bf16");
  EXPECT_EQ(train::WhyNotBitIdentical(by_another, plan, 0, "AVX2"),
            "attention was done by cuda cudnn 9.19 bf16 and is by cpu own fp32");
  by_another.clear_attention_kernel();  // of an earlier release
  EXPECT_EQ(train::WhyNotBitIdentical(by_another, plan, 0, "AVX2"), "");
  plan.set_bit_identical(false);
  EXPECT_THAT(train::WhyNotBitIdentical(stored, plan, 0, "AVX2"),
              HasSubstr("adds in no fixed order; train.deterministic: true keeps the bits"));
}

}  // namespace
}  // namespace upipe::testing
