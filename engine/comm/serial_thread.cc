#include "engine/comm/serial_thread.h"

#include <utility>

#include "absl/synchronization/notification.h"

namespace upipe::comm {

SerialThread::SerialThread() : thread_([this] { Loop(); }) {}

SerialThread::~SerialThread() {
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
  }
  thread_.join();
}

void SerialThread::Post(std::function<void()> work) {
  absl::MutexLock lock(&mutex_);
  queue_.push_back(std::move(work));
}

void SerialThread::Run(const std::function<void()>& work) {
  absl::Notification done;
  Post([&] {
    work();
    done.Notify();
  });
  done.WaitForNotification();
}

void SerialThread::Loop() {
  for (;;) {
    std::function<void()> work;
    {
      absl::MutexLock lock(&mutex_);
      mutex_.Await(absl::Condition(this, &SerialThread::Ready));
      if (queue_.empty()) return;
      work = std::move(queue_.front());
      queue_.pop_front();
    }
    work();
  }
}

}  // namespace upipe::comm
