// Sums of ranks' contributions in ascending rank order, on the host: the arithmetic that every
// communicator's results have the bits of.
#pragma once

#include <cmath>
#include <cstdint>

#include "engine/comm/comm_device.h"
#include "engine/comm/communicator.h"

namespace upipe::comm {

// sum[i] += values[i]. In groups of a fixed length, which the compiler turns into vector
// instructions at -O2.
inline void AddTo(float* __restrict sum, const float* __restrict values, int64_t count) {
  constexpr int64_t kGroup = 16;
  int64_t i = 0;
  for (; i + kGroup <= count; i += kGroup) {
    for (int64_t j = 0; j < kGroup; ++j) sum[i + j] += values[i + j];
  }
  for (; i < count; ++i) sum[i] += values[i];
}

// A value that is not a number wins every maximum, so that it is seen.
inline double CombineTwo(ReduceOp op, double a, double b) {
  if (op == ReduceOp::kSum) return a + b;
  return std::isnan(b) || b > a ? b : a;
}

inline void CombineOnHost(const Combination& c) {
  for (int64_t i = 0; i < c.count; ++i) {
    double result = c.gathered[i];
    for (int peer = 1; peer < c.num_ranks; ++peer) {
      result = CombineTwo(c.op, result, c.gathered[peer * c.count + i]);
    }
    c.values[i] = result;
  }
}

}  // namespace upipe::comm
