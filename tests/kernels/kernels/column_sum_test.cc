#include "gtest/gtest.h"
#include "tests/kernels/kernels/support/finite_difference.h"
#include "tests/kernels/kernels/support/op_check.h"

namespace upipe::kernels::testing {
namespace {

TEST(ColumnSum, WithinTheBound) {
  for (const int64_t columns : {0, 1, 33, 300}) {
    for (const int64_t tokens : {0, 1, 7, 300}) {
      ExpectMatchesReference(
          [&](Memory& memory) {
            return ColumnSumParams{memory.Input({{tokens, columns}, 3}),
                                   memory.InOut("out", {{columns}}, 1, kW)};
          },
          2);
    }
  }
}

// Integers below 2^24: whatever the order, the sum is exact; a bf16 accumulator would lose it.
TEST(ColumnSum, IntegersAreExact) {
  ExpectEqualsReference([](Memory& memory) {
    const ColumnSumParams p = {memory.Input({{2000, 40}, 1}), memory.InOut("out", {{40}}, 1, kW)};
    SetSmallIntegers(p.x, 200, memory);
    SetSmallIntegers(p.out, 1000, memory);
    return p;
  });
}

// The blocks are fixed: threads change nothing.
TEST(ColumnSum, ThreadsDoNotChangeABit) {
  ForEachStorage([](DType storage) {
    std::vector<double> first;
    for (int threads : {1, 2, 3}) {
      Memory memory(7, storage);
      const ColumnSumParams p = {memory.Input({{3000, 70}}), memory.InOut("out", {{70}}, 1, kW)};
      ASSERT_EQ(RunCall(Tested(), p, memory, threads), absl::OkStatus());
      if (threads == 1) first = memory.Results()[0].values;
      EXPECT_EQ(memory.Results()[0].values, first);
    }
  });
}

// It is the gradient of Matmul's bias.
TEST(ColumnSum, IsTheGradientOfABias) {
  Memory memory(2), forward(3);
  const TensorView dc = memory.Input({{6, 5}}), dbias = memory.InOut("dbias", {{5}}, 0);
  ASSERT_EQ(RunCall(Reference(), ColumnSumParams{dc, dbias}, memory), absl::OkStatus());
  MatmulParams p = {.a = forward.Input({{6, 3}}),
                    .b = forward.Input({{3, 5}}),
                    .c = forward.Output("c", {{6, 5}}),
                    .alpha = 3,
                    .bias = forward.InOut("bias", {{5}})};
  ExpectGradient(p.bias, dbias, [&] {
    EXPECT_EQ(RunCall(Reference(), p, forward), absl::OkStatus());
    return WeightedSum(dc, p.c);
  });
}

}  // namespace
}  // namespace upipe::kernels::testing
