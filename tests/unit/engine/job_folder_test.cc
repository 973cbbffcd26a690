// Whose a job's folder is, what is gone on from, and what may be deleted.
#include "engine/checkpoint/job_folder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <functional>
#include <limits>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "engine/checkpoint/verify.h"
#include "tests/support/engine/checkpoint_files.h"
#include "tests/unit/data/temp_folder.h"

namespace upipe::checkpoint {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;
using upipe::testing::TestFacts;
using upipe::testing::TestOwner;
using upipe::testing::WriteTestCheckpoint;

class JobFolderTest : public ::testing::Test {
 protected:
  std::string Step(int64_t generation, int64_t step) const {
    return absl::StrCat("root/job/g", generation, "/s", step);
  }
  ResumeChoice Find() const {
    auto choice = folder_.FindNewest(TestFacts());
    EXPECT_TRUE(choice.ok()) << choice.status();
    return choice.ok() ? *std::move(choice) : ResumeChoice();
  }
  // Of all folders that are there.
  std::vector<std::string> Steps() const {
    std::vector<std::string> steps;
    const auto entries = folder_.List();
    EXPECT_TRUE(entries.ok()) << entries.status();
    for (const JobFolder::Entry& entry : *entries) {
      steps.push_back(absl::StrCat("g", entry.generation, "/s", entry.step));
    }
    return steps;
  }

