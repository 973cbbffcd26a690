#include "kernels/cuda/cuda_stream.h"

#include <algorithm>
#include <atomic>
#include <deque>
#include <optional>
#include <unordered_map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "common/check.h"
#include "common/status.h"
#include "kernels/api/device_fault.h"
#include "kernels/cuda/fault.h"

namespace upipe::kernels {

CudaEventPool::~CudaEventPool() {
  for (CudaEventHandle event : free_) runtime_->DestroyEvent(event);
}

absl::StatusOr<CudaEventHandle> CudaEventPool::Take() {
  {
    std::lock_guard lock(mutex_);
    if (!free_.empty()) {
      const CudaEventHandle event = free_.back();
      free_.pop_back();
      return event;
    }
  }
  return runtime_->CreateEvent();
}

void CudaEventPool::GiveBack(CudaEventHandle event) {
  std::lock_guard lock(mutex_);
  free_.push_back(event);
}

// Mapped memory of one stream.
struct CudaStream::Mapped {
  cuda::FaultWords fault = cuda::kNoFault;
  uint32_t ticket = 0;  // foreign events reached
};

// How far the stream has come, as far as the host knows. Entry number n is the n-th issued, from 1.
struct CudaStream::Progress : std::enable_shared_from_this<Progress> {
  // Work that may still run, for the words of a device fault.
  struct Issued {
    uint64_t number = 0;
    const char* what = nullptr;
    std::string moment;
  };
  static constexpr size_t kMaxIssued = 1024;
  // A point of another stream that entry `number` waits for.
  struct Dependency {
    uint64_t number = 0;
    std::shared_ptr<Progress> on;
    uint64_t point = 0;
    // Asked once the point was passed, where the event has more to say than its point.
    std::shared_ptr<Event::State> outcome;
  };
  // A host function may not call CUDA, and so not ask an outcome.
  enum class Outcomes { kAsk, kLeave };
  struct PendingTask {
    uint64_t number = 0;
    Task task;
  };

  struct PendingStamp {
    CudaClock::Point point;
    TimeStamp* stamp = nullptr;
  };

  std::shared_ptr<const CudaStreamShared> shared;
  std::string name;
  std::shared_ptr<Mapped> mapped;  // freed when the last event is gone

  // Apart from the mutex of tasks: CUDA is called under it.
  std::mutex stamps_mutex;
  std::deque<PendingStamp> stamps;  // not yet told, in the order of the stream

  std::mutex mutex;  // of all that follows
  uint64_t number = 0;
  uint64_t ended = 0;  // entries up to here are known to have run
  absl::Status error;  // of entry error_at, the first that failed
  uint64_t error_at = 0;
  std::deque<PendingTask> tasks;
  std::deque<Dependency> dependencies;  // ascending
  std::deque<Issued> issued;            // ascending

