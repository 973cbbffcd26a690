// The memory OpenBLAS packs matrices into. It maps a buffer (128 MiB of addresses) whenever more
// threads are inside a product than ever before in the process; here they are mapped ahead, so that
// no step is the first to need one.
#pragma once

namespace upipe::kernels::cpu {

// While it lives, `callers` threads more than all others that live may be inside products without a
// new mapping. Thread-safe.
class BlasBuffers {
 public:
  explicit BlasBuffers(int callers);
  ~BlasBuffers();
  BlasBuffers(const BlasBuffers&) = delete;

 private:
  const int callers_;
};

}  // namespace upipe::kernels::cpu
