// One thread that runs closures in the order given: the communicator's own. Transports that may
// only be touched by one thread are made, used and destroyed on it.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

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

  // Of std, not Abseil: ThreadSanitizer cannot see into Debian's absl::Mutex.
  std::mutex mutex_;  // of the two below
  std::deque<std::function<void()>> queue_;
  bool stopping_ = false;
  std::condition_variable news_;
  std::thread thread_;
};

}  // namespace upipe::comm
