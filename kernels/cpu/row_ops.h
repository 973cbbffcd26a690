// Operations on one row of contiguous numbers that several ops share. Sums are fp32 and rounded
// once when they are stored as bf16.
#pragma once

#include <cstdint>

#include "kernels/api/dtype.h"

namespace upipe::kernels::cpu {

// to[i] = from[i], or to[i] += from[i]; fp32 or bf16 each.
void CopyRow(const void* from, DType from_type, void* to, DType to_type, int64_t n,
             bool accumulate);

// What becomes of one row c of a matrix product: c[i] = product[i] + beta * c[i] + bias[i], without
// the terms whose pointer is null; beta = 0 ignores what c held.
struct ProductRow {
  const float* product = nullptr;
  float beta = 0;
  const void* bias = nullptr;
  DType bias_type = DType::kFloat32;
  void* c = nullptr;
  DType c_type = DType::kFloat32;
};
void FinishProductRow(const ProductRow& row, int64_t n);

}  // namespace upipe::kernels::cpu
