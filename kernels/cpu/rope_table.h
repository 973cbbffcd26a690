// Where the rotary embedding keeps its frequencies and the angles of the first few positions.
#pragma once

#include <cstdint>

#include "kernels/api/op_params.h"

namespace upipe::kernels::cpu {

// A view of the op's workspace: angles per position [head_dim/2] (inv_freq, negative for the
// inverse rotation), then the cosines and the sines of 0 .. kStride - 1 times them. Rows are padded
// to whole vectors of any target.
struct RopeTable {
  static constexpr int64_t kStride = 32;  // positions that share a base; a power of two

  RopeTable(const RopeParams& p, void* workspace)
      : half(p.src.shape[2] / 2),
        padded((half + 7) / 8 * 8),
        frequencies(static_cast<double*>(workspace)) {}

  int64_t bytes() const {
    return (1 + 2 * kStride) * padded * static_cast<int64_t>(sizeof(double));
  }
  double* cosines(int64_t rest) const { return frequencies + (1 + 2 * rest) * padded; }
  double* sines(int64_t rest) const { return cosines(rest) + padded; }

  int64_t half, padded;
  double* frequencies;
};

}  // namespace upipe::kernels::cpu