  data::TempFolder temp_;
  JobFolder folder_ = *JobFolder::Open(temp_.Path("root"), "job");
};

TEST_F(JobFolderTest, BelongsToOneJobAndItsNewestGeneration) {
  EXPECT_TRUE(folder_.Claim(TestOwner(2)).ok());
  EXPECT_TRUE(folder_.Claim(TestOwner(2)).ok());
  EXPECT_TRUE(folder_.CheckOwner(TestOwner(2)).ok());
  EXPECT_TRUE(folder_.Claim(TestOwner(3)).ok());
  EXPECT_EQ(folder_.Claim(TestOwner(2)).code(), absl::StatusCode::kAborted);
  EXPECT_EQ(folder_.CheckOwner(TestOwner(2)).code(), absl::StatusCode::kAborted);
  EXPECT_EQ(*folder_.NextGeneration(), 4);
  v1::CheckpointOwner other = TestOwner(9);
  other.set_job_id("another");
  EXPECT_THAT(std::string(folder_.Claim(other).message()),
              AllOf(HasSubstr("belongs to job job"), HasSubstr("another checkpoint.path")));
  temp_.Write("root/job/OWNER", "rubbish");
  EXPECT_FALSE(folder_.Claim(TestOwner(4)).ok());
}

TEST_F(JobFolderTest, NoGenerationIsAboveTheLast) {
  ASSERT_TRUE(folder_.Claim(TestOwner(std::numeric_limits<int64_t>::max())).ok());
  EXPECT_THAT(std::string(folder_.NextGeneration().status().message()),
              HasSubstr("none is above it"));
}

TEST_F(JobFolderTest, AnotherFileSystemIsNoticed) {
  const absl::Status missing = folder_.AwaitOwner(TestOwner(1), absl::Milliseconds(50));
  EXPECT_EQ(missing.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(missing.message()), HasSubstr("one file system"));
  ASSERT_TRUE(folder_.Claim(TestOwner(1)).ok());
  EXPECT_FALSE(folder_.AwaitOwner(TestOwner(2), absl::Milliseconds(50)).ok());
  std::thread later([&] { ASSERT_TRUE(folder_.Claim(TestOwner(2)).ok()); });
  EXPECT_TRUE(folder_.AwaitOwner(TestOwner(2), absl::Minutes(1)).ok());
  later.join();
}

TEST_F(JobFolderTest, OneLocalProcessAtATime) {
  ASSERT_TRUE(folder_.Lock().ok());
  const auto second = JobFolder::Open(temp_.Path("root"), "job");
  EXPECT_THAT(std::string(second->Lock().message()), HasSubstr("is training there"));
}

TEST_F(JobFolderTest, NothingThereIsTheBeginning) {
  EXPECT_FALSE(Find().newest.has_value());
  EXPECT_THAT(Find().passed_over, IsEmpty());
}

TEST_F(JobFolderTest, TheNewestIsByGenerationThenStep) {
  WriteTestCheckpoint(folder_, 1, 10, 2, 1);
  WriteTestCheckpoint(folder_, 1, 200, 2, 1);
  const v1::CheckpointRef newest = WriteTestCheckpoint(folder_, 2, 100, 3, 1);
  WriteTestCheckpoint(folder_, 2, 90, 1, 1);
  const ResumeChoice choice = Find();
  ASSERT_TRUE(choice.newest.has_value());
  EXPECT_EQ(choice.newest->generation(), 2);
  EXPECT_EQ(choice.newest->step(), 100);
  EXPECT_EQ(choice.newest->manifest_sha256(), newest.manifest_sha256());
  EXPECT_EQ(choice.newest->content_sha256(), newest.content_sha256());
  EXPECT_EQ(choice.newest->bytes(), newest.bytes());
  EXPECT_THAT(choice.passed_over, IsEmpty());
  EXPECT_TRUE(folder_.Open(newest).ok());
  v1::CheckpointRef other = newest;
  other.set_manifest_sha256(std::string(64, '0'));
  EXPECT_EQ(folder_.Open(other).status().code(), absl::StatusCode::kDataLoss);
}

struct Harm {
  const char* name;
  std::function<void(const data::TempFolder&, const std::string& step)> inflict;
  const char* message;
};

TEST_F(JobFolderTest, WhatIsDamagedPartialOrForeignIsPassedOverWithAReason) {
  const Harm harms[] = {
      {"value",
       [](const auto& temp, const std::string& step) {
         std::string bytes = temp.Read(step + "/rank-1.shard");
         bytes[1000] ^= 1;
         temp.Write(step + "/rank-1.shard", bytes);
       },
       "do not have the SHA-256 that was written"},
      {"cut",
       [](const auto& temp, const std::string& step) {
         const std::string bytes = temp.Read(step + "/rank-0.shard");
         temp.Write(step + "/rank-0.shard", bytes.substr(0, bytes.size() / 2));
       },
       "were written"},
      {"empty",
       [](const auto& temp, const std::string& step) { temp.Write(step + "/rank-0.shard", ""); },
       "has 0 bytes"},
      {"gone",
       [](const auto& temp, const std::string& step) {
         std::filesystem::remove(temp.Path(step + "/rank-1.shard"));
       },
       "a shard is gone"},
      {"unfinished",
       [](const auto& temp, const std::string& step) {
         std::filesystem::remove(temp.Path(step + "/MANIFEST"));
       },
       "it was not finished"},
      {"half_a_manifest",
       [](const auto& temp, const std::string& step) {
         temp.Write(step + "/MANIFEST", temp.Read(step + "/MANIFEST").substr(0, 100));
       },
       "is damaged"},
      {"a_link",
       [](const auto& temp, const std::string& step) {
         std::filesystem::rename(temp.Path(step + "/rank-1.shard"), temp.Path(step + "/away"));
         std::filesystem::create_symlink("away", temp.Path(step + "/rank-1.shard"));
       },
       "cannot open"},
  };
  int64_t generation = 1;
  for (const Harm& harm : harms) {
    SCOPED_TRACE(harm.name);
    const v1::CheckpointRef whole = WriteTestCheckpoint(folder_, generation, 10, 2, 1);
    WriteTestCheckpoint(folder_, generation, 20, 2, 1);
    harm.inflict(temp_, Step(generation, 20));
    const ResumeChoice choice = Find();
    ASSERT_TRUE(choice.newest.has_value());
    EXPECT_EQ(choice.newest->manifest_sha256(), whole.manifest_sha256());
    ASSERT_THAT(choice.passed_over, SizeIs(1));
    EXPECT_EQ(choice.passed_over[0].step(), 20);
    EXPECT_EQ(choice.passed_over[0].generation(), generation);
    EXPECT_THAT(choice.passed_over[0].message(), HasSubstr(harm.message));
    ++generation;
  }
}

TEST_F(JobFolderTest, AnotherJobsCheckpointIsRefusedByItsFirstDifference) {
  WriteTestCheckpoint(folder_, 1, 10, 2, 1);
  const auto reason = [&](const std::function<void(v1::CheckpointManifest&)>& change) {
    v1::CheckpointManifest wanted = TestFacts();
    change(wanted);
    const auto choice = folder_.FindNewest(wanted);
    EXPECT_FALSE(choice->newest.has_value());
    return choice->passed_over.empty() ? "" : choice->passed_over[0].message();
  };
  EXPECT_THAT(reason([](auto& m) { m.mutable_tensors(1)->set_shape(1, 6); }),
              HasSubstr("tensor 1 is a [3, 5], the model's a [3, 6]"));
  EXPECT_THAT(reason([](auto& m) { m.mutable_tensors(0)->set_name("z"); }),
              HasSubstr("tensor 0 is b [40000], the model's z [40000]"));
  EXPECT_THAT(reason([](auto& m) { m.mutable_tensors()->RemoveLast(); }),
              HasSubstr("it has 3 tensors, the model 2"));
  EXPECT_THAT(reason([](auto& m) { m.mutable_state()->set_seed(8); }),
              HasSubstr("train.seed is 7"));
  EXPECT_THAT(reason([](auto& m) { m.mutable_state()->set_context(65); }),
              HasSubstr("train.context is 64"));
  EXPECT_THAT(reason([](auto& m) { m.mutable_state()->set_sequences_per_step(3); }),
              HasSubstr("a step has 2 sequences, the job's 3"));
}

TEST_F(JobFolderTest, AMovedCheckpointIsNotTakenForAnother) {
  WriteTestCheckpoint(folder_, 1, 10, 1, 1);
  std::filesystem::rename(temp_.Path(Step(1, 10)), temp_.Path(Step(1, 30)));
  const ResumeChoice choice = Find();
  EXPECT_FALSE(choice.newest.has_value());
  ASSERT_THAT(choice.passed_over, SizeIs(1));
  EXPECT_THAT(choice.passed_over[0].message(), HasSubstr("holds step 10 of generation 1"));
}

TEST_F(JobFolderTest, RetentionKeepsTheNewestWholeOnesAndClearsWhatNobodyFinishes) {
  for (const int64_t step : {10, 20, 30}) WriteTestCheckpoint(folder_, 1, step, 1, 1);
  temp_.Write(Step(1, 40) + "/rank-0.shard", "half");   // left by a dead generation
  temp_.Write("root/job/g2/s35/rank-0.shard", "half");  // all of it
  for (const int64_t step : {40, 50, 60}) WriteTestCheckpoint(folder_, 3, step, 1, 1);
  temp_.Write(Step(3, 45) + "/rank-0.shard", "half");  // given up, and could not be removed
  temp_.Write(Step(3, 70) + "/rank-0.shard", "half");  // being written
  temp_.Write("root/job/notes.txt", "a person's");
  v1::CheckpointRef newest;
  newest.set_generation(3);
  newest.set_step(50);
  ASSERT_TRUE(folder_.Retain(newest, 3).ok());
  EXPECT_THAT(Steps(), ElementsAre("g3/s70", "g3/s60", "g3/s50", "g3/s40", "g1/s30"));
  newest.set_step(60);
  ASSERT_TRUE(folder_.Retain(newest, 1).ok());
  EXPECT_THAT(Steps(), ElementsAre("g3/s70", "g3/s60"));
  EXPECT_FALSE(std::filesystem::exists(temp_.Path("root/job/g1")));
  EXPECT_FALSE(std::filesystem::exists(temp_.Path("root/job/g2")));
  EXPECT_TRUE(std::filesystem::exists(temp_.Path("root/job/notes.txt")));
  EXPECT_TRUE(Find().newest.has_value());
}

TEST_F(JobFolderTest, VerifyFindsEveryCheckpointBelow) {
  const v1::CheckpointRef whole = WriteTestCheckpoint(folder_, 1, 10, 2, 1);
  WriteTestCheckpoint(folder_, 2, 20, 1, 1);
  WriteTestCheckpoint(folder_, 2, 30, 1, 1);
  std::filesystem::remove(temp_.Path(Step(2, 20) + "/MANIFEST"));
  std::string bytes = temp_.Read(Step(2, 30) + "/rank-0.shard");
  bytes[5000] ^= 1;
  temp_.Write(Step(2, 30) + "/rank-0.shard", bytes);
  for (const char* path : {"", "/job", "/job/g1", "/job/g1/s10"}) {
    std::vector<Verdict> verdicts;
    ASSERT_TRUE(VerifyBelow(temp_.Path("root") + path, [&](const Verdict& verdict) {
                  verdicts.push_back(verdict);
                }).ok());
    ASSERT_FALSE(verdicts.empty()) << path;
    EXPECT_TRUE(verdicts[0].status.ok()) << verdicts[0].status;
    EXPECT_EQ(verdicts[0].ref.content_sha256(), whole.content_sha256());
    if (verdicts.size() == 1) continue;
    ASSERT_THAT(verdicts, SizeIs(3));
    EXPECT_EQ(verdicts[1].status.code(), absl::StatusCode::kNotFound);
    EXPECT_EQ(verdicts[2].status.code(), absl::StatusCode::kDataLoss);
  }
  EXPECT_FALSE(VerifyBelow(temp_.Path("nowhere"), [](const Verdict&) {}).ok());
}

}  // namespace
}  // namespace upipe::checkpoint
