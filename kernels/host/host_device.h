// A share of this machine's CPUs as a device: an arena for each of device and host memory, loop
// threads, streams that are threads, and the injected ops.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/api/device.h"
#include "kernels/host/host_arena.h"
#include "kernels/host/host_parallel_for.h"
#include "kernels/host/host_stream.h"

namespace upipe::kernels {

class HostDevice final : public Device {
 public:
  struct Options {
    std::string name = "cpu";
    int64_t arena_bytes = 0;
    int64_t host_bytes = 0;  // of the second arena
    bool prefault = false;
    int num_threads = 1;
    std::vector<int> cpus;  // where threads of the device run; none = anywhere
    // The test device: results must not change by a bit.
    std::optional<StreamDelay> delay;
    bool poison_freed = false;
  };

  // `ops` run on the device's streams, `host_ops` on its host streams; the same where there are
  // none. InvalidArgument for bad counts or CPUs, ResourceExhausted when an arena cannot be mapped.
  static absl::StatusOr<std::unique_ptr<HostDevice>> Create(
      const Options& options, std::unique_ptr<OpTable> ops,
      std::unique_ptr<OpTable> host_ops = nullptr);
  // Streams made here must be gone, and buffers freed.
  ~HostDevice() override;

  std::string name() const override { return options_.name; }
  Allocator& allocator() override { return allocator_; }
  OpTable& ops() override { return *ops_; }
  std::unique_ptr<Stream> CreateStream(std::string name) override;
  Allocator& host_allocator() override { return host_allocator_; }
  OpTable& host_ops() override { return host_ops_ != nullptr ? *host_ops_ : *ops_; }
  std::unique_ptr<Stream> CreateHostStream(std::string name) override;
  void CopyRowsToHost(const RowsCopy& copy, Stream& stream) override;
  void CopyRowsFromHost(const RowsCopy& copy, Stream& stream) override;

 private:
  HostDevice(const Options& options, std::unique_ptr<OpTable> ops,
             std::unique_ptr<OpTable> host_ops, std::unique_ptr<HostArena> arena,
             std::unique_ptr<HostArena> host_arena);

  const Options options_;
  const std::unique_ptr<OpTable> ops_;
  const std::unique_ptr<OpTable> host_ops_;
  const std::unique_ptr<HostArena> arena_;
  const std::unique_ptr<HostArena> host_arena_;
  const std::shared_ptr<HostParallelFor> parallel_;  // each stream holds a share
  Allocator allocator_;
  Allocator host_allocator_;
};

}  // namespace upipe::kernels
