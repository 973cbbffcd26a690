#include "gtest/gtest.h"
#include "tests/kernels/kernels/support/op_check.h"

namespace upipe::kernels::testing {
namespace {

struct Shape {
  std::vector<int64_t> dims;
  int64_t src_gap, dst_gap;
};

class StridedCopy : public ::testing::TestWithParam<Shape> {};

TEST_P(StridedCopy, EqualsReference) {
  for (const bool accumulate : {false, true}) {
    ExpectCpuEqualsReference([&](Memory& memory) {
      const auto& [dims, src_gap, dst_gap] = GetParam();
      return StridedCopyParams{
          memory.Input({dims, src_gap}),
          accumulate ? memory.InOut("dst", {dims, dst_gap}) : memory.Output("dst", {dims, dst_gap}),
          accumulate};
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, StridedCopy,
                         ::testing::Values(Shape{{1, 1, 1}, 0, 0}, Shape{{1, 1, 40000}, 0, 0},
                                           Shape{{1, 7, 5}, 3, 0}, Shape{{3, 4, 9}, 0, 5},
                                           Shape{{3, 0, 9}, 0, 5}, Shape{{2, 2, 20000}, 1, 2}));

// Columns into rows: the first two dims may come in any order.
TEST(StridedCopy, SwapsTheFirstTwoDims) {
  ExpectCpuEqualsReference([](Memory& memory) {
    TensorView src = memory.Input({{4, 6, 5}, 2});
    std::swap(src.shape[0], src.shape[1]);
    std::swap(src.stride[0], src.stride[1]);
    return StridedCopyParams{src, memory.Output("dst", {{6, 4, 5}})};
  });
}

TEST(StridedCopy, CopiesAndAdds) {
  for (OpTable* ops : {&Reference(), &Cpu()}) {
    Memory memory(1);
    const TensorView src = memory.Input({{1, 3, 2}, 1}), dst = memory.Output("dst", {{1, 3, 2}, 4});
    ASSERT_EQ(RunCall(*ops, StridedCopyParams{src, dst}, memory), absl::OkStatus());
    ASSERT_EQ(RunCall(*ops, StridedCopyParams{src, dst, true}, memory), absl::OkStatus());
    for (int64_t i = 0; i < 3; ++i)
      EXPECT_EQ(GetElement(dst, 0, i, 1), 2 * GetElement(src, 0, i, 1));
  }
}

}  // namespace
}  // namespace upipe::kernels::testing
