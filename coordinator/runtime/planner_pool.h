// Planning in child processes (upipe-plan), so that no job's content can bring the coordinator
// down: limits on CPU, memory and time, and a crash is one job's problem.
#pragma once

#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "common/bounded_queue.h"
#include "coordinator/core/event.h"

namespace upipe::coordinator {

struct PlannerLimits {
  // A search over a deep model on many devices, and what would fit instead where nothing does, take
  // up to some minutes.
  absl::Duration cpu = absl::Minutes(10);     // RLIMIT_CPU, whole seconds
  absl::Duration wall = absl::Minutes(20);    // then SIGKILL to its process group
  int64_t address_bytes = int64_t{16} << 30;  // RLIMIT_AS
};

class PlannerPool {
 public:
  struct Options {
    std::string binary;    // upipe-plan
    std::string work_dir;  // exists; the children's input and output files
    PlannerLimits limits;
    int num_threads = 2;
  };
  // `finished` is called on a pool thread for every job started, once; for a killed one too.
  PlannerPool(Options options, std::function<void(PlanFinished)> finished);
  // Kills what runs.
  ~PlannerPool();

  // Thread-safe, never block.
  void Start(StartPlanner job);
  void Kill(const std::string& job_id);

 private:
  void Work();
  absl::StatusOr<v1::PlanResult> Plan(const StartPlanner& job);
  // Runs the child to its end; an error says how it ended and quotes its last words.
  absl::Status RunChild(const std::string& job_id, const std::vector<std::string>& arguments);
  absl::Status Await(const std::string& job_id, int pid, int pidfd, int stderr_fd);

  const Options options_;
  const std::function<void(PlanFinished)> finished_;
  BoundedQueue<StartPlanner> queue_{1 << 16};  // the core asks for a few at a time
  std::mutex mutex_;
  std::map<std::string, int> running_;  // job id -> pidfd
  std::set<std::string> killed_;        // jobs whose planner must not start or go on
  bool closing_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace upipe::coordinator
