#include "gtest/gtest.h"
#include "tests/kernels/kernels/support/op_check.h"

namespace upipe::kernels::testing {
namespace {

TEST(Fill, EveryTypeAndRank) {
  for (const DType dtype :
       {DType::kFloat32, DType::kBFloat16, DType::kFloat64, DType::kInt32, DType::kInt64}) {
    for (const std::vector<int64_t>& dims :
         {std::vector<int64_t>{40000}, {1}, {0}, {5, 7}, {3, 4, 5}}) {
      for (OpTable* ops : {&Reference(), &Tested()}) {
        Memory memory(1);
        const FillParams p = {memory.Output("dst", {dims, dims.size() > 1 ? 3 : 0}, dtype), -3};
        ASSERT_EQ(RunCall(*ops, p, memory, 3), absl::OkStatus());
        const std::vector<double> values = memory.Results()[0].values;
        for (const double value : values) ASSERT_EQ(value, -3);
      }
    }
  }
}

}  // namespace
}  // namespace upipe::kernels::testing
