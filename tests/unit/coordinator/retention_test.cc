// Records of jobs that ended go after a while: the newest stay.
#include "tests/unit/coordinator/scene.h"

namespace upipe::coordinator {
namespace {

class RetentionTest : public Scene {
 protected:
  void Ended(const std::string& id) {
    Submit(4, id);
    Cancel(id);
    core_.Advance(absl::Seconds(1));
    Heartbeats();
  }
};

TEST_F(RetentionTest, TheNewestEndedJobsStay) {
  Workers();
  for (int i = 0; i < 40; ++i) Ended(absl::StrCat("job-", i));
  Submit(4, "alive");
  core_.state().retention.jobs = 3;
  core_.Do(Tick{});
  EXPECT_EQ(core_.state().jobs.size(), 25u);  // some at a time
  for (const Batch& batch : core_.batches()) EXPECT_LE(batch.writes.size(), kMaxBatchWrites);
  for (int i = 0; i < 5; ++i) core_.Do(Tick{});
  EXPECT_EQ(core_.state().jobs.size(), 4u);
  EXPECT_EQ(store_.List("job/")->size(), 4u);
  EXPECT_EQ(store_.List("request/")->size(), 4u);
  EXPECT_TRUE(core_.state().jobs.contains("job-37"));
  EXPECT_TRUE(core_.state().jobs.contains("alive"));
}

TEST_F(RetentionTest, OldOnesGoWithAllTheirRecords) {
  Running();
  FailOnce();
  ASSERT_EQ(core_.JobStateOf("j"), v1::JOB_STATE_FAILED);
  core_.Restart();
  core_.Advance(core_.state().retention.age);
  core_.Do(Tick{});
  EXPECT_TRUE(core_.state().jobs.contains("j"));
  core_.Advance(absl::Milliseconds(1));
  core_.Do(Tick{});
  EXPECT_FALSE(core_.state().jobs.contains("j"));
  for (const char* prefix : {"job/", "plan/", "attempt/", "request/"}) {
    EXPECT_TRUE(store_.List(prefix)->empty()) << prefix;
  }
}

}  // namespace
}  // namespace upipe::coordinator
