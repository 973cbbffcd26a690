#include "gtest/gtest.h"
#include "tests/kernels/kernels/support/op_check.h"

namespace upipe::kernels::testing {
namespace {

struct Case {
  int64_t m, n, k;
  bool transpose_a, transpose_b;
  float alpha, beta;
  int64_t gap;
};

class Matmul : public ::testing::TestWithParam<Case> {};

TEST_P(Matmul, WithinTheBound) {
  const Case& c = GetParam();
  ExpectCpuMatchesReference(
      [&](Memory& memory) {
        MatmulParams p = {.transpose_a = c.transpose_a,
                          .transpose_b = c.transpose_b,
                          .alpha = c.alpha,
                          .beta = c.beta};
        p.a = memory.Input({c.transpose_a ? std::vector{c.k, c.m} : std::vector{c.m, c.k}, c.gap});
        p.b = memory.Input({c.transpose_b ? std::vector{c.n, c.k} : std::vector{c.k, c.n}, c.gap});
        // beta = 0 ignores the NaN that Output starts with.
        p.c = c.beta == 0 ? memory.Output("c", {{c.m, c.n}, c.gap})
                          : memory.InOut("c", {{c.m, c.n}, c.gap});
        return p;
      },
      2);
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

}  // namespace
}  // namespace upipe::kernels::testing
