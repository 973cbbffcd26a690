// What the runtime reads out of the state beside the core's own views: where a log lies, how far
// apart the ranks of a job are, what the Prometheus endpoint says.
#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <string>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "common/errors/rpc_error.h"
#include "coordinator/runtime/log_place.h"
#include "coordinator/runtime/metrics.h"
#include "coordinator/runtime/straggler.h"

namespace upipe::coordinator {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

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

// The text behind http://`address`/metrics.
std::string Scrape(const std::string& address) {
  sockaddr_in peer = {};
  peer.sin_family = AF_INET;
  peer.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  uint32_t port = 0;
  EXPECT_TRUE(absl::SimpleAtoi(address.substr(address.rfind(':') + 1), &port));
  peer.sin_port = htons(static_cast<uint16_t>(port));
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  EXPECT_EQ(connect(fd, reinterpret_cast<sockaddr*>(&peer), sizeof(peer)), 0);
  const std::string request = "GET /metrics HTTP/1.0\r\n\r\n";
  EXPECT_EQ(send(fd, request.data(), request.size(), 0), static_cast<ssize_t>(request.size()));
  std::string text;
  char chunk[4096];
  for (ssize_t got = 0; (got = recv(fd, chunk, sizeof(chunk), 0)) > 0;) {
    text.append(chunk, static_cast<size_t>(got));
  }
  close(fd);
  return text;
}

TEST_F(RuntimeViewsTest, MetricsCountRestartsAndForgetJobsThatEnded) {
  auto metrics = Metrics::Serve("127.0.0.1:0");
  ASSERT_TRUE(metrics.ok()) << metrics.status();
  state_.tally.restarts[{v1::CAUSE_KIND_NODE_LOST, "infrastructure"}] = 2;
  state_.tally.stalls = 3;
  state_.tally.commits = 4;
  state_.tally.checkpoint_problems = 5;
  state_.nodes["a"].record.set_cordoned(true);
  job().record.mutable_last_commit()->set_step(40);
  Report(0, 41, 10, 8);
  Report(1, 41, 10, 1);
  (*metrics)->Update(state_, {});
  const std::string text = Scrape((*metrics)->address());
  EXPECT_THAT(
      text,
      AllOf(HasSubstr(R"(upipe_restarts_total{budget="infrastructure",cause="node_lost"} 2)"),
            HasSubstr("upipe_stalls_total 3"), HasSubstr("upipe_checkpoints_committed_total 4"),
            HasSubstr("upipe_checkpoint_problems_total 5"), HasSubstr("upipe_nodes_cordoned 1"),
            HasSubstr(R"(upipe_job_step{job="job-aaaaaa"} 41)"),
            HasSubstr(R"(upipe_job_checkpoint_step{job="job-aaaaaa"} 40)"),
            HasSubstr(R"(upipe_job_own_seconds_max{job="job-aaaaaa"} 9)"),
            HasSubstr(R"(upipe_job_slowest_rank{job="job-aaaaaa"} 1)")));
  state_.tally.restarts[{v1::CAUSE_KIND_NODE_LOST, "infrastructure"}] = 3;
  job().record.set_state(v1::JOB_STATE_SUCCEEDED);
  (*metrics)->Update(state_, {});
  EXPECT_THAT(Scrape((*metrics)->address()),
              AllOf(HasSubstr(R"(cause="node_lost"} 3)"), Not(HasSubstr("job-aaaaaa"))));
}

}  // namespace
}  // namespace upipe::coordinator
