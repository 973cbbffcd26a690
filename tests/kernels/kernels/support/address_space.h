// Address space without memory behind it until it is touched: tensors whose elements lie billions
// apart, and rows that nobody may read.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/api/tensor_view.h"

namespace upipe::kernels::testing {

// A reserved range; pages are zero when first touched. Access is all or none.
class AddressSpace {
 public:
  enum class Access { kOpen, kForbidden };
  AddressSpace(int64_t bytes, Access access);
  ~AddressSpace();
  AddressSpace(const AddressSpace&) = delete;
  AddressSpace& operator=(const AddressSpace&) = delete;

  char* data() const { return data_; }
  // Bytes [begin, end) of the range, whole pages, from now on.
  void Set(int64_t begin, int64_t end, Access access);

 private:
  char* data_;
  int64_t bytes_;
};

inline constexpr int64_t kPageBytes = 4096;

// Makes strided copies of tensors in address spaces of their own.
class FarMemory {
 public:
  // The same elements, `stride` apart along `dim`, not the last; along the others as near as can
  // be.
  TensorView Copy(const TensorView& view, int dim, int64_t stride);
  // A rank-3 tensor of which dim 0 is one page apart and only rows [begin, end) may be touched.
  TensorView Guarded(const TensorView& view, int64_t begin, int64_t end);
  // A tensor of this shape that may not be touched at all.
  TensorView Forbidden(const TensorView& view);

 private:
  std::vector<std::unique_ptr<AddressSpace>> spaces_;
};

}  // namespace upipe::kernels::testing
