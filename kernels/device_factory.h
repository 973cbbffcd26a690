// Devices by backend name: the one place that knows which backends this build has.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/api/device.h"
#include "kernels/dry/dry_device.h"
#include "kernels/host/host_stream.h"

namespace upipe::kernels {

struct DeviceOptions {
  std::string backend = "cpu";  // cpu, reference or cuda
  int64_t arena_bytes = 0;      // the plan's high-water mark
  int64_t host_bytes = 0;       // that of the pool of host memory
  bool prefault = false;        // take all pages at start
  int num_threads = 1;          // loop threads of the rank
  std::vector<int> cpus;        // where its threads run; none = anywhere
  // cuda: which of the GPUs this process sees, and what attention runs on, as the plan counted its
  // scratch (kernels/cuda/workspace_bytes.h).
  int gpu = 0;
  std::string attention_kernel = "own";
  // The test device: seeded delays before tasks, freed blocks filled with NaN.
  std::optional<StreamDelay> test_delay;
  bool test_poison_freed = false;
};

// InvalidArgument for an unknown backend or bad counts, FailedPrecondition for a backend this build
// or this machine lacks, ResourceExhausted when an arena cannot be had.
absl::StatusOr<std::unique_ptr<Device>> CreateDevice(const DeviceOptions& options);

// The same errors about the backend of this build alone, without making anything.
absl::Status CheckBackend(const std::string& backend);

// The dry device standing in for `backend`, cuda included, whose ops on host memory are the cpu
// backend's. InvalidArgument for an unknown backend, or an attention kernel it does not have:
// "own" or, for cuda, "cudnn 9.19" (kernels/dry/cuda_stand_in.h).
absl::StatusOr<std::unique_ptr<DryDevice>> CreateDryDevice(
    const std::string& backend, const std::string& attention_kernel = "own");

}  // namespace upipe::kernels
