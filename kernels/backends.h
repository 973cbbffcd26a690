// Backends by name, as far as nothing of a GPU's libraries is needed: whether this build has one,
// and the dry devices that stand in for them. Programs that only plan link no more than this.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "kernels/api/op_table.h"
#include "kernels/api/scratch_table.h"
#include "kernels/dry/dry_device.h"

namespace upipe::kernels {

// InvalidArgument for an unknown backend, FailedPrecondition for one this build lacks.
absl::Status CheckBackend(const std::string& backend);

// The dry device standing in for `backend`, cuda included, whose ops on host memory are the cpu
// backend's, with the scratch that was `measured`. InvalidArgument for an unknown backend, or an
// attention kernel it does not have: "own" or, for cuda, one of cuDNN's
// (kernels/dry/cuda_stand_in.h).
absl::StatusOr<std::unique_ptr<DryDevice>> CreateDryDevice(
    const std::string& backend, const std::string& attention_kernel = "own",
    const ScratchTable& measured = {});

// Ops over host memory of the backends cpu and reference, for `num_threads` callers at once.
absl::StatusOr<std::unique_ptr<OpTable>> CreateHostOps(const std::string& backend, int num_threads);

}  // namespace upipe::kernels
