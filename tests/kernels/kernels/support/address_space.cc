#include "tests/kernels/kernels/support/address_space.h"

#include <sys/mman.h>

#include "common/check.h"
#include "tests/kernels/kernels/support/memory.h"

namespace upipe::kernels::testing {
namespace {

int Protection(AddressSpace::Access access) {
  return access == AddressSpace::Access::kOpen ? PROT_READ | PROT_WRITE : PROT_NONE;
}

// Bytes from the first element to the end of the last.
int64_t Extent(const TensorView& view) {
  int64_t last = 0;
  for (int dim = 0; dim < view.rank; ++dim) last += (view.shape[dim] - 1) * view.stride[dim];
  return (last + 1) * SizeOf(view.dtype);
}

}  // namespace

AddressSpace::AddressSpace(int64_t bytes, Access access) : bytes_(bytes) {
  void* base =
      mmap(nullptr, bytes, Protection(access), MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  UPIPE_CHECK(base != MAP_FAILED);
  // Huge pages would make every far row cost 2 MiB.
  madvise(base, bytes, MADV_NOHUGEPAGE);
  data_ = static_cast<char*>(base);
}

AddressSpace::~AddressSpace() { munmap(data_, bytes_); }

void AddressSpace::Set(int64_t begin, int64_t end, Access access) {
  if (begin >= end) return;
  UPIPE_CHECK(mprotect(data_ + begin, end - begin, Protection(access)) == 0);
}

TensorView FarMemory::Copy(const TensorView& view, int dim, int64_t stride) {
  UPIPE_CHECK(dim < view.rank - 1);
  TensorView far = view;
  if (view.rank == 3) far.stride[0] = far.stride[1] = view.shape[2];
  far.stride[dim] = stride;
  spaces_.push_back(std::make_unique<AddressSpace>(Extent(far), AddressSpace::Access::kOpen));
  far.data = spaces_.back()->data();
  CopyElements(view, far);
  return far;
}

TensorView FarMemory::Guarded(const TensorView& view, int64_t begin, int64_t end) {
  TensorView guarded = view;
  guarded.stride = {kPageBytes / SizeOf(view.dtype), view.shape[2], 1};
  UPIPE_CHECK(view.rank == 3 && view.shape[1] * view.shape[2] <= guarded.stride[0]);
  auto space =
      std::make_unique<AddressSpace>(view.shape[0] * kPageBytes, AddressSpace::Access::kForbidden);
  space->Set(begin * kPageBytes, end * kPageBytes, AddressSpace::Access::kOpen);
  guarded.data = space->data();
  if (begin < end) CopyElements(view.Rows(begin, end - begin), guarded.Rows(begin, end - begin));
  spaces_.push_back(std::move(space));
  return guarded;
}

TensorView FarMemory::Forbidden(const TensorView& view) {
  TensorView forbidden = view;
  spaces_.push_back(std::make_unique<AddressSpace>(Extent(view), AddressSpace::Access::kForbidden));
  forbidden.data = spaces_.back()->data();
  return forbidden;
}

}  // namespace upipe::kernels::testing
