// `upipe checkpoints`: the record, and the folder where it is reached.
#include <gmock/gmock.h>

#include <nlohmann/json.hpp>

#include "client/commands.h"
#include "tests/unit/client/console_test.h"

namespace upipe::client {
namespace {

using testing::AllOf;
using testing::ContainsRegex;
using testing::HasSubstr;
using testing::Not;

class CheckpointsTest : public ConsoleTest {
 protected:
  v1::Job& AddJob() {
    v1::Job& job = coordinator_.jobs.emplace_back();
    job.set_id("demo-abcdef");
    job.set_state(v1::JOB_STATE_RUNNING);
    job.set_generation(2);
    job.mutable_spec()->mutable_checkpoint()->set_path(folder_);
    job.mutable_resume()->set_generation(1);
    job.mutable_resume()->set_step(20);
    v1::CheckpointRef& last = *job.mutable_last_commit();
    last.set_generation(2);
    last.set_step(40);
    last.set_bytes(3 << 20);
    last.set_write_seconds(1.5);
    last.set_content_sha256("abc123");
    v1::JobEvent& event = *job.add_events();
    event.set_kind("CHECKPOINT_PROBLEM");
    event.set_message("step 30: no space left on device");
    job.add_events()->set_kind("RUNNING");
    return job;
  }
  void WriteCheckpoint(int generation, int step, bool committed) {
    const std::string at = absl::StrCat(folder_, "/demo-abcdef/g", generation, "/s", step, "/");
    for (int rank = 0; rank < 2; ++rank) {
      WriteText(absl::StrCat(at, "rank-", rank, ".shard"), std::string(1024, 's'));
      WriteText(absl::StrCat(at, "rank-", rank, ".summary"), "s");
    }
    if (committed) WriteText(at + "MANIFEST", "m");
  }
};

TEST_F(CheckpointsTest, TellTheRecordAndWhatLiesInTheFolder) {
  AddJob();
  WriteCheckpoint(1, 20, true);
  WriteCheckpoint(2, 40, true);
  WriteCheckpoint(2, 60, false);
  WriteText(folder_ + "/demo-abcdef/OWNER", "o");
  WriteText(folder_ + "/demo-abcdef/g2/notes", "n");
  EXPECT_EQ(Checkpoints(console_, "demo"), kExitDone);
  EXPECT_THAT(out_.str(),
              AllOf(HasSubstr("Last committed: step 40 of generation 2, 3.0 MiB, written in 1.5 s"),
                    HasSubstr("content SHA-256 abc123"),
                    HasSubstr("Generation 2 went on from: step 20 of generation 1"),
                    HasSubstr("step 30: no space left on device"), Not(HasSubstr("notes")),
                    ContainsRegex("60 +2 +unfinished +2 +2\\.0 KiB"),
                    ContainsRegex("40 +2 +committed, newest +2 +2\\.0 KiB"),
                    ContainsRegex("20 +1 +committed, gone on from +2 ")));
  EXPECT_EQ(err_.str(), "");
}

TEST_F(CheckpointsTest, SayWhenOnlyTheRecordSpeaks) {
  AddJob().mutable_spec()->mutable_checkpoint()->set_path("/nonexistent/checkpoints");
  EXPECT_EQ(Checkpoints(console_, "demo"), kExitDone);
  EXPECT_THAT(out_.str(), AllOf(HasSubstr("step 40"), Not(HasSubstr("STANDING"))));
  EXPECT_THAT(err_.str(), HasSubstr("not reached from this machine"));
}

TEST_F(CheckpointsTest, SayWhenAJobWritesNone) {
  AddJob().mutable_spec()->clear_checkpoint();
  EXPECT_EQ(Checkpoints(console_, "demo"), kExitDone);
  EXPECT_THAT(out_.str(), HasSubstr("writes no checkpoints"));
}

TEST_F(CheckpointsTest, JsonHasRecordAndFolder) {
  AddJob();
  WriteCheckpoint(2, 40, true);
  console_.json = true;
  EXPECT_EQ(Checkpoints(console_, "demo"), kExitDone);
  auto json = nlohmann::json::parse(out_.str());
  EXPECT_EQ(json.at("last_commit").at("step"), "40");
  EXPECT_EQ(json.at("resume").at("generation"), "1");
  EXPECT_EQ(json.at("problems").size(), 1u);
  ASSERT_EQ(json.at("folder").size(), 1u);
  EXPECT_EQ(json.at("folder").at(0).at("bytes"), 2048);
  std::filesystem::remove_all(folder_ + "/demo-abcdef");
  coordinator_.jobs[0].clear_resume();
  out_.str("");
  EXPECT_EQ(Checkpoints(console_, "demo"), kExitDone);
  json = nlohmann::json::parse(out_.str());
  EXPECT_TRUE(json.at("folder").is_null());
  EXPECT_TRUE(json.at("resume").is_null());
}

}  // namespace
}  // namespace upipe::client
