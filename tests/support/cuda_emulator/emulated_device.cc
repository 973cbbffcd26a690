#include "tests/support/cuda_emulator/emulated_device.h"

#include <utility>

#include "kernels/cpu/cpu_op_table.h"
#include "kernels/host/host_device.h"
#include "tests/support/cuda_emulator/emulated_op_table.h"

namespace upipe::kernels {

absl::StatusOr<std::unique_ptr<Device>> CreateEmulatedCudaDevice(const DeviceOptions& options) {
  return HostDevice::Create({.name = "emulated cuda",
                             .arena_bytes = options.arena_bytes,
                             .host_bytes = options.host_bytes,
                             .num_threads = options.num_threads,
                             .delay = options.test_delay,
                             .poison_freed = options.test_poison_freed},
                            CreateEmulatedCudaOpTable(), CreateCpuOpTable(options.num_threads + 1));
}

}  // namespace upipe::kernels
