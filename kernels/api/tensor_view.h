// A non-owning strided view of up to three dims. The last dim is contiguous unless said otherwise.
// Offsets are 64-bit everywhere. On the dry backend `data` is an address that is never
// dereferenced.
#pragma once

#include <array>
#include <cstdint>

#include "kernels/api/dtype.h"

namespace upipe::kernels {

struct TensorView {
  void* data = nullptr;
  DType dtype = DType::kFloat32;
  int rank = 0;                        // number of dims in use, 1 to 3; 0 = absent
  std::array<int64_t, 3> shape = {};   // elements
  std::array<int64_t, 3> stride = {};  // elements

  static TensorView Vector(void* data, DType dtype, int64_t n) {
    return {data, dtype, 1, {n, 1, 1}, {1, 0, 0}};
  }
  // [rows, cols], rows `row_stride` elements apart (default: cols).
  static TensorView Matrix(void* data, DType dtype, int64_t rows, int64_t cols,
                           int64_t row_stride = 0) {
    return {data, dtype, 2, {rows, cols, 1}, {row_stride > 0 ? row_stride : cols, 1, 0}};
  }
  // [n0, n1, n2] with explicit strides of the first two dims.
  static TensorView Tensor3(void* data, DType dtype, std::array<int64_t, 3> shape, int64_t stride0,
                            int64_t stride1) {
    return {data, dtype, 3, shape, {stride0, stride1, 1}};
  }

  bool present() const { return rank > 0; }
  int64_t num_elements() const { return rank == 0 ? 0 : shape[0] * shape[1] * shape[2]; }
  int64_t num_bytes() const { return num_elements() * SizeOf(dtype); }
  // True when the elements fill one gapless block in row-major order.
  bool contiguous() const {
    int64_t expected = 1;
    for (int dim = rank - 1; dim >= 0; --dim) {
      if (shape[dim] != 1 && stride[dim] != expected) return false;
      expected *= shape[dim];
    }
    return true;
  }
  // Address of element (i, j, k).
  void* At(int64_t i, int64_t j = 0, int64_t k = 0) const {
    return static_cast<char*>(data) +
           (i * stride[0] + j * stride[1] + k * stride[2]) * SizeOf(dtype);
  }
  // Rows [begin, begin + count) of the first dim.
  TensorView Rows(int64_t begin, int64_t count) const {
    TensorView view = *this;
    view.data = At(begin);
    view.shape[0] = count;
    return view;
  }
  // The same elements as a rank-3 view: [cols] -> [1, 1, cols], [rows, cols] -> [rows, 1, cols].
  TensorView AsTensor3() const {
    if (rank == 3) return *this;
    if (rank == 1) return Tensor3(data, dtype, {1, 1, shape[0]}, shape[0], shape[0]);
    return Tensor3(data, dtype, {shape[0], 1, shape[1]}, stride[0], shape[1]);
  }
  template <typename T>
  T* as() const {
    return static_cast<T*>(data);
  }
};

}  // namespace upipe::kernels
