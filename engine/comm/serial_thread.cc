#include "engine/comm/serial_thread.h"

#include <future>
#include <utility>

namespace upipe::comm {

SerialThread::SerialThread() : thread_([this] { Loop(); }) {}

SerialThread::~SerialThread() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  news_.notify_one();
  thread_.join();
}

void SerialThread::Post(std::function<void()> work) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    queue_.push_back(std::move(work));
  }
  news_.notify_one();
}

void SerialThread::Run(const std::function<void()>& work) {
  std::promise<void> done;
  Post([&] {
    work();
    done.set_value();
  });
  done.get_future().wait();
}

void SerialThread::Loop() {
  for (;;) {
    std::function<void()> work;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      news_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
      if (queue_.empty()) return;
      work = std::move(queue_.front());
      queue_.pop_front();
    }
    work();
  }
}

}  // namespace upipe::comm
