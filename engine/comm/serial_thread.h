// One thread that runs closures in the order given: the communicator's own. Transports that may
// only be touched by one thread are made, used and destroyed on it.
#pragma once

#include <deque>
#include <functional>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace upipe::comm {

class SerialThread {
 public:
  SerialThread();
  ~SerialThread();  // runs what was posted, then joins
  SerialThread(const SerialThread&) = delete;

  void Post(std::function<void()> work);
  // Posts and blocks until it has run.
  void Run(const std::function<void()>& work);

 private:
  void Loop();
  bool Ready() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return stopping_ || !queue_.empty(); }

  absl::Mutex mutex_;
  std::deque<std::function<void()>> queue_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace upipe::comm
