// One anonymous mapping that never grows: a CPU rank's device memory, or its host memory.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "kernels/host/memory_range.h"

namespace upipe::kernels {

class HostArena {
 public:
  // Reserves addresses only; the kernel gives pages when they are first written, or now when
  // `prefault`. ResourceExhausted when the machine cannot.
  static absl::StatusOr<std::unique_ptr<HostArena>> Map(int64_t bytes, bool prefault);
  ~HostArena();
  HostArena(const HostArena&) = delete;

  void* base() const { return base_; }  // page aligned
  int64_t bytes() const { return bytes_; }
  MemoryRange range() const { return {base_, bytes_}; }

 private:
  HostArena(void* base, int64_t bytes) : base_(base), bytes_(bytes) {}

  void* base_;
  int64_t bytes_;
};

}  // namespace upipe::kernels
