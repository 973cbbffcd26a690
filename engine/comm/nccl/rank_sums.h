// Sums of ranks' contributions on a CUDA device, in ascending rank order and with the bits of
// engine/comm/ordered_sums.h. Each returns when its kernel is on the stream.
#pragma once

#include <cuda_runtime.h>

#include "engine/comm/comm_device.h"

namespace upipe::comm {

void LaunchSum(const OrderedSum& sum, cudaStream_t stream);
void LaunchCombine(const Combination& combination, cudaStream_t stream);

}  // namespace upipe::comm
