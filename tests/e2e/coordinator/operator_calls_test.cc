// What people ask of jobs and workers, over real gRPC with invented workers: hold and release, why,
// cancel with a grace, restarts and their logs, cordon, drain, fence, forget; each asked twice.
#include <gmock/gmock.h>

#include <algorithm>

#include "tests/e2e/coordinator/coordinator_daemon.h"

namespace upipe::coordinator {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class OperatorCalls : public CoordinatorDaemon {
 protected:
  v1::Job Submitted(const v1::JobSpec& spec, bool hold = false) {
    v1::SubmitRequest request;
    request.set_request_id(spec.name());
    *request.mutable_spec() = spec;
    request.set_hold(hold);
    return Ask<v1::SubmitResponse>([&](auto... a) { return jobs_->Submit(a...); }, request).job();
  }
  v1::Node Cordon(const std::string& worker, const std::string& reason) {
    v1::CordonRequest request;
    request.set_worker(worker);
    request.set_reason(reason);
    return Ask<v1::CordonResponse>([&](auto... a) { return nodes_->Cordon(a...); }, request).node();
  }
  v1::Node Uncordon(const std::string& worker) {
    v1::UncordonRequest request;
    request.set_worker(worker);
    return Ask<v1::UncordonResponse>([&](auto... a) { return nodes_->Uncordon(a...); }, request)
        .node();
  }
  v1::DrainResponse Drain(const std::string& worker) {
    v1::DrainRequest request;
    request.set_worker(worker);
    request.set_reason("new disk");
    return Ask<v1::DrainResponse>([&](auto... a) { return nodes_->Drain(a...); }, request);
  }
  // The node of that worker; empty when there is none.
  v1::Node NodeOf(const std::string& worker) {
    const v1::ListNodesResponse nodes = Nodes();
    for (const v1::Node& node : nodes.nodes()) {
      if (node.worker() == worker) return node;
    }
    return {};
  }
  std::string LogOf(const std::string& id, int64_t generation) {
    v1::LogsRequest request;
    request.set_id(id);
    request.set_generation(generation);
    grpc::ClientContext context;
    const auto stream = jobs_->Logs(&context, request);
    std::string text;
    v1::LogsResponse response;
    while (stream->Read(&response)) text += response.data();
    const grpc::Status status = stream->Finish();
    return status.ok() ? text : status.error_message();
  }
};

TEST_F(OperatorCalls, AHeldJobIsPlannedAndWaitsUntilItIsReleased) {
  const auto a = Worker("a");
  const v1::Job job = Submitted(Spec("good", 2), /*hold=*/true);
  EXPECT_TRUE(job.held());
  ASSERT_TRUE(Reaches(job.id(), v1::JOB_STATE_QUEUED));
  EXPECT_EQ(Get(job.id()).shown_state(), "HELD");
  const v1::WhyResponse why = Why(job.id());
  EXPECT_EQ(why.reason(), v1::WAIT_REASON_HELD);
  EXPECT_NE(why.message(), "");
  EXPECT_TRUE(Hold(job.id()).held());
  EXPECT_FALSE(Release(job.id()).held());
  EXPECT_FALSE(Release(job.id()).held());
  EXPECT_TRUE(Reaches(job.id(), v1::JOB_STATE_SUCCEEDED));
}

TEST_F(OperatorCalls, AHoldOutlivesTheCoordinator) {
  auto a = Worker("a");
  const v1::Job job = Submitted(Spec("good", 1), /*hold=*/true);
  a.reset();
  Stop(SIGKILL);
  Start();
  a = Worker("a");
  EXPECT_TRUE(Get(job.id()).held());
  Release(job.id());
  EXPECT_TRUE(Reaches(job.id(), v1::JOB_STATE_SUCCEEDED));
}

TEST_F(OperatorCalls, WhyNamesTheOneReasonAndThePlace) {
  const auto a = Worker("a", /*finish=*/false);
  const v1::Job first = Submitted(Spec("first", 2));
  ASSERT_TRUE(Reaches(first.id(), v1::JOB_STATE_RUNNING));
  EXPECT_EQ(Why(first.id()).reason(), v1::WAIT_REASON_RUNNING);
  EXPECT_EQ(Why(first.id()).position(), 0);
  const v1::Job second = Submitted(Spec("second", 2));
  const v1::Job third = Submitted(Spec("third", 1));
  v1::JobSpec urgent_spec = Spec("urgent", 1);
  urgent_spec.set_priority(10);
  const v1::Job urgent = Submitted(urgent_spec);
  for (const std::string& id : {second.id(), third.id(), urgent.id()}) {
    ASSERT_TRUE(Reaches(id, v1::JOB_STATE_QUEUED));
  }
  const v1::WhyResponse head = Why(urgent.id());
  EXPECT_EQ(head.reason(), v1::WAIT_REASON_BUSY_SLOTS);
  EXPECT_EQ(head.position(), 1);
  EXPECT_EQ(head.job().id(), urgent.id());
  const v1::WhyResponse behind = Why(third.id());
  EXPECT_EQ(behind.reason(), v1::WAIT_REASON_BEHIND);
  EXPECT_EQ(behind.position(), 3);
  EXPECT_THAT(behind.message(), HasSubstr(urgent.id()));
}

TEST_F(OperatorCalls, CancelPassesTheGraceOn) {
  const auto a = Worker("a", /*finish=*/false);
  const v1::Job job = Submitted(Spec("good", 2));
  ASSERT_TRUE(Reaches(job.id(), v1::JOB_STATE_RUNNING));
  v1::CancelRequest request;
  request.set_id(job.id());
  request.set_grace_millis(60'000);
  for (int twice = 0; twice < 2; ++twice) {
    Ask<v1::CancelResponse>([&](auto... x) { return jobs_->Cancel(x...); }, request);
  }
  ASSERT_TRUE(Reaches(job.id(), v1::JOB_STATE_CANCELLED));
  ASSERT_TRUE(a->stop_grace().has_value());
  EXPECT_GT(*a->stop_grace(), absl::Seconds(30));
  EXPECT_EQ(a->num_live(), 0);
}

TEST_F(OperatorCalls, ACancelWithoutGraceKills) {
  const auto a = Worker("a", /*finish=*/false);
  const v1::Job job = Submitted(Spec("good", 2));
  ASSERT_TRUE(Reaches(job.id(), v1::JOB_STATE_RUNNING));
  v1::CancelRequest request;
  request.set_id(job.id());
  request.set_grace_millis(0);
  Ask<v1::CancelResponse>([&](auto... x) { return jobs_->Cancel(x...); }, request);
  ASSERT_TRUE(Reaches(job.id(), v1::JOB_STATE_CANCELLED));
  EXPECT_EQ(a->stop_grace(), absl::ZeroDuration());
}

TEST_F(OperatorCalls, ARestartIsToldAndBothLogsAreThere) {
  const auto a = Worker("a", /*finish=*/false);
  v1::JobSpec spec = Spec("good", 2);
  spec.mutable_checkpoint()->set_path("/nowhere/checkpoints");
  const v1::Job job = Submitted(spec);
  ASSERT_TRUE(Reaches(job.id(), v1::JOB_STATE_RUNNING));
  EXPECT_FALSE(Get(job.id()).has_last_commit());
  a->Commit(40);
  ASSERT_TRUE(Eventually([&] { return Get(job.id()).last_commit().step() == 40; }));
  a->EndRank(1, 3);
  ASSERT_TRUE(Eventually([&] {
    const v1::Job now = Get(job.id());
    return now.generation() == 2 && now.state() == v1::JOB_STATE_RUNNING;
  }));
  const v1::Job again = Get(job.id());
  EXPECT_EQ(again.restarts().application(), 1);
  EXPECT_EQ(again.restarts().infrastructure(), 0);
  EXPECT_EQ(again.last_commit().generation(), 1);
  ASSERT_EQ(again.attempts_size(), 1);
  const v1::AttemptSummary& first = again.attempts(0);
  EXPECT_EQ(first.generation(), 1);
  EXPECT_EQ(first.cause().exit_code(), 3);
  EXPECT_EQ(first.ranks_proven_gone(), 2);
  EXPECT_THAT(first.workers(), ElementsAre("a", "a"));
  EXPECT_EQ(LogOf(job.id(), 1), "line 0\nline 1\nline 2\n");
  EXPECT_EQ(LogOf(job.id(), 0), "line 0\nline 1\nline 2\n");
}

TEST_F(OperatorCalls, ACordonedWorkerTakesNoRanks) {
  auto a = Worker("a");
  const v1::Node node = Cordon("a", "new disk");
  EXPECT_TRUE(node.cordoned());
  EXPECT_EQ(node.cordon_reason(), "new disk");
  EXPECT_TRUE(Cordon("a", "another word").cordoned());
  EXPECT_EQ(NodeOf("a").cordon_reason(), "another word");
  const v1::Job job = Submitted(Spec("good", 2));
  ASSERT_TRUE(Reaches(job.id(), v1::JOB_STATE_QUEUED));
  EXPECT_EQ(Why(job.id()).reason(), v1::WAIT_REASON_CORDONED);
  a.reset();
  Stop(SIGKILL);
  Start();
  a = Worker("a");
  EXPECT_TRUE(NodeOf("a").cordoned());
  EXPECT_FALSE(Uncordon("a").cordoned());
  EXPECT_EQ(Uncordon("a").cordon_reason(), "");
  EXPECT_TRUE(Reaches(job.id(), v1::JOB_STATE_SUCCEEDED));
}

TEST_F(OperatorCalls, ADrainMovesTheJobAndCostsNoBudget) {
  const auto a = Worker("a", /*finish=*/false);
  const v1::Job job = Submitted(Spec("good", 2));
  ASSERT_TRUE(Reaches(job.id(), v1::JOB_STATE_RUNNING));
  const auto b = Worker("b", /*finish=*/false);
  const v1::DrainResponse drain = Drain("a");
  EXPECT_THAT(drain.job_ids(), ElementsAre(job.id()));
  EXPECT_TRUE(drain.node().cordoned());
  ASSERT_TRUE(Eventually([&] {
    const v1::Job now = Get(job.id());
    return now.generation() == 2 && now.state() == v1::JOB_STATE_RUNNING;
  }));
  EXPECT_GT(a->stop_grace().value_or(absl::ZeroDuration()), absl::ZeroDuration());
  const v1::Job moved = Get(job.id());
  for (const v1::RankStatus& rank : moved.ranks()) EXPECT_EQ(rank.node(), "b");
  EXPECT_EQ(moved.restarts().infrastructure() + moved.restarts().application(), 0);
  const v1::Node node = NodeOf("a");
  for (const v1::Slot& slot : node.slots()) EXPECT_EQ(slot.state(), v1::SLOT_STATE_FREE);
  EXPECT_THAT(Drain("a").job_ids(), IsEmpty());
}

TEST_F(OperatorCalls, AFenceFreesTheJobAndAForgottenNodeComesBackByItself) {
  auto a = Worker("a", /*finish=*/false);
  const v1::Job job = Submitted(Spec("good", 2));
  ASSERT_TRUE(Reaches(job.id(), v1::JOB_STATE_RUNNING));
  const auto b = Worker("b", /*finish=*/false);
  a.reset();
  ASSERT_TRUE(Eventually([&] { return NodeOf("a").state() == v1::NODE_STATE_SUSPECT; }));
  v1::FenceNodeRequest fence;
  fence.set_worker("a");
  for (int twice = 0; twice < 2; ++twice) {
    Ask<v1::FenceNodeResponse>([&](auto... x) { return nodes_->FenceNode(x...); }, fence);
  }
  ASSERT_TRUE(Eventually([&] { return b->generation() == 2; }));
  const v1::Node fenced = NodeOf("a");
  EXPECT_EQ(fenced.slots(0).state(), v1::SLOT_STATE_UNKNOWN);
  EXPECT_EQ(Get(job.id()).attempts(0).ranks_presumed_gone(), 2);
  EXPECT_EQ(LogOf(job.id(), 1).find("line 0"), std::string::npos);
  v1::ForgetNodeRequest forget;
  forget.set_worker("a");
  ASSERT_TRUE(Eventually([&] {
    grpc::ClientContext context;
    v1::ForgetNodeResponse response;
    return nodes_->ForgetNode(&context, forget, &response).ok();
  }));
  EXPECT_EQ(NodeOf("a").worker(), "");
  a = Worker("a", false, "second");
  EXPECT_EQ(NodeOf("a").slots(0).state(), v1::SLOT_STATE_FREE);
}

TEST_F(OperatorCalls, ListNodesTellsOfTheCoordinatorItself) {
  const v1::ListNodesResponse nodes = Nodes();
  EXPECT_NE(nodes.coordinator_version(), "");
  EXPECT_THAT(nodes.coordinator_metrics_address(), HasSubstr("127.0.0.1:"));
  EXPECT_THAT(nodes.coordinator_configuration(), ::testing::Contains("heartbeat=200ms"));
}

}  // namespace
}  // namespace upipe::coordinator
