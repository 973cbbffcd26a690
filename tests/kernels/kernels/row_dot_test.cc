#include "gtest/gtest.h"
#include "tests/kernels/kernels/support/op_check.h"

namespace upipe::kernels::testing {
namespace {

TEST(RowDot, WithinTheBound) {
  for (const int64_t head_dim : {1, 5, 64, 131}) {
    for (const int64_t tokens : {0, 1, 50}) {
      ExpectMatchesReference(
          [&](Memory& memory) {
            return RowDotParams{memory.Input({{tokens, 3, head_dim}, 2}),
                                memory.Input({{tokens, 3, head_dim}}),
                                memory.Output("out", {{tokens, 3}, 4}, kW)};
          },
          8);
    }
  }
}

TEST(RowDot, OfOnesCounts) {
  for (OpTable* ops : {&Reference(), &Tested()}) {
    Memory memory(1);
    const TensorView a = memory.InOut("a", {{2, 1, 19}}), out = memory.Output("out", {{2, 1}});
    ASSERT_EQ(RunCall(*ops, FillParams{a, 1}, memory), absl::OkStatus());
    ASSERT_EQ(RunCall(*ops, RowDotParams{a, a, out}, memory), absl::OkStatus());
    EXPECT_EQ(GetElement(out, 1, 0), 19);
  }
}

}  // namespace
}  // namespace upipe::kernels::testing
