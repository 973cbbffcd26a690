// What the runtime reads out of the state beside the core's own views: where a log lies, how far
// apart the ranks of a job are.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "common/errors/rpc_error.h"
#include "coordinator/runtime/log_place.h"
#include "coordinator/runtime/straggler.h"

namespace upipe::coordinator {
namespace {

// A running job, generation 3, on workers a and b; generation 2 ran on c and d.
class RuntimeViewsTest : public ::testing::Test {
 protected:
  RuntimeViewsTest() {
    state_.epoch = 9;
    Job& job = state_.jobs["job-aaaaaa"];
    job.record.set_id("job-aaaaaa");
    job.record.set_state(v1::JOB_STATE_RUNNING);
    job.record.set_generation(3);
    v1::AttemptSummary& earlier = *job.record.add_attempts();
    earlier.set_generation(2);
    earlier.add_workers("c");
    earlier.add_workers("d");
    job.attempt.emplace();
    job.attempt->record.set_generation(3);
    job.attempt->record.set_nonce("secret");
    for (const char* worker : {"a", "b"}) job.attempt->record.add_ranks()->set_worker(worker);
    state_.active.insert("job-aaaaaa");
    for (const char* worker : {"a", "b", "c"}) {
      state_.nodes[worker].record.set_worker(worker);
      state_.nodes[worker].session = 10 + worker[0] - 'a';
    }
  }
  Job& job() { return state_.jobs.at("job-aaaaaa"); }
  void Report(int rank, int64_t step, double seconds, double comm_seconds) {
    v1::StepReport& report = *job().attempt->record.mutable_ranks(rank)->mutable_last_report();
    report.set_step(step);
    report.set_step_seconds(seconds);
    report.set_comm_seconds(comm_seconds);
  }
  absl::StatusOr<LogPlace> Find(int rank, int64_t generation,
                                const std::string& id = "job-aaaaaa") {
    v1::LogsRequest request;
    request.set_id(id);
    request.set_rank(rank);
    request.set_generation(generation);
    return FindLog(state_, request);
  }
  static Reason ReasonOf(const absl::Status& status) {
    for (const ReasonEntry& entry : Reasons()) {
      if (HasReason(status, entry.reason)) return entry.reason;
    }
    return Reason::kInternal;
  }

  State state_;
};

TEST_F(RuntimeViewsTest, ALogLiesWithTheWorkerThatRanTheRank) {
  const auto latest = Find(1, 0);
  ASSERT_TRUE(latest.ok()) << latest.status();
  EXPECT_EQ(latest->worker, "b");
  EXPECT_EQ(latest->session, 11u);
  EXPECT_EQ(latest->ref.rank(), 1);
  EXPECT_EQ(latest->ref.fence().generation(), 3);
  EXPECT_EQ(latest->ref.fence().nonce(), "secret");
  EXPECT_EQ(latest->ref.fence().epoch(), 9);
  EXPECT_EQ(Find(1, 3)->worker, "b");
  const auto earlier = Find(0, 2);
  ASSERT_TRUE(earlier.ok()) << earlier.status();
  EXPECT_EQ(earlier->worker, "c");
  EXPECT_EQ(earlier->ref.fence().generation(), 2);
  EXPECT_EQ(earlier->ref.fence().nonce(), "");
}

TEST_F(RuntimeViewsTest, ALogThatCannotBeReadIsRefusedByItsReason) {
  EXPECT_EQ(ReasonOf(Find(0, 0, "nobody").status()), Reason::kJobNotFound);
  EXPECT_EQ(ReasonOf(Find(2, 0).status()), Reason::kRequestInvalid);
  EXPECT_EQ(ReasonOf(Find(-1, 2).status()), Reason::kRequestInvalid);
  EXPECT_EQ(ReasonOf(Find(0, 4).status()), Reason::kRequestInvalid);
  EXPECT_EQ(ReasonOf(Find(0, 1).status()), Reason::kLogNotFound);
  EXPECT_EQ(ReasonOf(Find(1, 2).status()), Reason::kWorkerLost);  // d is not known any more
  state_.nodes["a"].session = 0;
  EXPECT_EQ(ReasonOf(Find(0, 0).status()), Reason::kWorkerDisconnected);
  state_.nodes["a"].lost = true;
  EXPECT_EQ(ReasonOf(Find(0, 0).status()), Reason::kWorkerLost);
  job().record.mutable_attempts(0)->clear_workers();  // too many ranks to keep their places
  EXPECT_EQ(ReasonOf(Find(0, 2).status()), Reason::kLogNotFound);
  job().attempt.reset();
  EXPECT_EQ(ReasonOf(Find(0, 0).status()), Reason::kJobNotStarted);
}

TEST_F(RuntimeViewsTest, TheSlowestRankIsTheOneWithTheMostTimeOfItsOwn) {
  EXPECT_FALSE(OwnTimesOf(job()).has_value());
  job().attempt->record.add_ranks()->set_worker("c");
  Report(0, 5, 10, 8);
  Report(1, 5, 10, 1);
  const auto two = OwnTimesOf(job());  // rank 2 has said nothing yet
  ASSERT_TRUE(two.has_value());
  EXPECT_EQ(two->max_seconds, 9);
  Report(2, 5, 10, 7);
  const auto all = OwnTimesOf(job());
  EXPECT_EQ(all->max_seconds, 9);
  EXPECT_EQ(all->median_seconds, 3);
  EXPECT_EQ(all->slowest_rank, 1);
}

}  // namespace
}  // namespace upipe::coordinator