  void FailAt(uint64_t at, const absl::Status& status) {
    if (error_at != 0 && error_at <= at) return;
    error = status;
    error_at = at;
  }
  // What issuing entry `at` came to.
  void TakeOutcome(uint64_t at, const absl::Status& status);
  // The first error that entry `point`, which was reached, met or waited for. Takes the locks of
  // this and other streams, one after the other.
  absl::Status ErrorAt(uint64_t point, Outcomes outcomes = Outcomes::kAsk);
  // What the host learns when entry `point` is known to have run, or the device to have failed.
  absl::Status Reached(uint64_t point, const absl::Status& status,
                       Outcomes outcomes = Outcomes::kAsk);
  // Sets the stamps that the device has passed.
  void TellStamps();
  // The error of a device that failed, in words that say where.
  absl::Status Explain(const absl::Status& fault) const;
  static void RunTask(void* progress);
};

absl::Status CudaStream::Progress::ErrorAt(uint64_t point, Outcomes outcomes) {
  std::vector<Dependency> ours;
  {
    std::lock_guard lock(mutex);
    if (error_at != 0 && error_at <= point) return error;
    for (const Dependency& dependency : dependencies) {
      if (dependency.number <= point) ours.push_back(dependency);
    }
  }
  std::unordered_map<Progress*, uint64_t> seen;  // up to which point
  for (const Dependency& first : ours) {
    std::vector<Dependency> left = {first};
    while (!left.empty()) {
      const Dependency next = std::move(left.back());
      left.pop_back();
      absl::Status found;
      if (next.outcome != nullptr && outcomes == Outcomes::kAsk) {
        found = next.outcome->Synchronize();
      }
      uint64_t& before = seen[next.on.get()];
      if (found.ok() && next.point > before) {
        std::lock_guard lock(next.on->mutex);
        if (next.on->error_at != 0 && next.on->error_at <= next.point) found = next.on->error;
        for (const Dependency& further : next.on->dependencies) {
          if (further.number > before && further.number <= next.point) left.push_back(further);
        }
        before = next.point;
      }
      if (found.ok()) continue;
      std::lock_guard lock(mutex);
      FailAt(first.number, found);
      return error;
    }
  }
  return absl::OkStatus();
}

void CudaStream::Progress::TellStamps() {
  std::lock_guard lock(stamps_mutex);
  while (!stamps.empty()) {
    const absl::StatusOr<std::optional<int64_t>> nanos =
        shared->clock->NanosOf(stamps.front().point);
    if (nanos.ok() && !nanos->has_value()) return;
    // A stream in error tells no time.
    if (nanos.ok()) stamps.front().stamp->store(**nanos, std::memory_order_release);
    stamps.pop_front();
  }
}

absl::Status CudaStream::Progress::Explain(const absl::Status& fault) const {
  if (issued.empty()) {
    return absl::Status(fault.code(), absl::StrCat(fault.message(), " on stream ", name, " of ",
                                                   shared->device, ", which was idle"));
  }
  const Issued& first = issued.front();
  const Issued& last = issued.back();
  std::string where = absl::StrCat(first.what, " of ", first.moment);
  if (issued.size() > 1) {
    absl::StrAppend(&where, " or one of the ", issued.size() - 1, " issued after it, up to ",
                    last.what, " of ", last.moment);
  }
  return absl::Status(fault.code(), absl::StrCat(fault.message(), " on stream ", name, " of ",
                                                 shared->device, ", in ", where));
}

void CudaStream::Progress::TakeOutcome(uint64_t at, const absl::Status& status) {
  if (status.ok()) return;
  std::lock_guard lock(mutex);
  FailAt(at, IsDeviceFault(status) ? Explain(status) : status);
}

absl::Status CudaStream::Progress::Reached(uint64_t point, const absl::Status& status,
                                           Outcomes outcomes) {
  if (outcomes == Outcomes::kAsk) TellStamps();
  {
    std::lock_guard lock(mutex);
    if (!status.ok()) {
      FailAt(ended + 1, Explain(status));
    } else if (ended < point) {
      if (const absl::Status bad = cuda::FaultStatus(mapped->fault); !bad.ok())
        FailAt(ended + 1, bad);
      ended = point;
      while (!issued.empty() && issued.front().number <= ended) issued.pop_front();
    }
  }
  const absl::Status first = ErrorAt(point, outcomes);
  std::lock_guard lock(mutex);
  while (!dependencies.empty() && dependencies.front().number <= point &&
         (dependencies.front().outcome == nullptr || outcomes == Outcomes::kAsk)) {
    dependencies.pop_front();
  }
  return first;
}

// On a thread of CUDA's. Everything before the task has run.
void CudaStream::Progress::RunTask(void* pointer) {
  const auto progress = static_cast<Progress*>(pointer)->shared_from_this();
  PendingTask pending;
  {
    std::lock_guard lock(progress->mutex);
    pending = std::move(progress->tasks.front());
    progress->tasks.pop_front();
  }
  if (!progress->Reached(pending.number - 1, absl::OkStatus(), Outcomes::kLeave).ok()) return;
  ExecContext context{*progress->shared->parallel};
  const absl::Status status = pending.task(context);
  if (status.ok()) return;
  std::lock_guard lock(progress->mutex);
  progress->FailAt(pending.number, status);
}

// An event: a point of a stream, with the CUDA event recorded there, or none where recording
// failed.
class CudaStream::Point final : public Event::State {
 public:
  Point(std::shared_ptr<Progress> progress, uint64_t number, CudaEventHandle event)
      : progress_(std::move(progress)), number_(number), event_(event) {}
  ~Point() override {
    if (event_ != nullptr) progress_->shared->events->GiveBack(event_);
  }

