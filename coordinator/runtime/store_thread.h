// The one thread that touches the store: commits what the deciding thread wrote, many steps in one
// durable transaction when they pile up.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <variant>
#include <vector>

#include "absl/time/time.h"
#include "common/bounded_queue.h"
#include "coordinator/store/ballast.h"
#include "coordinator/store/store.h"

namespace upipe::coordinator {

class StoreThread {
 public:
  struct Hooks {
    // On the store thread, after committed() grew; how long the write took.
    std::function<void(absl::Duration)> committed;
    std::function<void(absl::Status)> failed;  // what is durable is unknown: must end the process
  };
  // `store` and `ballast` are used by this thread alone until destruction.
  StoreThread(Store& store, Ballast& ballast, Hooks hooks);
  // Commits what was handed over, then ends.
  ~StoreThread();

  // Hands over the batches of one step. Never blocks: the deciding thread, the only caller, hears
  // heartbeats while a commit hangs, and bounds what waits. Returns the step's number: it is
  // durable once committed() is not below it.
  uint64_t Commit(std::vector<Batch> batches);
  // Number of the last step handed over.
  uint64_t handed_over() const { return handed_over_; }
  uint64_t committed() const { return committed_; }

  // Copies the store into a new file at `path`, in steps between commits, then calls `done` on the
  // store thread with the revision it holds. One at a time. Cancelled: the thread ends first.
  using CopyDone = std::function<void(absl::StatusOr<int64_t>)>;
  void Copy(std::string path, CopyDone done);

  // Whether new jobs may be accepted: the disk has room. Thread-safe.
  absl::Status AcceptsSubmits() const;

 private:
  struct Step {
    uint64_t number = 0;
    std::vector<Batch> batches;
  };
  struct CopyRequest {
    std::string path;
    CopyDone done;
  };
  using Work = std::variant<Step, CopyRequest>;
  void Run();
  // Takes `first` and what waits behind it. The number of the last step, 0 for none.
  uint64_t Gather(std::optional<Work> first, std::vector<Batch>& group);
  void BeginCopy(CopyRequest request);
  void ContinueCopy();
  void EndCopy(absl::StatusOr<int64_t> revision);
  void CheckBallast();

  Store& store_;
  Ballast& ballast_;
  const Hooks hooks_;
  BoundedQueue<Work> queue_{1};  // pushed over its capacity
  uint64_t handed_over_ = 0;     // deciding thread only
  std::atomic<uint64_t> committed_{0};
  std::unique_ptr<StoreCopy> copy_;  // store thread only
  CopyDone copy_done_;
  mutable std::mutex mutex_;
  absl::Status accepts_submits_;
  std::thread thread_;
};

}  // namespace upipe::coordinator
