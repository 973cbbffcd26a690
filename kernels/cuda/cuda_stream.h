// A stream of a CUDA device. Work is issued by the caller's thread at once and ordered by the
// device; tasks are host functions in stream order, events are CUDA events, and the first error is
// kept as a HostStream keeps it.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "kernels/api/stream.h"
#include "kernels/cuda/cuda_clock.h"
#include "kernels/cuda/runtime_calls.h"
#include "kernels/host/host_stream.h"

namespace upipe::kernels {

// CUDA events that nobody uses now. Thread-safe.
class CudaEventPool {
 public:
  explicit CudaEventPool(std::shared_ptr<CudaRuntime> runtime) : runtime_(std::move(runtime)) {}
  ~CudaEventPool();
  absl::StatusOr<CudaEventHandle> Take();
  void GiveBack(CudaEventHandle event);

 private:
  const std::shared_ptr<CudaRuntime> runtime_;
  std::mutex mutex_;
  std::vector<CudaEventHandle> free_;
};

// What streams of one device share; events, which may outlive the device, hold it too.
struct CudaStreamShared {
  std::shared_ptr<CudaRuntime> runtime;
  std::shared_ptr<CudaEventPool> events;
  std::shared_ptr<CudaClock> clock;
  std::shared_ptr<ParallelFor> parallel;  // what tasks get in their ExecContext
  std::string device;                     // for messages: "GPU 0 (NVIDIA H200)"
  std::function<std::string()> moment;    // where the step is; asked while a stream issues
  std::optional<StreamDelay> delay = {};  // of the test device: before what a stream issues
};

class CudaStream final : public Stream {
 public:
  // The same bound as a HostStream's: beyond it Submit waits for the device.
  static constexpr size_t kMaxPendingTasks = HostStream::kMaxPending;

  CudaStream(std::string name, std::shared_ptr<const CudaStreamShared> shared);
  ~CudaStream() override;

  // The stream as what it is; a check failure for one of another kind.
  static CudaStream& Of(Stream& stream);

  const std::string& name() const override { return name_; }
  // The task runs on a thread of CUDA's, in stream order: it must not touch device memory, nor wait
  // for anything of the device.
  void Submit(Task task) override;
  Event Record() override;
  // Any stream's event. One of no CUDA stream is waited for by a thread of this stream's own, and
  // the device holds the stream meanwhile. What follows is issued whatever comes of the event; its
  // error is then the stream's.
  void Wait(const Event& event) override;
  // By a timed event: the host is not asked. Told when somebody synchronises with a later point, or
  // stamps it.
  void Stamp(TimeStamp* stamp) override;

  // Calls issue(handle), which puts work on the stream; its error, or one that the work meets
  // later, is the stream's. `what` names the work in messages: a string that is never freed. Not
  // called when the stream is in error.
  void Issue(const char* what, const std::function<absl::Status(CudaStreamHandle)>& issue);
  // Puts the stream in this error, as a task would.
  void Fail(const absl::Status& error);
  // Where kernels on this stream report bad data (kernels/cuda/fault.h), in memory that device
  // and host see. Null in a stream that could not be made, which issues nothing.
  int64_t* fault_words() const;
  // Null in a stream that could not be made.
  CudaStreamHandle handle() const { return handle_; }

 private:
  class Point;
  struct Progress;
  struct Mapped;

  void WaitForOther(const Event& event);

  const std::string name_;
  const std::shared_ptr<const CudaStreamShared> shared_;
  const std::shared_ptr<Progress> progress_;  // shared with events, which may outlive the stream
  CudaStreamHandle handle_ = nullptr;
  Event last_;                          // of what was issued last, until more is
  bool last_is_current_ = true;         // nothing was issued since
  uint32_t tickets_ = 0;                // foreign events waited for
  std::unique_ptr<HostStream> waiter_;  // waits for them; made by the first
  std::optional<TaskDelays> delays_;
};

}  // namespace upipe::kernels
