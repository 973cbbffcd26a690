// How a kernel tells the host that data are bad; it goes on without them.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/cuda/fault.h"

namespace upipe::kernels::cuda {

// The first op that reports stays; of its rows the lowest. Rows and vocabularies are below 2^31.
__device__ inline void ReportFault(int64_t* fault, FaultKind kind, int64_t vocab, int64_t row,
                                   int32_t value) {
  using Word = unsigned long long;
  const Word mine = static_cast<Word>(kind) << 32 | static_cast<Word>(vocab);
  const Word before = atomicCAS(reinterpret_cast<Word*>(fault + 1), Word{0}, mine);
  if (before != 0 && before != mine) return;
  const int64_t where = row << 32 | static_cast<int64_t>(static_cast<uint32_t>(value));
  atomicMin(reinterpret_cast<long long*>(fault), static_cast<long long>(where));
}

}  // namespace upipe::kernels::cuda
