// The second step of sums over rows: partial rows, one per block of rows, become one.
#pragma once

#include <cstdint>

#include "kernels/cuda/cuda_kernels.h"

namespace upipe::kernels::cuda {

// out[0:columns] += the sum of num_partials rows of `partials`, which lie together.
void AddPartialRows(const float* partials, int64_t num_partials, int64_t columns, float* out,
                    const LaunchContext& context);

}  // namespace upipe::kernels::cuda
