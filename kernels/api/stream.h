// Streams and events: the order in which a device executes. Work submitted to one stream runs in
// order; streams run concurrently; Wait(event) orders one stream after a point of another.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"

namespace upipe::kernels {

// Runs loop bodies on the rank's pinned threads. The partition depends only on (count,
// num_threads), so results are bit-identical from run to run.
class ParallelFor {
 public:
  virtual ~ParallelFor() = default;
  virtual int num_threads() const = 0;
  // Calls body(begin, end, thread_index) for at most num_threads() contiguous pieces of [0, count)
  // and returns when all have returned. Body must not throw. Blocking; called on the stream's
  // thread only.
  virtual void Run(
      int64_t count,
      const std::function<void(int64_t begin, int64_t end, int thread_index)>& body) = 0;
};

// What a task sees while it executes on a stream.
struct ExecContext {
  ParallelFor& parallel;
};

// A task that fails puts its stream in error: later tasks are dropped, and every event recorded
// after it completes with that error.
using Task = std::function<absl::Status(ExecContext&)>;

// A point in a stream. Copies share the point. Thread-safe.
class Event {
 public:
  class State {
   public:
    virtual ~State() = default;
    virtual bool Done() const = 0;
    // Blocks the caller until the point is reached; the first error of the stream, if any.
    virtual absl::Status Synchronize() = 0;
    // The point of a stream that this one adds an outcome to; null where it is one itself. A device
    // that need not ask its host waits for that point, and asks this one once it has passed.
    virtual const State* point() const { return nullptr; }
  };
  Event() = default;  // already reached
  explicit Event(std::shared_ptr<State> state) : state_(std::move(state)) {}
  bool Done() const { return state_ == nullptr || state_->Done(); }
  absl::Status Synchronize() const {
    return state_ == nullptr ? absl::OkStatus() : state_->Synchronize();
  }
  const std::shared_ptr<State>& state() const { return state_; }

 private:
  std::shared_ptr<State> state_;
};

// When a stream passed a point: nanoseconds of std::chrono::steady_clock, 0 before it has.
using TimeStamp = std::atomic<int64_t>;

inline int64_t SteadyNanos() {
  return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Owned by whoever called Device::CreateStream. Submit, Record, Wait and Stamp are called by one
// host thread at a time, return at once (all but Record may block while thousands of tasks are
// pending) and never fail; failures of tasks surface on events.
class Stream {
 public:
  virtual ~Stream() = default;  // drains what was submitted
  virtual const std::string& name() const = 0;
  virtual void Submit(Task task) = 0;
  virtual Event Record() = 0;
  virtual void Wait(const Event& event) = 0;
  // Sets *stamp when the stream gets here, at the latest when a Synchronize of a later event
  // returns; never on a dry device, and perhaps never where the stream was in error by then. The
  // stamp lives until then, or as long as the stream. A device with a clock of its own tells that
  // clock's time, set by the host's.
  virtual void Stamp(TimeStamp* stamp) {
    Submit([stamp](ExecContext&) {
      stamp->store(SteadyNanos(), std::memory_order_release);
      return absl::OkStatus();
    });
  }
  // Blocks until everything submitted so far has run; the stream's first error, if any.
  absl::Status Synchronize() { return Record().Synchronize(); }
};

}  // namespace upipe::kernels
