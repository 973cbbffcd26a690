// Devices by backend name: with backends.h the one place that knows which backends this build has.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/api/device.h"
#include "kernels/api/scratch_table.h"
#include "kernels/backends.h"
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
  ScratchTable measured;  // scratch beyond what the backend's formulas say
  // The test device: seeded delays before tasks, freed blocks filled with NaN.
  std::optional<StreamDelay> test_delay;
  bool test_poison_freed = false;
};

// InvalidArgument for an unknown backend or bad counts, FailedPrecondition for a backend this build
// or this machine lacks, ResourceExhausted when an arena cannot be had.
absl::StatusOr<std::unique_ptr<Device>> CreateDevice(const DeviceOptions& options);

}  // namespace upipe::kernels
