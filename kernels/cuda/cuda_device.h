// One NVIDIA GPU as a rank's device: an arena of its memory taken once, one pool of pinned host
// memory, CUDA streams, and host streams with their ops beside them.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/api/device.h"
#include "kernels/cuda/cuda_stream.h"
#include "kernels/cuda/pinned_pool.h"
#include "kernels/cuda/runtime_calls.h"
#include "kernels/host/host_parallel_for.h"

namespace upipe::kernels {

class CudaDevice final : public Device {
 public:
  struct Options {
    int64_t arena_bytes = 0;
    int64_t host_bytes = 0;  // of the pinned pool
    int num_threads = 1;     // loop threads of ops over host memory
    std::vector<int> cpus;   // where threads of the device run; none = anywhere
    int64_t pinned_block_bytes = PinnedPool::kBlockBytes;
    // The test device: results must not change by a bit.
    std::optional<StreamDelay> delay;
    bool poison_freed = false;
  };

  // `ops` run on the device's streams, `host_ops` on its host streams. InvalidArgument for bad
  // counts or CPUs, ResourceExhausted, with what is free, for memory the device or the machine
  // lacks.
  static absl::StatusOr<std::unique_ptr<CudaDevice>> Create(const Options& options,
                                                            std::shared_ptr<CudaRuntime> runtime,
                                                            std::unique_ptr<OpTable> ops,
                                                            std::unique_ptr<OpTable> host_ops);
  // Streams made here must be gone, and buffers freed.
  ~CudaDevice() override;

  std::string name() const override { return "cuda"; }
  std::string hardware() const override;
  Allocator& allocator() override { return allocator_; }
  OpTable& ops() override { return *ops_; }
  std::unique_ptr<Stream> CreateStream(std::string name) override;
  Allocator& host_allocator() override { return host_allocator_; }
  OpTable& host_ops() override { return *host_ops_; }
  std::unique_ptr<Stream> CreateHostStream(std::string name) override;
  // On CUDA streams. Ordinary host memory is not pinned: to and from it the caller may wait.
  void CopyRowsToHost(const RowsCopy& copy, Stream& stream) override;
  void CopyRowsFromHost(const RowsCopy& copy, Stream& stream) override;

  const CudaDeviceFacts& facts() const { return facts_; }

 private:
  class Arena;
  CudaDevice(const Options& options, const CudaDeviceFacts& facts,
             std::shared_ptr<CudaRuntime> runtime, std::unique_ptr<Arena> arena,
             std::unique_ptr<PinnedPool> pool, std::unique_ptr<OpTable> ops,
             std::unique_ptr<OpTable> host_ops);
  void Copy(const RowsCopy& copy, bool to_host, Stream& stream);

  const Options options_;
  const CudaDeviceFacts facts_;
  const std::shared_ptr<CudaRuntime> runtime_;
  const std::unique_ptr<Arena> arena_;
  const std::unique_ptr<PinnedPool> pool_;
  const std::unique_ptr<OpTable> ops_;
  const std::unique_ptr<OpTable> host_ops_;
  const std::shared_ptr<HostParallelFor> parallel_;
  Allocator allocator_;
  Allocator host_allocator_;
  const std::shared_ptr<const CudaStreamShared> shared_;
};

}  // namespace upipe::kernels
