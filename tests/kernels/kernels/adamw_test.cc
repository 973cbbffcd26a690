#include <cmath>

#include "gtest/gtest.h"
#include "tests/kernels/kernels/support/op_check.h"

namespace upipe::kernels::testing {
namespace {

AdamWParams Call(Memory& memory, int64_t n, int64_t step, bool skip) {
  AdamWParams p = {.param = memory.InOut("param", {{n}}, 1, kW),
                   .grad = memory.Input({{n}}, 1, kW),
                   .m = memory.InOut("m", {{n}}, 1, kW),
                   .v = memory.InOut("v", {{n}}, 1, kW),
                   .scale = memory.Input({{1}}, 1, kW),
                   .skip = memory.Ints({skip ? 1 : 0}),
                   .lr = 1e-2f,
                   .weight_decay = 0.1f,
                   .step = step};
  for (int64_t i = 0; i < n; ++i) SetElement(p.v, i, 0, 0, std::abs(GetElement(p.v, i)));
  return p;
}

TEST(AdamW, WithinTheBound) {
  for (const int64_t n : {0, 1, 17, 1000}) {
    for (const int64_t step : {1, 1000}) {
      ExpectMatchesReference([&](Memory& memory) { return Call(memory, n, step, false); }, 8);
    }
  }
}

TEST(AdamW, SkipChangesNothing) {
  for (OpTable* ops : {&Reference(), &Tested()}) {
    Memory memory(1), untouched(1);
    Call(untouched, 50, 3, true);
    ASSERT_EQ(RunCall(*ops, Call(memory, 50, 3, true), memory), absl::OkStatus());
    for (int i = 0; i < 3; ++i)
      EXPECT_EQ(memory.Results()[i].values, untouched.Results()[i].values);
  }
}

// The first step from zero moments moves by lr against the sign of the gradient, and decays.
TEST(AdamW, FirstStepIsSignDescent) {
  for (OpTable* ops : {&Reference(), &Tested()}) {
    Memory memory(1);
    AdamWParams p = Call(memory, 4, 1, false);
    p.m = memory.InOut("zero m", {{4}}, 0);
    p.v = memory.InOut("zero v", {{4}}, 0);
    std::vector<double> before;
    for (int64_t i = 0; i < 4; ++i) before.push_back(GetElement(p.param, i));
    ASSERT_EQ(RunCall(*ops, p, memory), absl::OkStatus());
    for (int64_t i = 0; i < 4; ++i) {
      const double sign = GetElement(p.grad, i) * GetElement(p.scale, 0) > 0 ? 1 : -1;
      EXPECT_NEAR(GetElement(p.param, i), before[i] - 1e-2 * (sign + 0.1 * before[i]), 1e-6);
    }
  }
}

}  // namespace
}  // namespace upipe::kernels::testing
