// What a matrix product is to cuBLASLt: column-major calls, keys of its plans. Pure; no CUDA
// headers.
#pragma once

#include <compare>
#include <cstdint>
#include <vector>

#include "kernels/api/op_params.h"

namespace upipe::kernels {

// Everything that the choice of an algorithm depends on. cuBLASLt thinks in columns, and a
// row-major matrix is its transpose there, so c = op(a) op(b) is asked for as c' = op(b)' op(a)':
// `first` is b.
struct MatmulKey {
  int64_t rows = 0;     // of c': columns of c
  int64_t columns = 0;  // of c': rows of c
  int64_t depth = 0;
  bool first_transposed = false;   // stored [depth, rows] in columns, not [rows, depth]
  bool second_transposed = false;  // stored [columns, depth]
  int64_t first_stride = 0;        // leading dimensions, elements
  int64_t second_stride = 0;
  int64_t out_stride = 0;
  DType storage = DType::kFloat32;  // of both operands and the bias
  DType out = DType::kFloat32;
  bool bias = false;  // added by the product itself
  // Powers of two up to 16 that addresses and rows are multiples of, bytes.
  int first_alignment = 16;
  int second_alignment = 16;
  int out_alignment = 16;
  int64_t workspace_bytes = 0;  // it may use

  auto operator<=>(const MatmulKey&) const = default;
};

struct MatmulCall {
  MatmulKey key;
  const void* first = nullptr;
  const void* second = nullptr;
  void* out = nullptr;
  const void* bias = nullptr;
  float alpha = 1;
  float beta = 0;
};

struct MatmulCalls {
  std::vector<MatmulCall> calls;  // in this order
  // Zeros to begin the workspace with: the operands of a product of no depth, which only scales.
  int64_t zero_bytes = 0;
  // The bias is added by a copy of its own afterwards: cuBLASLt takes only one of c's type.
  bool bias_after = false;
};

// The scratch of every product, and its largest operand in one call, elements: kernels with 32-bit
// offsets never see more.
inline constexpr int64_t kMatmulWorkspaceBytes = int64_t{32} << 20;
inline constexpr int64_t kMatmulElementsMax = int64_t{1} << 31;

// Cut so that no operand passes kMatmulElementsMax, where rows of c, or the depth of a transposed
// `a` into an fp32 c, can be cut. `workspace` is where the zeros go.
MatmulCalls CallsOf(const MatmulParams& p, void* workspace);

}  // namespace upipe::kernels
