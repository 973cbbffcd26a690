// The one pool of pinned host memory of a rank: mapped once, on the device's NUMA node where that
// is known, and registered in blocks, because one registration of hundreds of GiB fails or stalls.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "absl/status/statusor.h"
#include "kernels/cuda/copy_pieces.h"
#include "kernels/cuda/runtime_calls.h"
#include "kernels/host/host_arena.h"

namespace upipe::kernels {

class PinnedPool {
 public:
  static constexpr int64_t kBlockBytes = int64_t{1} << 30;

  struct Options {
    int64_t bytes = 0;
    std::optional<int> numa_node;
    int64_t block_bytes = kBlockBytes;  // a multiple of the page size
  };
  // ResourceExhausted, with how much was pinned, when the machine cannot.
  static absl::StatusOr<std::unique_ptr<PinnedPool>> Create(const Options& options,
                                                            std::shared_ptr<CudaRuntime> runtime);
  ~PinnedPool();
  PinnedPool(const PinnedPool&) = delete;

  const HostArena& arena() const { return *arena_; }
  HostBlocks blocks() const { return {arena_->base(), options_.block_bytes}; }

 private:
  PinnedPool(const Options& options, std::shared_ptr<CudaRuntime> runtime,
             std::unique_ptr<HostArena> arena);
  absl::Status Register();

  const Options options_;
  const std::shared_ptr<CudaRuntime> runtime_;
  const std::unique_ptr<HostArena> arena_;
  int64_t registered_bytes_ = 0;
};

}  // namespace upipe::kernels
