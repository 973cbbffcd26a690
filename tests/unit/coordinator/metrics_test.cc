// The coordinator's series as a scrape shows them: there from the start, true of the state, gone
// with their job.
#include "coordinator/runtime/metrics.h"

#include <iostream>

#include "tests/support/metrics/scrape.h"
#include "tests/unit/coordinator/scene.h"

namespace upipe::coordinator {
namespace {

using ::testing::Contains;
using ::testing::ElementsAreArray;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Key;
using ::testing::Not;

class MetricsTest : public Scene {
 protected:
  MetricsTest() {
    auto served = Metrics::Serve({.listen = "127.0.0.1:0", .version = "9.9"});
    EXPECT_TRUE(served.ok()) << served.status();
    metrics_ = *std::move(served);
    const CoordinatorSeries declare{declared_};
  }
  // An endpoint takes two seconds to stop serving: it ends with the process.
  ~MetricsTest() override {
    static auto& kept = *new std::vector<std::unique_ptr<Metrics>>();
    kept.push_back(std::move(metrics_));
  }
  std::string Text() {
    metrics_->Update(core_.state(), core_.now());
    return testing::Scrape(metrics_->address());
  }
  double ValueOf(const std::string& series) {
    const auto all = testing::SeriesOf(Text());
    const auto found = all.find(series);
    EXPECT_NE(found, all.end()) << series;
    return found == all.end() ? -1 : found->second;
  }
  void ReportOfStep(int rank, int64_t step, double seconds, double comm_seconds) {
    v1::Progress progress;
    *progress.mutable_ref() = ReportOf(rank, v1::RANK_STATE_RUNNING).ref();
    progress.mutable_report()->set_step(step);
    progress.mutable_report()->set_step_seconds(seconds);
    progress.mutable_report()->set_comm_seconds(comm_seconds);
    core_.Do(ProgressReceived{SessionOf(rank), progress});
  }
  // Jobs that wait for `reason`.
  double Waiting(const std::string& reason) {
    return ValueOf(absl::StrCat("upipe_queue_length{reason=\"", reason, "\"}"));
  }

