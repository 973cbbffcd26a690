// A run that was interrupted and went on is the run that was not: the same bits for the same
// layout, within the bound for another; and a checkpoint's content has one sum, whoever wrote it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <filesystem>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "engine/train/checkpointing.h"
#include "tests/support/engine/checkpointed_run.h"
#include "tests/unit/data/temp_folder.h"

namespace upipe::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

constexpr int64_t kSteps = 10;
constexpr int64_t kInterruptedAt = 5;

struct NamedJob {
  const char* name;
  SmallJob job;
};
void PrintTo(const NamedJob& job, std::ostream* out) { *out << job.name; }

const NamedJob kJobs[] = {
    {"one_rank", {.ranks = 1}},
    {"upipe", {.ranks = 4}},
    {"ulysses", {.ranks = 4, .method = v1::METHOD_ULYSSES}},
    {"ring", {.ranks = 3, .method = v1::METHOD_RING}},
    {"usp", {.ranks = 4, .method = v1::METHOD_USP, .ring_ranks = 2}},
    {"fpdt", {.ranks = 2, .method = v1::METHOD_FPDT}},
    {"hybrid_bf16", {.ranks = 4, .bf16 = true, .ring_ranks = 2}},
    {"fsdp", {.ranks = 4, .fsdp_ranks = 2}},
    {"dp", {.ranks = 6, .dp_ranks = 3}},
    {"dp_fsdp_accumulation", {.ranks = 4, .fsdp_ranks = 2, .dp_ranks = 2, .accumulation = 2}},
    {"tied_biased_bf16",
     {.ranks = 2, .tie_embeddings = true, .qk_norm = true, .qkv_bias = true, .bf16 = true}},
    {"optimizer_on_host", {.ranks = 2, .optimizer = v1::PLACE_HOST}},
    {"all_on_host",
     {.ranks = 4,
      .bf16 = true,
      .dp_ranks = 2,
      .accumulation = 2,
      .layer_inputs = v1::PLACE_HOST,
      .hidden_stream = v1::PLACE_HOST,
      .optimizer = v1::PLACE_HOST}},
};

class Resume : public ::testing::Test {
 protected:
  void SetUp() override { WriteSmallCorpus(folder_.Path("corpus")); }

  v1::RunPlan Plan(SmallJob job, const std::string& root, int64_t steps = kSteps) const {
    job.vocab_size = 257;
    v1::JobSpec spec = MakeSpec(job);
    spec.mutable_data()->set_path(folder_.Path("corpus"));
    spec.mutable_train()->set_steps(steps);
    spec.mutable_optimizer()->set_warmup_steps(3);
    spec.mutable_checkpoint()->set_path(folder_.Path(root));
    spec.mutable_checkpoint()->set_every_steps(kInterruptedAt);
    spec.mutable_checkpoint()->set_keep(100);
    auto plan = MakePlan(spec);
    EXPECT_TRUE(plan.ok()) << plan.status();
    return *std::move(plan);
  }

  // Generation 1 leaves after kInterruptedAt steps.
  CheckpointedResult Interrupted(const v1::RunPlan& plan) const {
    std::atomic<bool> stop{false};
    return RunCheckpointed({.plan = plan,
                            .on_step =
                                [&stop](int rank, int64_t step) {
                                  if (rank == 0 && step == kInterruptedAt) stop = true;
                                },
                            .stop = &stop});
  }

  data::TempFolder folder_;
};

class ResumeJobs : public Resume, public ::testing::WithParamInterface<NamedJob> {};

