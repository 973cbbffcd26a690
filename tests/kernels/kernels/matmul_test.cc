#include "gtest/gtest.h"
#include "tests/kernels/kernels/support/op_check.h"

namespace upipe::kernels::testing {
namespace {

struct Case {
  int64_t m, n, k;
  bool transpose_a, transpose_b;
  float alpha, beta;
  int64_t gap;
  bool bias = false;
};

// The tensors of a case; c is S, or W where `wide`.
MatmulParams Call(const Case& c, bool wide, Memory& memory) {
  MatmulParams p = {
      .transpose_a = c.transpose_a, .transpose_b = c.transpose_b, .alpha = c.alpha, .beta = c.beta};
  p.a = memory.Input({c.transpose_a ? std::vector{c.k, c.m} : std::vector{c.m, c.k}, c.gap});
  p.b = memory.Input({c.transpose_b ? std::vector{c.n, c.k} : std::vector{c.k, c.n}, c.gap});
  const DType dtype = wide ? kW : memory.storage();
  // beta = 0 ignores the NaN that Output starts with.
  p.c = c.beta == 0 ? memory.Output("c", {{c.m, c.n}, c.gap}, dtype)
                    : memory.InOut("c", {{c.m, c.n}, c.gap}, 1, dtype);
  if (c.bias) p.bias = memory.Input({{c.n}});
  return p;
}

class Matmul : public ::testing::TestWithParam<Case> {};

TEST_P(Matmul, WithinTheBound) {
  ExpectMatchesReference([](Memory& memory) { return Call(GetParam(), false, memory); }, 2);
}

TEST_P(Matmul, WideResultWithinTheBound) {
  ExpectMatchesReferenceIn(
      DType::kBFloat16, [](Memory& memory) { return Call(GetParam(), true, memory); }, 2);
}

INSTANTIATE_TEST_SUITE_P(
    Cases, Matmul,
    ::testing::Values(
        Case{1, 1, 1, false, false, 1, 0, 0}, Case{100, 70, 33, false, false, 1, 0, 0},
        Case{100, 70, 33, true, false, 1, 1, 5}, Case{70, 100, 33, false, true, 0.5f, 2, 7},
        Case{70, 160, 33, true, true, -1, 0.5f, 1}, Case{1, 200, 300, false, true, 1, 0, 0},
        Case{200, 1, 300, false, false, 1, 0, 0}, Case{5, 7, 0, false, false, 1, 0, 0},
        Case{5, 7, 0, true, true, 1, 0.5f, 3}, Case{0, 7, 4, false, false, 1, 0, 0},
        Case{7, 0, 4, false, false, 1, 0, 0}, Case{40, 50, 60, false, false, 0, 1, 0},
        Case{40, 50, 60, false, false, 0, 0, 0}, Case{60, 100, 2000, false, true, 1, 0, 0}));

INSTANTIATE_TEST_SUITE_P(
    Bias, Matmul, ::testing::ValuesIn([] {
      std::vector<Case> cases = {{5, 7, 0, false, false, 1, 0, 0, true},
                                 {0, 7, 4, false, false, 1, 1, 0, true},
                                 {1, 300, 64, false, true, -2, 0.5f, 0, true}};
      for (const bool transpose_a : {false, true}) {
        for (const bool transpose_b : {false, true}) {
          for (const float beta : {0.0f, 1.0f, 0.5f}) {
            cases.push_back({33, 47, 29, transpose_a, transpose_b, 1, beta, 3, true});
          }
        }
      }
      return cases;
    }()));

// Heads of one token lie one after the other: as a matrix, one row whose distance to the next is
// shorter than the row.
TEST(Matmul, OneRowMayHaveAnyDistanceToTheNext) {
  for (const bool wide : {false, true}) {
    for (const Case& c : {Case{1, 21, 13, false, true, 1, 0, 0},
                          {1, 21, 13, false, false, 1, 1, 0},
                          {17, 21, 1, true, false, 1, 0, 0},
                          {1, 21, 1, false, false, 1, 0.5f, 0}}) {
      ExpectMatchesReference(
          [&](Memory& memory) {
            MatmulParams p = Call(c, wide, memory);
            for (TensorView* view : {&p.a, &p.b, &p.c}) {
              if (view->shape[0] == 1) view->stride[0] = 2;
            }
            return p;
          },
          2);
    }
  }
}

// A bias is added once, unscaled, to every row.
TEST(Matmul, BiasIsNotScaled) {
  ForEachStorage([](DType storage) {
    for (OpTable* ops : {&Reference(), &Tested()}) {
      Memory memory(1, storage);
      MatmulParams p = Call({2, 2, 0, false, false, 7, 0, 0, true}, false, memory);
      SetElement(p.bias, 0, 0, 0, 3);
      SetElement(p.bias, 1, 0, 0, -5);
      memory.Seal();
      ASSERT_EQ(RunCall(*ops, p, memory), absl::OkStatus());
      for (int64_t row : {0, 1}) {
        EXPECT_EQ(GetElement(p.c, row, 0), 3);
        EXPECT_EQ(GetElement(p.c, row, 1), -5);
      }
    }
  });
}

// Small integers: every sum is exact in fp32, so a bf16 result has only its one rounding.
TEST(Matmul, IntegersAreExactUpToTheOneRounding) {
  for (const bool wide : {false, true}) {
    ExpectEqualsReference([&](Memory& memory) {
      MatmulParams p = Call({19, 35, 70, false, true, 0.5f, 1, 2, true}, wide, memory);
      for (TensorView view : {p.a, p.b, p.c, p.bias}) SetSmallIntegers(view, 15, memory);
      return p;
    });
  }
}

// OpenBLAS takes 32-bit row strides: refused, not cut short.
TEST(Peers41, MatmulRefusesRowStridesBeyond32Bits) {
  for (TensorView MatmulParams::*field : {&MatmulParams::a, &MatmulParams::b, &MatmulParams::c}) {
    Memory memory(1);
    MatmulParams p = {.a = memory.Input({{2, 3}}),
                      .b = memory.Input({{3, 4}}),
                      .c = memory.Output("c", {{2, 4}}, kW)};
    (p.*field).stride[0] = (int64_t{1} << 32) + 4;
    const absl::Status status = RunCall(Tested(), p, memory);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  }
}

}  // namespace
}  // namespace upipe::kernels::testing
