// Where a rank is, readable by its worker even when the rank is stopped or dead: one page of shared
// memory the worker maps from a file descriptor the trainer inherits. Written by the trainer's
// compute and communicator threads, and the deadline by the worker; never locked: each field is one
// relaxed atomic, `sequence` grows with every change of the position.
#pragma once

#include <atomic>
#include <cstdint>

#include "absl/status/statusor.h"

namespace upipe {

enum class StepPass : uint32_t {
  kIdle,
  kStarting,
  kEmbed,
  kForward,
  kLoss,
  kBackward,
  kOptimizer,
  kEvaluate,
  kDone,
  kRestoring,
  kCheckpoint
};
inline constexpr int kNumStepPasses = static_cast<int>(StepPass::kCheckpoint) + 1;
const char* NameOf(StepPass pass);

struct PositionPage {
  static constexpr uint32_t kMagic = 0x55504f53;  // "UPOS"
  uint32_t magic = kMagic;
  std::atomic<uint64_t> sequence{0};
  std::atomic<int64_t> step{0};
  std::atomic<uint32_t> pass{0};  // StepPass
  std::atomic<int32_t> layer{-1};
  std::atomic<int32_t> stage{-1};
  std::atomic<int64_t> collective{0};      // number of the last collective entered
  std::atomic<uint32_t> in_collective{0};  // 1 between entering and leaving it
  // Written by the worker only: no step may start at or after this CLOCK_BOOTTIME, 0 = none yet.
  std::atomic<int64_t> deadline_boot_nanos{0};
};
static_assert(std::atomic<int64_t>::is_always_lock_free);

// An anonymous shared page (memfd). Create in the worker, Open from the inherited descriptor in the
// trainer. The mapping lives as long as the object.
class PositionMapping {
 public:
  static absl::StatusOr<PositionMapping> Create();
  static absl::StatusOr<PositionMapping> Open(int fd);
  PositionMapping(PositionMapping&& other) noexcept;
  PositionMapping& operator=(PositionMapping&& other) noexcept;
  ~PositionMapping();
  PositionPage& page() const { return *page_; }
  int fd() const { return fd_; }

 private:
  PositionMapping(int fd, PositionPage* page) : fd_(fd), page_(page) {}
  int fd_ = -1;
  PositionPage* page_ = nullptr;
};

}  // namespace upipe
