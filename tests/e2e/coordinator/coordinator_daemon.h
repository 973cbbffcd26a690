// upipe-coordinator as a child process on a state folder of its own, with fast timing and the
// invented planner; what tests of the daemon share.
#pragma once

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "tests/e2e/coordinator/fake_worker.h"
#include "upipe/v1/job_service.grpc.pb.h"
#include "upipe/v1/node_service.grpc.pb.h"

namespace upipe::coordinator {

inline v1::JobSpec Spec(const std::string& name, int ranks) {
  v1::JobSpec spec;
  spec.set_name(name);
  v1::ModelSpec& model = *spec.mutable_model();
  model.set_vocab_size(260);
  model.set_hidden_size(32);
  model.set_num_layers(1);
  model.set_num_heads(4);
  model.set_num_kv_heads(4);
  model.set_head_dim(8);
  model.set_intermediate_size(64);
  spec.mutable_data()->set_path("/nowhere");
  spec.mutable_parallel()->set_ranks(ranks);
  spec.mutable_parallel()->set_method(v1::METHOD_ULYSSES);
  spec.mutable_train()->set_context(64);
  spec.mutable_train()->set_steps(1);
  return spec;
}

// The same, and the first failure is the end.
inline v1::JobSpec SpecWithoutRestarts(const std::string& name, int ranks) {
  v1::JobSpec spec = Spec(name, ranks);
  v1::RestartSpec& restarts = *spec.mutable_restarts();
  restarts.set_infrastructure(0);
  restarts.set_application(0);
  restarts.set_no_progress(0);
  return spec;
}

// The daemon as a child process on a state folder of its own.
class CoordinatorDaemon : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = (std::filesystem::temp_directory_path() / "upipe-coordinator-XXXXXX");
    ASSERT_NE(mkdtemp(pattern.data()), nullptr);
    folder_ = pattern;
    Start();
  }
  void TearDown() override {
    if (pid_ > 0) Stop(SIGKILL);
    std::filesystem::remove_all(folder_);
  }

  pid_t Spawn() {
    const std::string bin = std::getenv("UPIPE_BIN_DIR");
    const std::vector<std::string> arguments = {bin + "/upipe-coordinator",
                                                "--state-dir",
                                                folder_ + "/state",
                                                "--address-file",
                                                folder_ + "/address",
                                                "--plan-binary",
                                                std::getenv("UPIPE_FAKE_PLAN"),
                                                "--heartbeat",
                                                "0.2",
                                                "--kill-bound",
                                                "2",
                                                "--autonomy",
                                                "3",
                                                "--margin",
                                                "1",
                                                "--start-deadline",
                                                "20",
                                                "--backoff",
                                                "0.1",
                                                "--backoff-longest",
                                                "1",
                                                "--settle",
                                                "1",
                                                "--health-listen",
                                                "127.0.0.1:0"};
    std::vector<char*> argv;
    for (const std::string& argument : arguments)
      argv.push_back(const_cast<char*>(argument.data()));
    argv.push_back(nullptr);
    const pid_t pid = fork();
    if (pid == 0) {
      execv(argv[0], argv.data());
      _exit(127);
    }
    return pid;
  }
  void Start() {
    std::filesystem::remove(folder_ + "/address");
    pid_ = Spawn();
    ASSERT_TRUE(Eventually([&] { return std::filesystem::exists(folder_ + "/address"); }));
    std::ifstream(folder_ + "/address") >> address_;
    channel_ = grpc::CreateChannel(address_, grpc::InsecureChannelCredentials());
    jobs_ = v1::JobService::NewStub(channel_);
    nodes_ = v1::NodeService::NewStub(channel_);
  }
  int Stop(int signal) {
    kill(pid_, signal);
    int status = 0;
    waitpid(pid_, &status, 0);
    pid_ = -1;
    return status;
  }

  // Polls an observable until it holds; 15 s at most.
  template <typename Condition>
  static bool Eventually(Condition condition) {
    const absl::Time deadline = absl::Now() + absl::Seconds(15);
    while (!condition()) {
      if (absl::Now() > deadline) return false;
      absl::SleepFor(absl::Milliseconds(10));
    }
    return true;
  }

  grpc::Status Submit(const v1::JobSpec& spec, const std::string& request_id, v1::Job* job) {
    v1::SubmitRequest request;
    request.set_request_id(request_id);
    *request.mutable_spec() = spec;
    v1::SubmitResponse response;
    grpc::ClientContext context;
    const grpc::Status status = jobs_->Submit(&context, request, &response);
    *job = response.job();
    return status;
  }
  v1::Job Get(const std::string& id) {
    v1::GetJobRequest request;
    request.set_id(id);
    v1::Job job;
    grpc::ClientContext context;
    jobs_->GetJob(&context, request, &job);
    return job;
  }
  v1::Job Cancel(const std::string& id) {
    v1::CancelRequest request;
    request.set_id(id);
    v1::CancelResponse response;
    grpc::ClientContext context;
    EXPECT_TRUE(jobs_->Cancel(&context, request, &response).ok());
    return response.job();
  }
  // The answer of Hold, Release or Why.
  template <typename Response, typename Call, typename Request>
  Response Ask(Call call, const Request& request) {
    Response response;
    grpc::ClientContext context;
    const grpc::Status status = call(&context, request, &response);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return response;
  }
  v1::Job Hold(const std::string& id) {
    v1::HoldRequest request;
    request.set_id(id);
    return Ask<v1::HoldResponse>([&](auto... a) { return jobs_->Hold(a...); }, request).job();
  }
  v1::Job Release(const std::string& id) {
    v1::ReleaseRequest request;
    request.set_id(id);
    return Ask<v1::ReleaseResponse>([&](auto... a) { return jobs_->Release(a...); }, request).job();
  }
  v1::WhyResponse Why(const std::string& id) {
    v1::WhyRequest request;
    request.set_id(id);
    return Ask<v1::WhyResponse>([&](auto... a) { return jobs_->Why(a...); }, request);
  }
  v1::ListNodesResponse Nodes() {
    v1::ListNodesResponse response;
    grpc::ClientContext context;
    nodes_->ListNodes(&context, {}, &response);
    return response;
  }
  // Lines of the job's metrics.jsonl.
  int StepLines(const std::string& id) const {
    std::ifstream file(folder_ + "/state/jobs/" + id + "/metrics.jsonl");
    return static_cast<int>(
        std::count(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>(), '\n'));
  }
  bool Reaches(const std::string& id, v1::JobState state) {
    return Eventually([&] { return Get(id).state() == state; });
  }
  std::unique_ptr<FakeWorker> Worker(const std::string& name, bool finish = true,
                                     const std::string& incarnation = "first") {
    auto worker = std::make_unique<FakeWorker>(FakeWorker::Options{
        .address = address_, .name = name, .incarnation = incarnation, .finish_when_met = finish});
    EXPECT_TRUE(Eventually([&] { return worker->epoch() > 0; }));
    return worker;
  }

  std::string folder_;
  std::string address_;
  pid_t pid_ = -1;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::JobService::Stub> jobs_;
  std::unique_ptr<v1::NodeService::Stub> nodes_;
};

}  // namespace upipe::coordinator