TEST_P(ResumeJobs, GoesOnBitForBit) {
  const CheckpointedResult straight = RunCheckpointed({.plan = Plan(GetParam().job, "straight")});
  ASSERT_TRUE(straight.ok()) << straight.DebugString();
  ASSERT_THAT(straight.commits, SizeIs(2)) << straight.DebugString();

  const v1::RunPlan plan = Plan(GetParam().job, "interrupted");
  const CheckpointedResult first = Interrupted(plan);
  ASSERT_THAT(first.commits, SizeIs(1)) << first.DebugString();
  for (const absl::Status& status : first.statuses)
    EXPECT_TRUE(absl::IsCancelled(status)) << status;
  EXPECT_EQ(first.commits[0].content_sha256(), straight.commits[0].content_sha256());

  const CheckpointedResult second = RunCheckpointed({.plan = plan, .generation = 2});
  ASSERT_TRUE(second.ok()) << second.DebugString();
  EXPECT_THAT(second.problems, IsEmpty()) << second.DebugString();
  ASSERT_TRUE(second.choice.newest.has_value());
  EXPECT_EQ(second.choice.newest->step(), kInterruptedAt);
  ASSERT_THAT(second.reports, SizeIs(kSteps - kInterruptedAt));
  for (size_t i = 0; i < second.reports.size(); ++i) {
    const v1::StepReport& expected = straight.reports[kInterruptedAt + i];
    EXPECT_EQ(second.reports[i].step(), expected.step());
    EXPECT_EQ(second.reports[i].loss(), expected.loss()) << "step " << expected.step();
    EXPECT_EQ(second.reports[i].grad_norm(), expected.grad_norm()) << "step " << expected.step();
    EXPECT_EQ(second.reports[i].learning_rate(), expected.learning_rate());
  }
  EXPECT_EQ(second.reports.back().held_out_loss(), straight.reports.back().held_out_loss());
  ASSERT_THAT(second.commits, SizeIs(1));
  EXPECT_EQ(second.commits[0].step(), kSteps);
  EXPECT_EQ(second.commits[0].content_sha256(), straight.commits[1].content_sha256());
  EXPECT_NE(second.commits[0].manifest_sha256(), straight.commits[1].manifest_sha256());
}

INSTANTIATE_TEST_SUITE_P(Jobs, ResumeJobs, ::testing::ValuesIn(kJobs),
                         [](const auto& info) { return std::string(info.param.name); });

// Read into every layout and written from there, a checkpoint keeps its sum.
TEST_F(Resume, ContentHasOneSumInEveryLayout) {
  const CheckpointedResult written =
      RunCheckpointed({.plan = Plan({.ranks = 3, .tie_embeddings = true}, "root", kInterruptedAt)});
  ASSERT_THAT(written.commits, SizeIs(1)) << written.DebugString();
  const v1::CheckpointRef& ref = written.commits[0];
  const auto job = checkpoint::JobFolder::Open(folder_.Path("root"), "job");
  ASSERT_TRUE(job.ok()) << job.status();
  for (SmallJob layout :
       {SmallJob{.ranks = 1}, SmallJob{.ranks = 5}, SmallJob{.ranks = 4, .ring_ranks = 2},
        SmallJob{.ranks = 4, .dp_ranks = 2}, SmallJob{.ranks = 6, .fsdp_ranks = 2, .dp_ranks = 3},
        SmallJob{.ranks = 4, .dp_ranks = 2, .optimizer = v1::PLACE_HOST}}) {
    SCOPED_TRACE(absl::StrCat(layout.ranks, " ranks, dp ", layout.dp_ranks));
    layout.tie_embeddings = true;
    const v1::RunPlan plan = Plan(layout, "elsewhere");
    const auto folder = checkpoint::Folder::OpenRoot(
        folder_.Path(absl::StrCat("copy", layout.ranks, layout.dp_ranks)), /*make=*/true);
    ASSERT_TRUE(folder.ok()) << folder.status();
    std::vector<v1::ShardSummary> summaries(layout.ranks);
    const absl::Status status = RunRanks({.plan = plan}, [&](Rank rank) -> absl::Status {
      UPIPE_ASSIGN_OR_RETURN(const auto from, job->Open(ref));
      UPIPE_RETURN_IF_ERROR(rank.step.Restore(*from, nullptr));
      UPIPE_ASSIGN_OR_RETURN(const auto pieces, rank.step.TakeSnapshot());
      UPIPE_ASSIGN_OR_RETURN(summaries[rank.rank],
                             checkpoint::WriteShard(*folder, checkpoint::ShardName(rank.rank),
                                                    pieces, [] { return absl::OkStatus(); }));
      summaries[rank.rank].set_rank(rank.rank);
      return absl::OkStatus();
    });
    ASSERT_TRUE(status.ok()) << status;
    std::vector<checkpoint::ShardFile> shards;
    for (const v1::ShardSummary& summary : summaries) {
      auto shard = checkpoint::ShardFile::Open(*folder, summary);
      ASSERT_TRUE(shard.ok()) << shard.status();
      shards.push_back(*std::move(shard));
    }
    const auto content =
        checkpoint::Content::Create(train::CheckpointFacts(plan).tensors(), std::move(shards));
    ASSERT_TRUE(content.ok()) << content.status();
    const auto from = job->Open(ref);
    ASSERT_TRUE(from.ok()) << from.status();
    const auto sum = content->Sum((*from)->manifest().state());
    ASSERT_TRUE(sum.ok()) << sum.status();
    EXPECT_EQ(*sum, ref.content_sha256());
  }
}

