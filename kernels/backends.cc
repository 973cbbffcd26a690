#include "kernels/backends.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "kernels/cpu/cpu_op_table.h"
#include "kernels/dry/cuda_stand_in.h"
#include "kernels/reference/reference_op_table.h"

namespace upipe::kernels {
namespace {

#ifdef UPIPE_WITH_CUDA
constexpr bool kHasCuda = true;
#else
constexpr bool kHasCuda = false;
#endif

}  // namespace

absl::StatusOr<std::unique_ptr<OpTable>> CreateHostOps(const std::string& backend,
                                                       int num_threads) {
  if (backend == "cpu") return CreateCpuOpTable(num_threads);
  if (backend == "reference") return CreateReferenceOpTable();
  return absl::InvalidArgumentError(
      absl::StrCat("unknown backend \"", backend, "\"; there are cpu, reference and cuda"));
}

absl::Status CheckBackend(const std::string& backend) {
  if (backend != "cuda") return CreateHostOps(backend, /*num_threads=*/0).status();
  if (kHasCuda) return absl::OkStatus();
  return absl::FailedPreconditionError(
      "this build has no CUDA backend: it plans jobs for cuda and does not run them; build with "
      "-DUPIPE_WITH_CUDA=ON (cmake --preset cuda), or use cpu");
}

absl::StatusOr<std::unique_ptr<DryDevice>> CreateDryDevice(const std::string& backend,
                                                           const std::string& attention_kernel,
                                                           const ScratchTable& measured) {
  if (backend == "cuda") {
    UPIPE_ASSIGN_OR_RETURN(std::unique_ptr<OpTable> cuda, CreateCudaStandIn(attention_kernel));
    return std::make_unique<DryDevice>(backend, WithMeasuredScratch(std::move(cuda), measured),
                                       CreateCpuOpTable(0));
  }
  if (attention_kernel != kOwnAttention) {
    return absl::InvalidArgumentError(absl::StrCat("unknown attention kernel \"", attention_kernel,
                                                   "\" of backend ", backend, "; there is ",
                                                   kOwnAttention));
  }
  UPIPE_ASSIGN_OR_RETURN(std::unique_ptr<OpTable> ops, CreateHostOps(backend, /*num_threads=*/0));
  return std::make_unique<DryDevice>(backend, WithMeasuredScratch(std::move(ops), measured));
}

}  // namespace upipe::kernels
