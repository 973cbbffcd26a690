// Products of bf16 blocks by the processor's own instructions (AVX-512 BF16): both operands are
// packed into panels that lie in cache, sums are fp32. Nothing is allocated.
#pragma once

#include <cstdint>

#include "common/rounding.h"

namespace upipe::kernels::cpu {

// c [rows, columns] = alpha * op(a) op(b) + beta * c in fp32; c is not read when beta is 0. op(a)
// is [rows, depth], stored [depth, rows] where transposed, op(b) [depth, columns] likewise. Strides
// are in elements.
struct PairBlock {
  int64_t rows = 0, columns = 0, depth = 0;
  const uint16_t* a = nullptr;
  int64_t a_stride = 0;
  bool transpose_a = false;
  const uint16_t* b = nullptr;
  int64_t b_stride = 0;
  bool transpose_b = false;
  float alpha = 1, beta = 0;
  float* c = nullptr;
  int64_t c_stride = 0;
};

// Sides are packed in whole panels, the depth in whole pairs.
constexpr int64_t kPairPanel = 32;
constexpr int64_t PairBlockBytes(int64_t rows, int64_t columns, int64_t depth) {
  return (RoundUp(rows, kPairPanel) + RoundUp(columns, kPairPanel)) * RoundUp(depth, 2) *
         int64_t{sizeof(uint16_t)};
}

// Only where HasBf16Products. The scratch has PairBlockBytes, aligned to 64 bytes. A sum adds pairs
// in ascending order, whatever the sides of the block.
void MultiplyPairBlock(const PairBlock& block, void* scratch);

}  // namespace upipe::kernels::cpu
