// Products large enough to be cut into pieces, blocks and depth blocks. Sums of small integers are
// exact in any order, so every way to cut must give the bits of the reference.
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cpu/isa.h"
#include "tests/kernels/kernels/support/op_check.h"

namespace upipe::kernels::testing {
namespace {

struct Case {
  bool transpose_a, transpose_b, fp32_sum;
};

MatmulParams Call(const Case& c, Memory& memory, bool integers = true) {
  constexpr int64_t m = 520, n = 270, k = 520;
  MatmulParams p = {.transpose_a = c.transpose_a, .transpose_b = c.transpose_b, .beta = 2};
  p.a = memory.Input({c.transpose_a ? std::vector{k, m} : std::vector{m, k}, 3});
  p.b = memory.Input({c.transpose_b ? std::vector{n, k} : std::vector{k, n}, 1});
  p.c = c.fp32_sum ? memory.InOut("c", {{m, n}, 5}, 1, DType::kFloat32)
                   : memory.InOut("c", {{m, n}, 5});
  p.bias = memory.Input({{n}});
  if (!integers) return p;
  for (const TensorView& view : {p.a, p.b, p.c, p.bias}) SetSmallIntegers(view, 3, memory);
  return p;
}

class MatmulLarge : public ::testing::TestWithParam<Case> {};

TEST_P(MatmulLarge, EqualsTheReference) {
  ExpectEqualsReference([](Memory& memory) { return Call(GetParam(), memory); });
}

// The more threads share the workspace, the smaller the blocks.
TEST_P(MatmulLarge, ManyThreadsChangeNothing) {
  for (const bool native : {false, true}) {
    std::vector<double> first;
    SetBf16ProductsForTest(native);
    for (const int threads : {1, 16}) {
      Memory memory(1, DType::kBFloat16);
      const MatmulParams p = Call(GetParam(), memory);
      EXPECT_TRUE(RunCall(Tested(), p, memory, threads).ok());
      if (threads == 1) first = memory.Results()[0].values;
      EXPECT_EQ(memory.Results()[0].values, first) << threads << " threads, native " << native;
    }
  }
  SetBf16ProductsForTest(true);
}

// By the processor's own products every sum has one order, however the work is cut: any numbers
// give the same bits.
TEST_P(MatmulLarge, BitsOfNativeProductsDoNotDependOnTheThreads) {
  if (!HasBf16Products()) GTEST_SKIP() << "no AVX-512 BF16";
  std::vector<double> first;
  for (const int threads : {1, 2, 16}) {
    Memory memory(1, DType::kBFloat16);
    const MatmulParams p = Call(GetParam(), memory, /*integers=*/false);
    EXPECT_TRUE(RunCall(Tested(), p, memory, threads).ok());
    if (threads == 1) first = memory.Results()[0].values;
    EXPECT_EQ(memory.Results()[0].values, first) << threads << " threads";
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, MatmulLarge,
                         ::testing::Values(Case{false, false, false}, Case{false, true, false},
                                           Case{true, false, true}, Case{true, true, false}));

// A plan made on one machine holds on another.
TEST(MatmulWorkspace, IsBoundedAndTheSameOnEveryProcessor) {
  for (const int64_t n : {1, 64, 1000, 4096, 100'000}) {
    MatmulParams p;
    p.a = TensorView::Matrix(nullptr, DType::kBFloat16, n, 8192);
    p.b = TensorView::Matrix(nullptr, DType::kBFloat16, 8192, 4096);
    p.c = TensorView::Matrix(nullptr, DType::kBFloat16, n, 4096);
    const int64_t bytes = Tested().WorkspaceBytes(p);
    EXPECT_LE(bytes, int64_t{4} << 20) << n;
    ForEachVariant([&](const std::string&) { EXPECT_EQ(Tested().WorkspaceBytes(p), bytes) << n; });
  }
}

}  // namespace
}  // namespace upipe::kernels::testing
