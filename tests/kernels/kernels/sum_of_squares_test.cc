#include "gtest/gtest.h"
#include "tests/kernels/kernels/support/op_check.h"

namespace upipe::kernels::testing {
namespace {

// fp64 sums of exact squares: backends differ only in the order of fp64 additions.
TEST(SumOfSquares, WithinTheBound) {
  for (const int64_t n : {0, 1, 15, 1000, 70001}) {
    ExpectMatchesReference(
        [&](Memory& memory) {
          return SumOfSquaresParams{memory.Input({{n}}, 1, kW),
                                    memory.InOut("out", {{1}}, 1, DType::kFloat64)};
        },
        2);
  }
}

TEST(SumOfSquares, ThreadsDoNotChangeABit) {
  double first = 0;
  for (int threads : {1, 2, 3}) {
    Memory memory(1);
    const SumOfSquaresParams p = {memory.Input({{100001}}),
                                  memory.InOut("out", {{1}}, 0, DType::kFloat64)};
    ASSERT_EQ(RunCall(Tested(), p, memory, threads), absl::OkStatus());
    if (threads == 1) first = GetElement(p.out, 0);
    EXPECT_EQ(GetElement(p.out, 0), first);
  }
}

TEST(SumOfSquares, CountsWhatSmallSumsWouldLose) {
  for (OpTable* ops : {&Reference(), &Tested()}) {
    Memory memory(1);
    const SumOfSquaresParams p = {memory.InOut("x", {{50000}}),
                                  memory.InOut("out", {{1}}, 0, DType::kFloat64)};
    ASSERT_EQ(RunCall(*ops, FillParams{p.x, 0x1p-10}, memory), absl::OkStatus());
    SetElement(p.x, 0, 0, 0, 4096);
    SetElement(p.out, 0, 0, 0, 1);
    ASSERT_EQ(RunCall(*ops, p, memory), absl::OkStatus());
    EXPECT_NEAR(GetElement(p.out, 0), 1 + 4096.0 * 4096.0 + 49999 * 0x1p-20, 1e-8);
  }
}

}  // namespace
}  // namespace upipe::kernels::testing
