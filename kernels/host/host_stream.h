// A stream that is one thread: tasks run in order on it, events are points it passes.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <variant>
#include <vector>

#include "absl/time/time.h"
#include "kernels/api/stream.h"

namespace upipe::kernels {

// Test device: before each task the stream sleeps a random time that depends on seed and name.
struct StreamDelay {
  uint64_t seed = 0;
  absl::Duration longest = absl::Microseconds(200);
};

// The delays of one stream, in the order of its tasks.
class TaskDelays {
 public:
  TaskDelays(const StreamDelay& delay, const std::string& stream_name);
  absl::Duration Next();

 private:
  const int64_t longest_nanoseconds_;
  std::mt19937_64 random_;
};

class HostStream final : public Stream {
 public:
  // Submit and Wait block while this many tasks are pending.
  static constexpr size_t kMaxPending = 4096;

  // `parallel` is what tasks get in their ExecContext. The thread runs on `cpus`, if any are named.
  HostStream(std::string name, std::shared_ptr<ParallelFor> parallel,
             std::optional<StreamDelay> delay, const std::vector<int>& cpus);
  ~HostStream() override;

  const std::string& name() const override { return name_; }
  void Submit(Task task) override;
  Event Record() override;
  // An event that completed with an error puts this stream in that error.
  void Wait(const Event& event) override;

 private:
  using Entry = std::variant<Task, Event>;  // run it, or wait for it
  class PointState;
  struct Progress;

  void Push(Entry entry);
  void Loop();
  absl::Status Execute(Entry& entry, bool in_error);

  const std::string name_;
  const std::shared_ptr<ParallelFor> parallel_;
  const std::shared_ptr<Progress> progress_;  // shared with events, which may outlive the stream
  std::optional<TaskDelays> delays_;
  uint64_t submitted_ = 0;  // entries pushed; owned by the submitting host thread
  std::thread thread_;
};

}  // namespace upipe::kernels