  std::unique_ptr<Metrics> metrics_;
  MetricsRegistry declared_;
};

TEST_F(MetricsTest, CountersAndHistogramsAreThereBeforeAnythingHappened) {
  const std::set<std::string> served = testing::NamesOf(testing::Scrape(metrics_->address()));
  for (const MetricDescriptor& metric : declared_.descriptors()) {
    if (metric.type == MetricType::kGauge) continue;
    EXPECT_THAT(served, Contains(metric.name));
  }
  const auto series = testing::SeriesOf(testing::Scrape(metrics_->address()));
  for (const char* budget : {"infrastructure", "application", "none"}) {
    for (const char* cause :
         {"out_of_memory", "device_fault", "signal", "exit_code", "peer_failure", "user",
          "node_lost", "launch", "internal", "stall", "time_limit"}) {
      EXPECT_THAT(series, Contains(Key(absl::StrCat("upipe_restarts_total{budget=\"", budget,
                                                    "\",cause=\"", cause, "\"}"))));
    }
  }
  for (const char* method : {"JobService.Submit", "JobService.Watch", "NodeService.Drain",
                             "AdminService.Backup", "WorkerService.Session", "unknown"}) {
    EXPECT_THAT(series, Contains(Key(absl::StrCat("upipe_rpc_requests_total{code=\"not_found\","
                                                  "method=\"",
                                                  method, "\"}"))));
  }
}

TEST_F(MetricsTest, WhatIsNeverAbsentIsThereWithoutJobsOrWorkers) {
  EXPECT_THAT(testing::NamesOf(Text()),
              ElementsAreArray(testing::NeverAbsent(declared_.descriptors())));
  for (const char* reason : {"next", "planning", "held", "too_few_slots", "backoff",
                             "silent_workers", "cordoned", "settling", "behind", "busy_slots"}) {
    EXPECT_EQ(Waiting(reason), 0);
  }
}

TEST_F(MetricsTest, EveryDescriptorIsServedAndWellNamed) {
  RunDurable("/checkpoints");
  Commit(3);
  for (int r = 0; r < 4; ++r) ReportOfStep(r, 4, 10, 9);
  testing::ExpectServedAndWellNamed(Text(), declared_.descriptors());
}

TEST_F(MetricsTest, ARunningJobIsShownUntilItEnds) {
  RunDurable("/checkpoints");
  core_.Advance(absl::Seconds(1000));
  Heartbeats();
  Commit(40);
  for (int r = 0; r < 4; ++r) ReportOfStep(r, 41, 10, r == 1 ? 1 : 8);
  EXPECT_EQ(ValueOf("upipe_job_step{job=\"j\"}"), 41);
  EXPECT_EQ(ValueOf("upipe_job_ranks{job=\"j\"}"), 4);
  EXPECT_EQ(ValueOf("upipe_job_checkpoint_step{job=\"j\"}"), 40);
  EXPECT_EQ(ValueOf("upipe_job_checkpoint_timestamp_seconds{job=\"j\"}"), 1000);
  EXPECT_EQ(ValueOf("upipe_job_own_seconds_max{job=\"j\"}"), 9);
  EXPECT_EQ(ValueOf("upipe_job_own_seconds_median{job=\"j\"}"), 2);
  EXPECT_EQ(ValueOf("upipe_job_slowest_rank{job=\"j\"}"), 1);
  EXPECT_EQ(ValueOf("upipe_checkpoints_committed_total"), 1);
  FailOnce();
  EXPECT_THAT(Text(), Not(HasSubstr("job=\"j\"")));
  PlaceAgain();
  Meet();
  const auto again = testing::SeriesOf(Text());
  EXPECT_THAT(again, Contains(Key("upipe_job_ranks{job=\"j\"}")));
  EXPECT_THAT(again, Not(Contains(Key("upipe_job_own_seconds_max{job=\"j\"}"))));
}

// The next generation ran between two looks.
TEST_F(MetricsTest, ANewGenerationTakesNothingOver) {
  RunDurable();
  ReportOfStep(0, 4, 10, 9);
  EXPECT_THAT(testing::NamesOf(Text()), Contains("upipe_job_slowest_rank"));
  FailOnce();
  PlaceAgain();
  Meet();
  const std::set<std::string> names = testing::NamesOf(Text());
  EXPECT_THAT(names, Not(Contains("upipe_job_slowest_rank")));
  EXPECT_THAT(names, Contains("upipe_job_step"));
}

TEST_F(MetricsTest, AThousandEndedJobsLeaveNoSeries) {
  const size_t before = testing::SeriesOf(Text()).size();
  State& state = core_.state();
  for (int i = 0; i < 1000; ++i) {
    const std::string id = absl::StrCat("job-", i);
    Job& job = state.jobs[id];
    job.record.set_id(id);
    job.record.set_state(v1::JOB_STATE_RUNNING);
    job.attempt.emplace().record.add_ranks()->mutable_last_report()->set_step(1);
    state.active.insert(id);
    metrics_->Update(state, core_.now());
    if (i == 500) {
      EXPECT_EQ(ValueOf("upipe_job_step{job=\"job-500\"}"), 1);
      EXPECT_EQ(testing::SeriesOf(Text(), "upipe_job_step").size(), 1u);
    }
    state.active.erase(id);
    job.record.set_state(v1::JOB_STATE_CANCELLED);
    ListEnded(state, job.record);
  }
  EXPECT_EQ(testing::SeriesOf(Text()).size(), before);
  EXPECT_EQ(ValueOf("upipe_jobs{state=\"cancelled\"}"), 1000);
  EXPECT_EQ(ValueOf("upipe_jobs{state=\"running\"}"), 0);
}

TEST_F(MetricsTest, TheQueueIsCountedByReason) {
  Workers();
  Submit(4, "runs");
  Plan(4, "runs");
  for (const char* id : {"first", "second", "third", "plans", "held"}) Submit(4, id);
  for (const char* id : {"first", "second", "third", "held"}) Plan(4, id);
  core_.Do(HoldReceived{99, "held"});
  core_.Do(Tick{});
  EXPECT_EQ(Waiting("busy_slots"), 1);
  EXPECT_EQ(Waiting("behind"), 2);
  EXPECT_EQ(Waiting("held"), 1);
  EXPECT_EQ(Waiting("planning"), 1);
  EXPECT_EQ(ValueOf("upipe_jobs{state=\"queued\"}"), 4);
  EXPECT_EQ(ValueOf("upipe_jobs{state=\"starting\"}"), 1);
}

TEST_F(MetricsTest, SlotsAndWorkersAreCountedByState) {
  core_.Do(HelloReceived{1, HelloOf("a", 4)});
  core_.Do(HelloReceived{2, HelloOf("b", 3)});
  core_.Do(CordonReceived{7, "b", "repair"});
  Submit(2);
  Plan(2);
  EXPECT_EQ(ValueOf("upipe_cluster_slots{state=\"taken\"}"), 2);
  EXPECT_EQ(ValueOf("upipe_cluster_slots{state=\"free\"}"), 2);
  EXPECT_EQ(ValueOf("upipe_cluster_slots{state=\"unavailable\"}"), 3);
  EXPECT_EQ(ValueOf("upipe_nodes_cordoned"), 1);
  core_.Do(SessionClosed{2});
  EXPECT_EQ(ValueOf("upipe_cluster_slots{state=\"unknown\"}"), 3);
  EXPECT_EQ(ValueOf("upipe_nodes{state=\"suspect\"}"), 1);
  EXPECT_EQ(ValueOf("upipe_nodes{state=\"ready\"}"), 1);
}

TEST_F(MetricsTest, AWorkerIsDatedFromItsHelloUntilItIsForgotten) {
  core_.Do(HelloReceived{1, HelloOf("a", 2)});
  core_.Advance(absl::Seconds(30));
  core_.Do(HelloReceived{2, HelloOf("b", 2)});
  core_.Advance(absl::Seconds(5));
  EXPECT_EQ(ValueOf("upipe_worker_last_heard_timestamp_seconds{worker=\"a\"}"), 0);
  EXPECT_EQ(ValueOf("upipe_worker_last_heard_timestamp_seconds{worker=\"b\"}"), 30);
  core_.state().nodes.erase("a");
  EXPECT_EQ(testing::SeriesOf(Text(), "upipe_worker_last_heard_timestamp_seconds").size(), 1u);
  core_.Restart();  // knows b from the store, and has not heard of it
  EXPECT_THAT(testing::SeriesOf(Text(), "upipe_worker_last_heard_timestamp_seconds"), IsEmpty());
}

TEST_F(MetricsTest, TheTallyIsFollowedAndNeverGoesBack) {
  core_.Advance(absl::Seconds(1));  // a moment 0 would be none
  RunDurable("/checkpoints");
  ReportOfStep(0, 5, 10, 9);
  core_.Advance(absl::Seconds(10));
  Heartbeats();
  v1::RankReport lost = ReportOf(1, v1::RANK_STATE_EXITED);
  lost.set_signal(9);
  Tell(lost);
  GangGone();
  PlaceAgain();
  core_.Advance(absl::Seconds(2));
  Heartbeats();
  Meet();
  for (int look = 0; look < 2; ++look) {
    EXPECT_EQ(ValueOf("upipe_restarts_total{budget=\"infrastructure\",cause=\"signal\"}"), 1);
    EXPECT_EQ(ValueOf("upipe_restarts_total{budget=\"application\",cause=\"signal\"}"), 0);
    EXPECT_EQ(ValueOf("upipe_lost_steps_total"), 5);
    EXPECT_EQ(ValueOf("upipe_attempt_seconds_total{outcome=\"lost\"}"), 4 * 12);
    EXPECT_EQ(ValueOf("upipe_attempt_seconds_total{outcome=\"kept\"}"), 0);
    EXPECT_EQ(ValueOf("upipe_queue_wait_seconds_count"), 1);
    EXPECT_EQ(ValueOf("upipe_restart_seconds_count"), 1);
    EXPECT_EQ(ValueOf("upipe_restart_seconds_bucket{le=\"1\"}"), 0);
    EXPECT_EQ(ValueOf("upipe_restart_seconds_bucket{le=\"10\"}"), 1);
  }
}

TEST_F(MetricsTest, CallsAreCountedByMethodAndCode) {
  metrics_->ObserveCall("/upipe.v1.JobService/Submit", absl::StatusCode::kOk, absl::Seconds(2));
  metrics_->ObserveCall("/upipe.v1.JobService/Submit", absl::StatusCode::kNotFound,
                        absl::Milliseconds(2));
  metrics_->ObserveCall("/made.Up/Call", absl::StatusCode::kUnimplemented, absl::Seconds(1));
  metrics_->ObserveCall("/made.Up/Other", static_cast<absl::StatusCode>(77), absl::Seconds(1));
  const std::string submit = "method=\"JobService.Submit\"}";
  EXPECT_EQ(ValueOf("upipe_rpc_requests_total{code=\"ok\"," + submit), 1);
  EXPECT_EQ(ValueOf("upipe_rpc_requests_total{code=\"not_found\"," + submit), 1);
  EXPECT_EQ(ValueOf("upipe_rpc_requests_total{code=\"unimplemented\",method=\"unknown\"}"), 1);
  EXPECT_EQ(ValueOf("upipe_rpc_requests_total{code=\"unknown\",method=\"unknown\"}"), 1);
  EXPECT_EQ(ValueOf("upipe_rpc_seconds_count{" + submit), 2);
  EXPECT_EQ(ValueOf("upipe_rpc_seconds_bucket{method=\"JobService.Submit\",le=\"0.003\"}"), 1);
}

TEST_F(MetricsTest, DecisionsAndWritesAreTimed) {
  metrics_->ObserveStep(Tick{}, absl::Milliseconds(2));
  metrics_->ObserveCommit(absl::Milliseconds(20));
  EXPECT_EQ(ValueOf("upipe_coordinator_step_seconds_count{event=\"tick\"}"), 1);
  EXPECT_EQ(ValueOf("upipe_coordinator_step_seconds_count{event=\"hello\"}"), 0);
  EXPECT_EQ(ValueOf("upipe_store_commit_seconds_bucket{le=\"0.01\"}"), 0);
  EXPECT_EQ(ValueOf("upipe_store_commit_seconds_bucket{le=\"0.03\"}"), 1);
  EXPECT_EQ(ValueOf("upipe_build_info{version=\"9.9\"}"), 1);
}

}  // namespace
}  // namespace upipe::coordinator
