// The writer thread: what it puts in place, when it refuses to, and how a failure on one rank ends
// a checkpoint on all of them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/failpoint.h"
#include "engine/checkpoint/writer.h"
#include "tests/support/engine/checkpoint_files.h"
#include "tests/unit/data/temp_folder.h"

namespace upipe::checkpoint {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;
using upipe::testing::TestFacts;
using upipe::testing::TestOwner;
using upipe::testing::TestState;
using upipe::testing::TestTensors;

class WriterTest : public ::testing::Test {
 protected:
  void SetUp() override { ASSERT_TRUE(folder_.Claim(TestOwner(1)).ok()); }
  void TearDown() override { ASSERT_TRUE(ArmFailpoints("").ok()); }

  std::unique_ptr<Writer> Make(int rank, int ranks,
                               const std::function<void(WriterOptions&)>& adjust = {}) {
    WriterOptions options{.folder = folder_,
                          .owner = TestOwner(1),
                          .rank = rank,
                          .num_ranks = ranks,
                          .facts = TestFacts(),
                          .arithmetic = "test",
                          .patience = absl::Minutes(1),
                          .on_committed =
                              [this](const v1::CheckpointRef& ref) {
                                const std::lock_guard lock(mutex_);
                                commits_.push_back(ref);
                              },
                          .on_problem =
                              [this](const v1::CheckpointProblem& problem) {
                                const std::lock_guard lock(mutex_);
                                problems_.push_back(problem);
                              }};
    if (adjust) adjust(options);
    return std::make_unique<Writer>(std::move(options));
  }
  // What ranks agree on at a boundary: the largest of each.
  static Writer::Standing Vote(const std::vector<Writer*>& writers) {
    Writer::Standing all;
    for (Writer* writer : writers) {
      const Writer::Standing standing = writer->Hold();
      all.busy |= standing.busy;
      all.failed_step = std::max(all.failed_step, standing.failed_step);
      all.sealed_step = std::max(all.sealed_step, standing.sealed_step);
    }
    for (Writer* writer : writers) {
      if (all.failed_step > all.sealed_step) {
        writer->Abandon(all.failed_step);
      } else {
        writer->Forgive(all.failed_step);
      }
      writer->Release();
    }
    return all;
  }
  bool Exists(const std::string& name) const {
    return std::filesystem::exists(temp_.Path("root/job/" + name));
  }

