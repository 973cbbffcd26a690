#include "kernels/device_factory.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "kernels/cpu/cpu_op_table.h"
#include "kernels/dry/cuda_stand_in.h"
#include "kernels/host/host_device.h"
#include "kernels/reference/reference_op_table.h"
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

constexpr bool kHasCuda = true;

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
                            std::move(runtime), std::move(ops),
                            CreateCpuOpTable(options.num_threads + kStreamsBesideTheFirst));
}

#else

constexpr bool kHasCuda = false;

absl::StatusOr<std::unique_ptr<Device>> CreateCudaDevice(const DeviceOptions&) {
  return CheckBackend("cuda");
}

#endif

absl::StatusOr<std::unique_ptr<OpTable>> CreateHostOps(const std::string& backend,
                                                       int num_threads) {
  if (backend == "cpu") return CreateCpuOpTable(num_threads);
  if (backend == "reference") return CreateReferenceOpTable();
  return absl::InvalidArgumentError(
      absl::StrCat("unknown backend \"", backend, "\"; there are cpu, reference and cuda"));
}

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
                            std::move(ops));
}

absl::Status CheckBackend(const std::string& backend) {
  if (backend != "cuda") return CreateHostOps(backend, /*num_threads=*/0).status();
  if (kHasCuda) return absl::OkStatus();
  return absl::FailedPreconditionError(
      "this build has no CUDA backend: it plans jobs for cuda and does not run them; build with "
      "-DUPIPE_WITH_CUDA=ON (cmake --preset cuda), or use cpu");
}

absl::StatusOr<std::unique_ptr<DryDevice>> CreateDryDevice(const std::string& backend,
                                                           const std::string& attention_kernel) {
  if (backend == "cuda") {
    UPIPE_ASSIGN_OR_RETURN(std::unique_ptr<OpTable> cuda, CreateCudaStandIn(attention_kernel));
    return std::make_unique<DryDevice>(backend, std::move(cuda), CreateCpuOpTable(0));
  }
  if (attention_kernel != kOwnAttention) {
    return absl::InvalidArgumentError(absl::StrCat("unknown attention kernel \"", attention_kernel,
                                                   "\" of backend ", backend, "; there is ",
                                                   kOwnAttention));
  }
  UPIPE_ASSIGN_OR_RETURN(std::unique_ptr<OpTable> ops, CreateHostOps(backend, /*num_threads=*/0));
  return std::make_unique<DryDevice>(backend, std::move(ops));
}

}  // namespace upipe::kernels
