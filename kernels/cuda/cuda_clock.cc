#include "kernels/cuda/cuda_clock.h"

#include <utility>

#include "common/status.h"
#include "kernels/api/stream.h"

namespace upipe::kernels {
namespace {

// The device tells the time between two events as a float of milliseconds: after a second it is
// right to 60 ns.
constexpr int64_t kBaseNanos = 1'000'000'000;

}  // namespace

CudaClock::~CudaClock() {
  base_.reset();
  if (idle_ != nullptr) runtime_->DestroyStream(idle_);
  for (CudaEventHandle event : free_) runtime_->DestroyEvent(event);
}

absl::StatusOr<CudaClock::TimedEvent> CudaClock::Take() {
  CudaEventHandle event = nullptr;
  {
    std::lock_guard lock(mutex_);
    if (!free_.empty()) {
      event = free_.back();
      free_.pop_back();
    }
  }
  if (event == nullptr) {
    UPIPE_ASSIGN_OR_RETURN(event, runtime_->CreateTimedEvent());
  }
  return TimedEvent(event, [this](CudaEventHandle unused) {
    std::lock_guard lock(mutex_);
    free_.push_back(unused);
  });
}

absl::StatusOr<std::shared_ptr<const CudaClock::Base>> CudaClock::CurrentBase() {
  {
    std::lock_guard lock(mutex_);
    if (base_ != nullptr && SteadyNanos() - base_->nanos < kBaseNanos) return base_;
  }
  UPIPE_ASSIGN_OR_RETURN(TimedEvent event, Take());
  std::shared_ptr<const Base> before;  // goes without the lock
  std::lock_guard lock(mutex_);
  if (idle_ == nullptr) {
    UPIPE_ASSIGN_OR_RETURN(idle_, runtime_->CreateStream());
  }
  const int64_t now = SteadyNanos();
  UPIPE_RETURN_IF_ERROR(runtime_->RecordEvent(event.get(), idle_));
  before = std::exchange(base_, std::make_shared<Base>(Base{std::move(event), now}));
  return base_;
}

absl::StatusOr<CudaClock::Point> CudaClock::Record(CudaStreamHandle stream) {
  Point point;
  UPIPE_ASSIGN_OR_RETURN(point.base_, CurrentBase());
  UPIPE_ASSIGN_OR_RETURN(point.event_, Take());
  UPIPE_RETURN_IF_ERROR(runtime_->RecordEvent(point.event_.get(), stream));
  return point;
}

absl::StatusOr<std::optional<int64_t>> CudaClock::NanosOf(const Point& point) {
  UPIPE_ASSIGN_OR_RETURN(const bool done, runtime_->EventDone(point.event_.get()));
  if (!done) return std::nullopt;
  // Recorded before, on a stream that has nothing else to do.
  UPIPE_RETURN_IF_ERROR(runtime_->SynchronizeEvent(point.base_->event.get()));
  UPIPE_ASSIGN_OR_RETURN(const int64_t since,
                         runtime_->NanosBetween(point.base_->event.get(), point.event_.get()));
  return point.base_->nanos + since;
}

}  // namespace upipe::kernels
