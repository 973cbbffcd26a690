#include "kernels/device_factory.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "kernels/cpu/cpu_op_table.h"
#include "kernels/host/host_device.h"
#ifdef UPIPE_WITH_CUDA
#include "kernels/cuda/cuda_device.h"
#include "kernels/cuda/cuda_op_table.h"
#include "kernels/cuda/cudart_calls.h"
#endif

namespace upipe::kernels {
namespace {

// Streams that may be inside a product while another has the loop threads.
constexpr int kStreamsBesideTheFirst = 1;

#ifdef UPIPE_WITH_CUDA

absl::StatusOr<std::unique_ptr<Device>> CreateCudaDevice(const DeviceOptions& options) {
  UPIPE_ASSIGN_OR_RETURN(std::shared_ptr<CudaRuntime> runtime, OpenCudaRuntime(options.gpu));
  UPIPE_ASSIGN_OR_RETURN(const CudaDeviceFacts facts, runtime->Describe());
  UPIPE_ASSIGN_OR_RETURN(auto ops, CreateCudaOpTable({.attention_kernel = options.attention_kernel,
                                                      .multiprocessors = facts.multiprocessors}));
  return CudaDevice::Create({.arena_bytes = options.arena_bytes,
                             .host_bytes = options.host_bytes,
                             .num_threads = options.num_threads,
                             .cpus = options.cpus,
                             .delay = options.test_delay,
                             .poison_freed = options.test_poison_freed},
                            std::move(runtime),
                            WithMeasuredScratch(std::move(ops), options.measured),
                            CreateCpuOpTable(options.num_threads + kStreamsBesideTheFirst));
}

#else

absl::StatusOr<std::unique_ptr<Device>> CreateCudaDevice(const DeviceOptions&) {
  return CheckBackend("cuda");
}

#endif

}  // namespace

absl::StatusOr<std::unique_ptr<Device>> CreateDevice(const DeviceOptions& options) {
  if (options.backend == "cuda") return CreateCudaDevice(options);
  UPIPE_ASSIGN_OR_RETURN(
      std::unique_ptr<OpTable> ops,
      CreateHostOps(options.backend, options.num_threads + kStreamsBesideTheFirst));
  return HostDevice::Create({.name = options.backend,
                             .arena_bytes = options.arena_bytes,
                             .host_bytes = options.host_bytes,
                             .prefault = options.prefault,
                             .num_threads = options.num_threads,
                             .cpus = options.cpus,
                             .delay = options.test_delay,
                             .poison_freed = options.test_poison_freed},
                            WithMeasuredScratch(std::move(ops), options.measured));
}

}  // namespace upipe::kernels
