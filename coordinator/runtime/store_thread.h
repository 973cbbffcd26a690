// The one thread that touches the store: commits what the deciding thread wrote, many steps in one
// durable transaction when they pile up.
#pragma once

#include <atomic>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "common/bounded_queue.h"
#include "coordinator/store/ballast.h"
#include "coordinator/store/store.h"

namespace upipe::coordinator {

class StoreThread {
 public:
  struct Hooks {
    std::function<void()> committed;           // on the store thread, after committed() grew
    std::function<void(absl::Status)> failed;  // what is durable is unknown: must end the process
  };
  // `store` and `ballast` are used by this thread alone until destruction.
  StoreThread(Store& store, Ballast& ballast, Hooks hooks);
  // Commits what was handed over, then ends.
  ~StoreThread();

  // Hands over the batches of one step; blocks while too many wait. Called by the deciding thread.
  // Returns the step's number: it is durable once committed() is not below it.
  uint64_t Commit(std::vector<Batch> batches);
  // Number of the last step handed over.
  uint64_t handed_over() const { return handed_over_; }
  uint64_t committed() const { return committed_; }

  // Whether new jobs may be accepted: the disk has room. Thread-safe.
  absl::Status AcceptsSubmits() const;

 private:
  struct Step {
    uint64_t number = 0;
    std::vector<Batch> batches;
  };
  void Run();
  void CheckBallast();

  Store& store_;
  Ballast& ballast_;
  const Hooks hooks_;
  BoundedQueue<Step> queue_{256};
  uint64_t handed_over_ = 0;  // deciding thread only
  std::atomic<uint64_t> committed_{0};
  mutable std::mutex mutex_;
  absl::Status accepts_submits_;
  std::thread thread_;
};

}  // namespace upipe::coordinator
