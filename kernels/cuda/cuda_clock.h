// The time at which a device passed a point of a stream, on the host's clock: timed events,
// measured from one that an idle stream passed at a time the host knows. Nothing waits for them.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/cuda/runtime_calls.h"

namespace upipe::kernels {

// Thread-safe.
class CudaClock {
 public:
  explicit CudaClock(std::shared_ptr<CudaRuntime> runtime) : runtime_(std::move(runtime)) {}
  // Its points must be gone.
  ~CudaClock();

  class Point;
  // A point of `stream`, which one thread at a time uses.
  absl::StatusOr<Point> Record(CudaStreamHandle stream);
  // Of std::chrono::steady_clock, right to some microseconds and to a few parts in 10^7 of the
  // time since the point was recorded. None while the device has not passed it.
  absl::StatusOr<std::optional<int64_t>> NanosOf(const Point& point);

 private:
  // Timed events of the runtime; given back to be used again.
  using TimedEvent = std::shared_ptr<CUevent_st>;
  struct Base {
    TimedEvent event;
    int64_t nanos = 0;  // when it was recorded on an idle stream
  };
  absl::StatusOr<TimedEvent> Take();
  absl::StatusOr<std::shared_ptr<const Base>> CurrentBase();

  const std::shared_ptr<CudaRuntime> runtime_;
  std::mutex mutex_;  // of what follows
  CudaStreamHandle idle_ = nullptr;
  std::shared_ptr<const Base> base_;
  std::vector<CudaEventHandle> free_;
};

class CudaClock::Point {
 private:
  friend class CudaClock;
  std::shared_ptr<const Base> base_;
  TimedEvent event_;
};

}  // namespace upipe::kernels