  data::TempFolder temp_;
  JobFolder folder_ = *JobFolder::Open(temp_.Path("root"), "job");
  TestTensors tensors_{1};
  std::mutex mutex_;
  std::vector<v1::CheckpointRef> commits_;
  std::vector<v1::CheckpointProblem> problems_;
};

TEST_F(WriterTest, CommitsWhenEveryPartIsThere) {
  const auto zero = Make(0, 2);
  const auto one = Make(1, 2);
  zero->Start(TestState(7), tensors_.Pieces(0, 2));
  zero->AwaitPart();
  EXPECT_TRUE(zero->busy());
  EXPECT_FALSE(Exists("g1/s7/MANIFEST"));
  one->Start(TestState(7), tensors_.Pieces(1, 2));
  one->AwaitIdle();
  zero->AwaitIdle();
  ASSERT_THAT(commits_, SizeIs(1));
  EXPECT_EQ(commits_[0].step(), 7);
  EXPECT_GT(commits_[0].write_seconds(), 0);
  EXPECT_THAT(problems_, IsEmpty());
  EXPECT_EQ(folder_.FindNewest(TestFacts())->newest->manifest_sha256(),
            commits_[0].manifest_sha256());
  EXPECT_FALSE(Exists("g1/s7/MANIFEST.tmp"));
}

TEST_F(WriterTest, NothingIsRenamedPastTheDeadlineOrForAnOldGeneration) {
  bool may = false;
  {
    const auto writer = Make(0, 1, [&](WriterOptions& options) {
      options.may_commit = [&may]() -> absl::Status {
        return may ? absl::OkStatus() : absl::AbortedError("the deadline passed");
      };
    });
    writer->Start(TestState(7), tensors_.Pieces(0, 1));
    writer->AwaitIdle();
  }
  EXPECT_FALSE(Exists("g1/s7/rank-0.summary"));
  EXPECT_FALSE(Exists("g1/s7/MANIFEST"));
  ASSERT_THAT(problems_, SizeIs(1));
  EXPECT_THAT(problems_[0].message(), HasSubstr("the deadline passed"));
  const auto old = Make(0, 1);
  ASSERT_TRUE(folder_.Claim(TestOwner(2)).ok());
  old->Start(TestState(8), tensors_.Pieces(0, 1));
  old->AwaitIdle();
  EXPECT_THAT(commits_, IsEmpty());
  EXPECT_FALSE(Exists("g1/s8/MANIFEST"));
  EXPECT_FALSE(Exists("g1/s8/MANIFEST.tmp"));
  ASSERT_THAT(problems_, SizeIs(2));
  EXPECT_THAT(problems_[1].message(), HasSubstr("belongs to generation 2"));
}

TEST_F(WriterTest, AnOldGenerationDeletesNothing) {
  upipe::testing::WriteTestCheckpoint(folder_, 1, 5, 1, 1);
  const v1::CheckpointRef newest = upipe::testing::WriteTestCheckpoint(folder_, 1, 6, 1, 1);
  {
    const auto writer = Make(0, 1);
    ASSERT_TRUE(folder_.Claim(TestOwner(2)).ok());
    writer->Retain(newest, 1);
  }
  EXPECT_TRUE(Exists("g1/s5/MANIFEST"));
  EXPECT_THAT(problems_, SizeIs(1));
}

TEST_F(WriterTest, RetainsWhatItIsTold) {
  upipe::testing::WriteTestCheckpoint(folder_, 1, 5, 1, 1);
  const v1::CheckpointRef newest = upipe::testing::WriteTestCheckpoint(folder_, 1, 6, 1, 1);
  Make(0, 1)->Retain(newest, 1);  // carried out before the writer goes
  EXPECT_FALSE(Exists("g1/s5"));
  EXPECT_TRUE(Exists("g1/s6/MANIFEST"));
  EXPECT_THAT(problems_, IsEmpty());
}

TEST_F(WriterTest, OneRanksFullDiskEndsTheCheckpointOnAllAndTheNextIsFine) {
  const auto zero = Make(0, 2);
  const auto one = Make(1, 2);
  zero->Start(TestState(7), tensors_.Pieces(0, 2));
  zero->AwaitPart();
  ASSERT_TRUE(ArmFailpoints("checkpoint.shard_part:enospc:3").ok());
  one->Start(TestState(7), tensors_.Pieces(1, 2));
  one->AwaitPart();  // or its failure: the vote that follows must know
  const Writer::Standing vote = Vote({zero.get(), one.get()});
  EXPECT_TRUE(vote.busy);  // rank 0 waits for what will not come
  EXPECT_EQ(vote.failed_step, 7);
  zero->AwaitIdle();
  one->AwaitIdle();
  ASSERT_THAT(problems_, SizeIs(1));
  EXPECT_EQ(problems_[0].step(), 7);
  EXPECT_THAT(problems_[0].message(), AllOf(HasSubstr("rank 1"), HasSubstr("No space left")));
  EXPECT_FALSE(Exists("g1/s7"));
  EXPECT_THAT(problems_, SizeIs(1));
  EXPECT_EQ(Vote({zero.get(), one.get()}).failed_step, 0);
  zero->Start(TestState(8), tensors_.Pieces(0, 2));
  one->Start(TestState(8), tensors_.Pieces(1, 2));
  zero->AwaitIdle();
  EXPECT_THAT(commits_, SizeIs(1));
}

TEST_F(WriterTest, AStepCanBeTriedAgain) {
  const auto writer = Make(0, 1);
  ASSERT_TRUE(ArmFailpoints("checkpoint.summary_in_place:eio").ok());
  writer->Start(TestState(7), tensors_.Pieces(0, 1));
  writer->AwaitIdle();
  EXPECT_EQ(Vote({writer.get()}).failed_step, 7);
  writer->Start(TestState(7), tensors_.Pieces(0, 1));
  writer->AwaitIdle();
  EXPECT_THAT(commits_, SizeIs(1));
  EXPECT_TRUE(Exists("g1/s7/MANIFEST"));
}

// A rank may fail after its summary was seen: then the checkpoint is whole, and stays.
TEST_F(WriterTest, WhatIsSealedIsNotGivenUp) {
  const auto zero = Make(0, 2);
  const auto one = Make(1, 2);
  ASSERT_TRUE(ArmFailpoints("checkpoint.summary_in_place:eio").ok());
  one->Start(TestState(7), tensors_.Pieces(1, 2));
  one->AwaitIdle();
  zero->Start(TestState(7), tensors_.Pieces(0, 2));
  zero->AwaitIdle();
  ASSERT_THAT(commits_, SizeIs(1));
  const Writer::Standing vote = Vote({zero.get(), one.get()});
  EXPECT_EQ(vote.failed_step, 7);
  EXPECT_EQ(vote.sealed_step, 7);
  one->AwaitIdle();
  EXPECT_TRUE(Exists("g1/s7/rank-1.shard"));
  EXPECT_EQ(Vote({zero.get(), one.get()}).failed_step, 0);
  EXPECT_TRUE(folder_.FindNewest(TestFacts())->newest.has_value());
}

// Between a vote's question and its answer rank 0 renames nothing.
TEST_F(WriterTest, NothingIsSealedWhileAVoteIsUnderWay) {
  std::promise<void> asked;
  const auto writer = Make(0, 1, [&](WriterOptions& options) {
    options.may_commit = [&asked, calls = 0]() mutable {
      if (++calls == 1) asked.set_value();  // for the summary; the manifest comes next
      return absl::OkStatus();
    };
  });
  EXPECT_EQ(writer->Hold().sealed_step, 0);
  writer->Start(TestState(7), tensors_.Pieces(0, 1));
  asked.get_future().wait();
  writer->AwaitPart();
  writer->Abandon(7);
  writer->Release();
  writer->AwaitIdle();
  EXPECT_THAT(commits_, IsEmpty());
  EXPECT_FALSE(Exists("g1/s7"));
}

TEST_F(WriterTest, ARankThatNeverComesEndsTheWaiting) {
  const auto zero =
      Make(0, 2, [](WriterOptions& options) { options.patience = absl::Milliseconds(50); });
  zero->Start(TestState(7), tensors_.Pieces(0, 2));
  zero->AwaitIdle();
  ASSERT_THAT(problems_, SizeIs(1));
  EXPECT_THAT(problems_[0].message(),
              AllOf(HasSubstr("rank-1.summary"), HasSubstr("did not come")));
  EXPECT_EQ(Vote({zero.get()}).failed_step, 7);
  zero->AwaitIdle();
  EXPECT_FALSE(Exists("g1/s7"));
}

TEST_F(WriterTest, PartsOfAnotherStateAreNotPutTogether) {
  const auto zero = Make(0, 2);
  const auto one = Make(1, 2);
  v1::TrainingState other = TestState(7);
  other.set_applied_steps(6);
  one->Start(other, tensors_.Pieces(1, 2));
  zero->Start(TestState(7), tensors_.Pieces(0, 2));
  one->AwaitIdle();
  zero->AwaitIdle();
  EXPECT_THAT(commits_, IsEmpty());
  ASSERT_THAT(problems_, SizeIs(1));
  EXPECT_THAT(problems_[0].message(), HasSubstr("is of another state"));
}

TEST_F(WriterTest, CancellingEndsTheWaitingAtOnce) {
  const auto zero = Make(0, 2);
  zero->Start(TestState(7), tensors_.Pieces(0, 2));
  zero->AwaitPart();
  zero->Cancel();
  zero->AwaitIdle();
  EXPECT_THAT(problems_, IsEmpty());
  EXPECT_TRUE(Exists("g1/s7/rank-0.shard"));  // for the next generation's retention to clear
}

}  // namespace
}  // namespace upipe::checkpoint