  bool Done() const override {
    if (event_ == nullptr || reached_.load(std::memory_order_acquire)) return true;
    const absl::StatusOr<bool> done = progress_->shared->runtime->EventDone(event_);
    if (done.ok() && !*done) return false;
    progress_->Reached(number_, done.status()).IgnoreError();
    reached_.store(true, std::memory_order_release);
    return true;
  }

  absl::Status Synchronize() override {
    if (event_ == nullptr || reached_.load(std::memory_order_acquire)) {
      return progress_->ErrorAt(number_);
    }
    const absl::Status status =
        progress_->Reached(number_, progress_->shared->runtime->SynchronizeEvent(event_));
    reached_.store(true, std::memory_order_release);
    return status;
  }

  const std::shared_ptr<Progress>& progress() const { return progress_; }
  uint64_t number() const { return number_; }
  CudaEventHandle event() const { return event_; }

 private:
  const std::shared_ptr<Progress> progress_;
  const uint64_t number_;
  const CudaEventHandle event_;
  mutable std::atomic<bool> reached_{false};
};

CudaStream::CudaStream(std::string name, std::shared_ptr<const CudaStreamShared> shared)
    : name_(std::move(name)), shared_(std::move(shared)), progress_(std::make_shared<Progress>()) {
  progress_->shared = shared_;
  progress_->name = name_;
  const auto make = [&]() -> absl::Status {
    UPIPE_ASSIGN_OR_RETURN(void* memory, shared_->runtime->AllocateMapped(sizeof(Mapped)));
    progress_->mapped = std::shared_ptr<Mapped>(
        new (memory) Mapped(),
        [runtime = shared_->runtime](Mapped* mapped) { runtime->FreeMapped(mapped); });
    UPIPE_ASSIGN_OR_RETURN(handle_, shared_->runtime->CreateStream());
    return absl::OkStatus();
  };
  if (const absl::Status made = make(); !made.ok()) Fail(made);
  if (shared_->delay) delays_.emplace(*shared_->delay, name_);
}

CudaStream::~CudaStream() {
  if (handle_ != nullptr) {
    const absl::Status drained = shared_->runtime->SynchronizeStream(handle_);
    waiter_.reset();
    uint64_t last = 0;
    {
      std::lock_guard lock(progress_->mutex);
      last = progress_->number;
    }
    progress_->Reached(last, drained).IgnoreError();
    shared_->runtime->DestroyStream(handle_);
  }
  {
    std::lock_guard lock(progress_->stamps_mutex);
    progress_->stamps.clear();  // of a device that failed
  }
  std::lock_guard lock(progress_->mutex);
  progress_->tasks.clear();  // of a device that failed
  progress_->dependencies.clear();
}

CudaStream& CudaStream::Of(Stream& stream) {
  auto* cuda = dynamic_cast<CudaStream*>(&stream);
  UPIPE_CHECK(cuda != nullptr) << "stream " << stream.name() << " is none of a CUDA device";
  return *cuda;
}

int64_t* CudaStream::fault_words() const {
  return progress_->mapped != nullptr ? progress_->mapped->fault.data() : nullptr;
}

void CudaStream::Fail(const absl::Status& error) {
  std::lock_guard lock(progress_->mutex);
  progress_->FailAt(++progress_->number, error);
  last_is_current_ = false;
}

void CudaStream::Issue(const char* what,
                       const std::function<absl::Status(CudaStreamHandle)>& issue) {
  if (delays_) {
    Submit([delay = delays_->Next()](ExecContext&) {
      absl::SleepFor(delay);
      return absl::OkStatus();
    });
  }
  uint64_t number = 0;
  {
    std::lock_guard lock(progress_->mutex);
    if (progress_->error_at != 0) return;
    number = ++progress_->number;
    if (progress_->issued.size() == Progress::kMaxIssued) progress_->issued.pop_front();
    progress_->issued.push_back({number, what, shared_->moment()});
  }
  last_is_current_ = false;
  progress_->TakeOutcome(number, issue(handle_));
}

void CudaStream::Submit(Task task) {
  bool full = false;
  {
    std::lock_guard lock(progress_->mutex);
    if (progress_->error_at != 0) return;
    full = progress_->tasks.size() >= kMaxPendingTasks;
  }
  if (full) Record().Synchronize().IgnoreError();
  uint64_t number = 0;
  {
    std::lock_guard lock(progress_->mutex);
    number = ++progress_->number;
    progress_->tasks.push_back({number, std::move(task)});
  }
  last_is_current_ = false;
  progress_->TakeOutcome(number,
                         shared_->runtime->CallHost(handle_, &Progress::RunTask, progress_.get()));
}

Event CudaStream::Record() {
  if (last_is_current_) return last_;
  uint64_t number = 0;
  {
    std::lock_guard lock(progress_->mutex);
    number = progress_->number;
  }
  absl::StatusOr<CudaEventHandle> event = nullptr;
  if (handle_ != nullptr) event = shared_->events->Take();
  if (event.ok() && *event != nullptr) {
    if (const absl::Status status = shared_->runtime->RecordEvent(*event, handle_); !status.ok()) {
      shared_->events->GiveBack(*event);
      event = status;
    }
  }
  if (!event.ok()) {
    std::lock_guard lock(progress_->mutex);
    progress_->FailAt(std::max<uint64_t>(number, 1), progress_->Explain(event.status()));
  }
  last_ = Event(std::make_shared<Point>(progress_, number, event.ok() ? *event : nullptr));
  last_is_current_ = true;
  return last_;
}

void CudaStream::Wait(const Event& event) {
  if (event.state() == nullptr || handle_ == nullptr) return;
  const Event::State* adds_to = event.state()->point();
  const auto* point =
      dynamic_cast<const Point*>(adds_to != nullptr ? adds_to : event.state().get());
  if (point == nullptr) return WaitForOther(event);
  if (point->progress() == progress_ && adds_to == nullptr) return;
  uint64_t number = 0;
  {
    std::lock_guard lock(progress_->mutex);
    number = ++progress_->number;
    progress_->dependencies.push_back({.number = number,
                                       .on = point->progress(),
                                       .point = point->number(),
                                       .outcome = adds_to != nullptr ? event.state() : nullptr});
  }
  last_is_current_ = false;
  if (point->event() == nullptr) return;
  progress_->TakeOutcome(number, shared_->runtime->WaitEvent(handle_, point->event()));
}

void CudaStream::Stamp(TimeStamp* stamp) {
  Issue("a look at the clock", [&](CudaStreamHandle handle) -> absl::Status {
    UPIPE_ASSIGN_OR_RETURN(CudaClock::Point point, shared_->clock->Record(handle));
    std::lock_guard lock(progress_->stamps_mutex);
    progress_->stamps.push_back({std::move(point), stamp});
    return absl::OkStatus();
  });
  progress_->TellStamps();
}

void CudaStream::WaitForOther(const Event& event) {
  uint64_t number = 0;
  {
    std::lock_guard lock(progress_->mutex);
    number = ++progress_->number;
  }
  last_is_current_ = false;
  if (event.Done()) {
    progress_->TakeOutcome(number, event.Synchronize());
    return;
  }
  if (waiter_ == nullptr) {
    waiter_ = std::make_unique<HostStream>(absl::StrCat(name_, ".wait"), shared_->parallel,
                                           std::nullopt, std::vector<int>());
  }
  const uint32_t ticket = ++tickets_;
  waiter_->Submit([event, number, ticket, progress = progress_](ExecContext&) {
    progress->TakeOutcome(number, event.Synchronize());
    __atomic_store_n(&progress->mapped->ticket, ticket, __ATOMIC_RELEASE);
    return absl::OkStatus();
  });
  progress_->TakeOutcome(number,
                         shared_->runtime->WaitWord(handle_, &progress_->mapped->ticket, ticket));
}

}  // namespace upipe::kernels
