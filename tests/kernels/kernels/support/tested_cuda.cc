#include "tests/kernels/kernels/support/tested_backend.h"
#include "tests/support/cuda_emulator/emulated_op_table.h"

namespace upipe::kernels::testing {

OpTable& Tested() {
  static OpTable& table = *CreateEmulatedCudaOpTable().release();
  return table;
}

void ForEachVariant(const std::function<void(const std::string& variant)>& body, DType) {
  body("emulated");
}

}  // namespace upipe::kernels::testing