TEST_F(Resume, AnotherLayoutGoesOnWithinTheBoundAndSaysSo) {
  const CheckpointedResult straight = RunCheckpointed({.plan = Plan({.ranks = 1}, "straight")});
  ASSERT_TRUE(straight.ok()) << straight.DebugString();
  ASSERT_THAT(Interrupted(Plan({.ranks = 1}, "root")).commits, SizeIs(1));
  int64_t generation = 2;
  for (const SmallJob& layout :
       {SmallJob{.ranks = 4}, SmallJob{.ranks = 2, .method = v1::METHOD_RING},
        SmallJob{.ranks = 2, .optimizer = v1::PLACE_HOST}}) {
    // From the same checkpoint each time.
    std::filesystem::copy(folder_.Path("root"), folder_.Path(absl::StrCat("root", generation)),
                          std::filesystem::copy_options::recursive);
    const CheckpointedResult result = RunCheckpointed(
        {.plan = Plan(layout, absl::StrCat("root", generation)), .generation = generation});
    ++generation;
    ASSERT_TRUE(result.ok()) << result.DebugString();
    ASSERT_THAT(result.problems, SizeIs(layout.ranks));
    EXPECT_THAT(result.problems[0].message(), HasSubstr("within the bound, not bit for bit"));
    ASSERT_THAT(result.reports, SizeIs(kSteps - kInterruptedAt));
    for (size_t i = 0; i < result.reports.size(); ++i) {
      const v1::StepReport& expected = straight.reports[kInterruptedAt + i];
      EXPECT_NEAR(result.reports[i].loss(), expected.loss(), 1e-5 * expected.loss());
    }
  }
}

// Counters of skipped updates are part of what goes on, and drive the bias correction and the end.
TEST_F(Resume, SkippedStepsAreCountedOn) {
  const auto plan_of = [&](const std::string& root) {
    v1::JobSpec spec = Plan({.ranks = 2}, root, 12).spec();
    spec.mutable_optimizer()->set_learning_rate(1e30);  // the first update destroys the weights
    spec.mutable_optimizer()->set_warmup_steps(0);
    spec.mutable_optimizer()->set_max_skipped_steps(7);
    return *MakePlan(spec);
  };
  const CheckpointedResult straight = RunCheckpointed({.plan = plan_of("straight")});
  const v1::RunPlan plan = plan_of("root");
  ASSERT_THAT(Interrupted(plan).commits, SizeIs(1));
  const CheckpointedResult second = RunCheckpointed({.plan = plan, .generation = 2});
  ASSERT_THAT(second.statuses, SizeIs(2)) << second.DebugString();
  EXPECT_EQ(second.statuses[0], straight.statuses[0]);
  EXPECT_THAT(std::string(second.statuses[0].message()),
              HasSubstr("7 updates in a row were skipped up to step 8"));
  ASSERT_FALSE(second.reports.empty());
  EXPECT_EQ(second.reports.back().skipped_steps_total(),
            straight.reports.back().skipped_steps_total());
}

TEST_F(Resume, AFinishedJobHasNothingLeftToDo) {
  const v1::RunPlan plan = Plan({.ranks = 2}, "root", kInterruptedAt);
  ASSERT_TRUE(RunCheckpointed({.plan = plan}).ok());
  const CheckpointedResult again = RunCheckpointed({.plan = plan, .generation = 2});
  EXPECT_TRUE(again.ok()) << again.DebugString();
  EXPECT_THAT(again.reports, IsEmpty());
  EXPECT_THAT(again.commits, IsEmpty());
}

}  // namespace
}  // namespace upipe::testing
