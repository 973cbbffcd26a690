// Gradients of the reference by central differences.
#pragma once

#include <functional>

#include "kernels/api/tensor_view.h"

namespace upipe::kernels::testing {

// Expects `gradient` to equal d(loss)/d(x) to 1e-3 of its norm: fp32 outputs under a step of 2^-6
// leave about 1e-4.
void ExpectGradient(const TensorView& x, const TensorView& gradient,
                    const std::function<double()>& loss);

// sum of a * b over all elements: a loss whose gradient at b is a.
double WeightedSum(const TensorView& a, const TensorView& b);

}  // namespace upipe::kernels::testing
