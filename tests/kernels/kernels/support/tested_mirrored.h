// Op tests over a device: with tested_mirrored.cc linked, the program says on which.
#pragma once

#include "kernels/api/device.h"

namespace upipe::kernels::testing {

// Before the first test. The device outlives them all.
void SetTestedDevice(Device& device);

}  // namespace upipe::kernels::testing
