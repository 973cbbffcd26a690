// A scripted coordinator: each test queues what Submit, Watch and Logs do next; jobs and nodes are
// plain data.
#pragma once

#include <deque>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "client/rpc/coordinator_client.h"
#include "common/clock.h"
#include "common/errors/rpc_error.h"

namespace upipe::client {

// Time that moves only when told to.
class ManualClock : public Clock {
 public:
  BootTime Now() const override { return {now}; }
  int64_t UnixMillis() const override { return 1769847330000 + absl::ToInt64Milliseconds(now); }
  absl::Duration now = absl::Hours(1);
};

class FakeCoordinator : public CoordinatorClient {
 public:
  struct WatchScript {
    std::vector<v1::WatchResponse> messages;
    absl::Status end;
    std::function<void()> before_end;
  };

  absl::StatusOr<v1::Job> Submit(const v1::SubmitRequest& request) override {
    submitted.push_back(request);
    return Next(submit_answers);
  }
  absl::StatusOr<v1::Job> GetJob(const std::string& id) override {
    for (const v1::Job& job : jobs) {
      if (job.id() == id) return job;
    }
    return RpcError(Reason::kJobNotFound, absl::StrCat("no job ", id));
  }
  // Pages of two; filters by the beginning of ids only.
  absl::StatusOr<v1::ListJobsResponse> ListJobs(const v1::ListJobsRequest& request) override {
    listed.push_back(request);
    std::vector<v1::Job> found;
    for (const v1::Job& job : jobs) {
      if (absl::StartsWith(job.id(), request.id_prefix())) found.push_back(job);
    }
    const size_t from = request.page_token().empty() ? 0 : std::stoul(request.page_token());
    const size_t size = request.page_size() == 1 ? 1 : 2;
    v1::ListJobsResponse page;
    for (size_t i = from; i < found.size() && i < from + size; ++i) *page.add_jobs() = found[i];
    if (from + size < found.size()) page.set_next_page_token(absl::StrCat(from + size));
    return page;
  }
  absl::StatusOr<v1::Job> Cancel(const v1::CancelRequest& request) override {
    cancelled.push_back(request);
    return GetJob(request.id());
  }
  absl::StatusOr<v1::Job> Hold(const std::string& id) override {
    changes.push_back("hold " + id);
    return GetJob(id);
  }
  absl::StatusOr<v1::Job> Release(const std::string& id) override {
    changes.push_back("release " + id);
    return GetJob(id);
  }
  absl::StatusOr<v1::WhyResponse> Why(const std::string& id) override {
    absl::StatusOr<v1::Job> job = GetJob(id);
    if (!job.ok()) return job.status();
    v1::WhyResponse response = why;
    *response.mutable_job() = *job;
    return response;
  }
  absl::StatusOr<v1::ListNodesResponse> ListNodes() override {
    if (!node_answers.empty()) return Next(node_answers);
    return nodes;
  }
  absl::StatusOr<v1::Node> Cordon(const v1::CordonRequest& request) override {
    changes.push_back(absl::StrCat("cordon ", request.worker(), " ", request.reason()));
    return FindNode(request.worker());
  }
  absl::StatusOr<v1::DrainResponse> Drain(const v1::DrainRequest& request) override {
    drained.push_back(request);
    v1::DrainResponse response;
    absl::StatusOr<v1::Node> node = FindNode(request.worker());
    if (!node.ok()) return node.status();
    *response.mutable_node() = *node;
    for (const v1::Slot& slot : node->slots()) {
      if (!slot.job_id().empty()) response.add_job_ids(slot.job_id());
    }
    return response;
  }
  absl::StatusOr<v1::Node> Uncordon(const std::string& worker) override {
    changes.push_back("uncordon " + worker);
    return FindNode(worker);
  }
  absl::StatusOr<v1::Node> FenceNode(const std::string& worker) override {
    changes.push_back("fence " + worker);
    return FindNode(worker);
  }
  absl::Status ForgetNode(const std::string& worker) override {
    changes.push_back("forget " + worker);
    return FindNode(worker).status();
  }
  absl::Status Backup(const OnBackup& on_message) override {
    for (const v1::BackupResponse& piece : backup) {
      if (!on_message(piece)) return absl::OkStatus();
    }
    return backup_end;
  }
  absl::Status Watch(const std::string& id, absl::Duration limit,
                     const OnWatch& on_message) override {
    watched.emplace_back(id, limit);
    const WatchScript script = Next(watches);
    for (const v1::WatchResponse& message : script.messages) {
      if (!on_message(message)) return absl::OkStatus();
    }
    if (script.before_end) script.before_end();
    return script.end;
  }
  absl::Status Logs(const v1::LogsRequest& request, const OnLogs& on_message) override {
    log_requests.push_back(request);
    const auto [messages, end] = Next(logs);
    for (const v1::LogsResponse& message : messages) on_message(message);
    return end;
  }

  std::vector<v1::Job> jobs;
  v1::ListNodesResponse nodes;
  std::deque<absl::StatusOr<v1::Job>> submit_answers;
  std::deque<WatchScript> watches;
  std::deque<std::pair<std::vector<v1::LogsResponse>, absl::Status>> logs;
  std::vector<v1::SubmitRequest> submitted;
  std::vector<v1::ListJobsRequest> listed;
  std::vector<v1::CancelRequest> cancelled;
  std::vector<v1::DrainRequest> drained;
  std::vector<std::string> changes;  // "hold demo-abcdef", "cordon a reason", .. in order
  v1::WhyResponse why;
  std::deque<absl::StatusOr<v1::ListNodesResponse>> node_answers;  // instead of `nodes`
  std::vector<v1::BackupResponse> backup;
  absl::Status backup_end;
  std::vector<std::pair<std::string, absl::Duration>> watched;
  std::vector<v1::LogsRequest> log_requests;

 private:
  absl::StatusOr<v1::Node> FindNode(const std::string& worker) const {
    for (const v1::Node& node : nodes.nodes()) {
      if (node.worker() == worker) return node;
    }
    return RpcError(Reason::kNodeNotFound, absl::StrCat("no worker ", worker));
  }
  // The last entry answers for ever.
  template <typename T>
  static T Next(std::deque<T>& queue) {
    T next = queue.front();
    if (queue.size() > 1) queue.pop_front();
    return next;
  }
};

}  // namespace upipe::client
