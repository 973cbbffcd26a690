#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "hwy/targets.h"
#include "kernels/cpu/cpu_op_table.h"
#include "kernels/cpu/isa.h"
#include "tests/kernels/kernels/support/tested_backend.h"

namespace upipe::kernels::testing {

OpTable& Tested() {
  static OpTable& table = *CreateCpuOpTable(1).release();
  return table;
}

void ForEachVariant(const std::function<void(const std::string& variant)>& body, DType storage) {
  const auto hold = [&](int64_t target, bool bf16_products) {
    hwy::SetSupportedTargetsForTest(0);
    if (target != HWY_SCALAR && (hwy::SupportedTargets() & target) == 0) return;
    hwy::SetSupportedTargetsForTest(target);
    SetBf16ProductsForTest(bf16_products);
    if (bf16_products && !HasBf16Products()) return;
    const std::string isa =
        absl::StrCat(hwy::TargetName(target), bf16_products ? " with bf16 products" : "");
    SCOPED_TRACE(isa);
    body(isa);
  };
  if (storage == DType::kBFloat16) hold(HWY_AVX3, true);
  for (const int64_t target : {HWY_AVX3, HWY_AVX2, HWY_SSE4, HWY_SCALAR}) hold(target, false);
  hwy::SetSupportedTargetsForTest(0);
  SetBf16ProductsForTest(true);
}

}  // namespace upipe::kernels::testing
