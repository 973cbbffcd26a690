#include "kernels/host/host_stream.h"

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <set>
#include <utility>

#include "kernels/host/thread_placement.h"

namespace upipe::kernels {

// The queue and how far the thread has come through it. Entry number n is the n-th pushed, from 1.
struct HostStream::Progress {
  std::mutex mutex;
  std::condition_variable work_or_stop;  // for the stream's thread
  std::condition_variable room;          // for a submitter that met a full queue
  std::condition_variable passed;        // for Synchronize
  std::deque<Entry> queue;
  bool stop = false;
  bool thread_sleeps = false;
  std::multiset<uint64_t> awaited;  // points that Synchronize waits for
  std::atomic<uint64_t> completed{0};
  absl::Status error;  // of entry error_at, the first that failed
  uint64_t error_at = 0;
};

class HostStream::PointState final : public Event::State {
 public:
  PointState(std::shared_ptr<Progress> progress, uint64_t point)
      : progress_(std::move(progress)), point_(point) {}

  bool Done() const override {
    return progress_->completed.load(std::memory_order_acquire) >= point_;
  }

  absl::Status Synchronize() override {
    std::unique_lock lock(progress_->mutex);
    const auto awaited = progress_->awaited.insert(point_);
    progress_->passed.wait(lock, [this] { return Done(); });
    progress_->awaited.erase(awaited);
    const bool failed = progress_->error_at != 0 && progress_->error_at <= point_;
    return failed ? progress_->error : absl::OkStatus();
  }

 private:
  const std::shared_ptr<Progress> progress_;
  const uint64_t point_;
};

TaskDelays::TaskDelays(const StreamDelay& delay, const std::string& stream_name)
    : longest_nanoseconds_(absl::ToInt64Nanoseconds(delay.longest)) {
  std::seed_seq seed{delay.seed, static_cast<uint64_t>(std::hash<std::string>()(stream_name))};
  random_.seed(seed);
}

absl::Duration TaskDelays::Next() {
  const auto delays = static_cast<uint64_t>(longest_nanoseconds_) + 1;
  return absl::Nanoseconds(random_() % delays);
}

HostStream::HostStream(std::string name, std::shared_ptr<ParallelFor> parallel,
                       std::optional<StreamDelay> delay, const std::vector<int>& cpus)
    : name_(std::move(name)),
      parallel_(std::move(parallel)),
      progress_(std::make_shared<Progress>()) {
  if (delay) delays_.emplace(*delay, name_);
  thread_ = std::thread([this] { Loop(); });
  NameThread(thread_, name_);
  PlaceThread(thread_, cpus);
}

HostStream::~HostStream() {
  {
    std::lock_guard lock(progress_->mutex);
    progress_->stop = true;
  }
  progress_->work_or_stop.notify_one();
  thread_.join();
}

void HostStream::Submit(Task task) { Push(std::move(task)); }

void HostStream::Wait(const Event& event) {
  if (event.state() != nullptr) Push(event);
}

Event HostStream::Record() { return Event(std::make_shared<PointState>(progress_, submitted_)); }

void HostStream::Push(Entry entry) {
  bool wake = false;
  {
    std::unique_lock lock(progress_->mutex);
    progress_->room.wait(lock, [this] { return progress_->queue.size() < kMaxPending; });
    progress_->queue.push_back(std::move(entry));
    wake = progress_->thread_sleeps;
  }
  ++submitted_;
  if (wake) progress_->work_or_stop.notify_one();
}

absl::Status HostStream::Execute(Entry& entry, bool in_error) {
  if (in_error) return absl::OkStatus();
  if (Event* event = std::get_if<Event>(&entry)) return event->Synchronize();
  if (delays_) absl::SleepFor(delays_->Next());
  ExecContext context{*parallel_};
  return std::get<Task>(entry)(context);
}

void HostStream::Loop() {
  Progress& progress = *progress_;
  std::unique_lock lock(progress.mutex);
  while (true) {
    progress.thread_sleeps = true;
    progress.work_or_stop.wait(lock, [&] { return progress.stop || !progress.queue.empty(); });
    progress.thread_sleeps = false;
    if (progress.queue.empty()) return;
    const bool was_full = progress.queue.size() == kMaxPending;
    Entry entry = std::move(progress.queue.front());
    progress.queue.pop_front();
    const bool in_error = progress.error_at != 0;
    lock.unlock();
    if (was_full) progress.room.notify_one();
    absl::Status status = Execute(entry, in_error);
    entry = Event();  // what the task captured dies before its point is passed
    lock.lock();
    const uint64_t number = progress.completed.load(std::memory_order_relaxed) + 1;
    if (!status.ok() && progress.error_at == 0) {
      progress.error = std::move(status);
      progress.error_at = number;
    }
    progress.completed.store(number, std::memory_order_release);
    if (!progress.awaited.empty() && *progress.awaited.begin() <= number)
      progress.passed.notify_all();
  }
}

}  // namespace upipe::kernels
