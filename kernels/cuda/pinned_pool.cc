#include "kernels/cuda/pinned_pool.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "common/units.h"
#include "kernels/cuda/numa_node.h"

namespace upipe::kernels {

absl::StatusOr<std::unique_ptr<PinnedPool>> PinnedPool::Create(
    const Options& options, std::shared_ptr<CudaRuntime> runtime) {
  UPIPE_ASSIGN_OR_RETURN(auto arena, HostArena::Map(options.bytes, /*prefault=*/false));
  if (options.numa_node) PreferNumaNode(arena->base(), options.bytes, *options.numa_node);
  std::unique_ptr<PinnedPool> pool(new PinnedPool(options, std::move(runtime), std::move(arena)));
  UPIPE_RETURN_IF_ERROR(pool->Register());
  return pool;
}

PinnedPool::PinnedPool(const Options& options, std::shared_ptr<CudaRuntime> runtime,
                       std::unique_ptr<HostArena> arena)
    : options_(options), runtime_(std::move(runtime)), arena_(std::move(arena)) {}

absl::Status PinnedPool::Register() {
  char* const base = static_cast<char*>(arena_->base());
  while (registered_bytes_ < options_.bytes) {
    const int64_t bytes = std::min(options_.block_bytes, options_.bytes - registered_bytes_);
    if (const absl::Status status = runtime_->RegisterHost(base + registered_bytes_, bytes);
        !status.ok()) {
      return absl::Status(
          status.code(),
          absl::StrCat("pinning ", FormatBytes(options_.bytes), " of host memory stopped after ",
                       FormatBytes(registered_bytes_), ": ", status.message(),
                       "; give the rank more host memory, or keep less of the step there"));
    }
    registered_bytes_ += bytes;
  }
  return absl::OkStatus();
}

PinnedPool::~PinnedPool() {
  char* const base = static_cast<char*>(arena_->base());
  for (int64_t offset = 0; offset < registered_bytes_; offset += options_.block_bytes) {
    runtime_->UnregisterHost(base + offset);
  }
}

}  // namespace upipe::kernels
