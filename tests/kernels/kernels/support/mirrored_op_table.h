// An op table over host memory that runs every call on a device: tensors are copied there and back,
// with what lies between their rows. So op tests, whose tensors are host memory, run on a GPU.
#pragma once

#include <memory>

#include "kernels/api/device.h"

namespace upipe::kernels::testing {

// Enqueue wants a host stream and gives nothing to the device before that stream comes to it. A
// call fails when a kernel writes beside the tensors it was given, or the device's arena has no
// room for the copies. Scratch is the device's, full of NaN. The device is borrowed; one call at a
// time uses it.
std::unique_ptr<OpTable> CreateMirroredOpTable(Device& device);

}  // namespace upipe::kernels::testing
