#include "tests/kernels/kernels/support/tested_mirrored.h"

#include "common/check.h"
#include "tests/kernels/kernels/support/mirrored_op_table.h"
#include "tests/kernels/kernels/support/tested_backend.h"

namespace upipe::kernels::testing {
namespace {

OpTable* tested = nullptr;

}  // namespace

void SetTestedDevice(Device& device) { tested = CreateMirroredOpTable(device).release(); }

OpTable& Tested() {
  UPIPE_CHECK(tested != nullptr) << "a test before SetTestedDevice";
  return *tested;
}

void ForEachVariant(const std::function<void(const std::string& variant)>& body, DType) {
  body("device");
}

}  // namespace upipe::kernels::testing
