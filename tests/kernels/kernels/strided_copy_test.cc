#include <cstdint>
#include <ios>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "tests/kernels/kernels/support/op_check.h"

namespace upipe::kernels::testing {
namespace {

struct Shape {
  std::vector<int64_t> dims;
  int64_t src_gap, dst_gap;
};

class StridedCopy : public ::testing::TestWithParam<Shape> {};

// To the same type and to fp32; from fp32 too, where the storage is bf16.
TEST_P(StridedCopy, EqualsReference) {
  const auto& [dims, src_gap, dst_gap] = GetParam();
  for (const bool accumulate : {false, true}) {
    for (const bool from_wide : {false, true}) {
      for (const bool to_wide : {false, true}) {
        ExpectEqualsReference([&](Memory& memory) {
          const DType from = from_wide ? kW : memory.storage();
          const DType to = to_wide ? kW : memory.storage();
          return StridedCopyParams{memory.Input({dims, src_gap}, 1, from),
                                   accumulate ? memory.InOut("dst", {dims, dst_gap}, 1, to)
                                              : memory.Output("dst", {dims, dst_gap}, to),
                                   accumulate};
        });
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, StridedCopy,
                         ::testing::Values(Shape{{1, 1, 1}, 0, 0}, Shape{{1, 1, 40000}, 0, 0},
                                           Shape{{1, 7, 5}, 3, 0}, Shape{{3, 4, 9}, 0, 5},
                                           Shape{{3, 0, 9}, 0, 5}, Shape{{2, 2, 20000}, 1, 2}));

// Columns into rows: the first two dims may come in any order.
TEST(StridedCopy, SwapsTheFirstTwoDims) {
  ExpectEqualsReference([](Memory& memory) {
    TensorView src = memory.Input({{4, 6, 5}, 2});
    std::swap(src.shape[0], src.shape[1]);
    std::swap(src.stride[0], src.stride[1]);
    return StridedCopyParams{src, memory.Output("dst", {{6, 4, 5}})};
  });
}

TEST(StridedCopy, CopiesAndAdds) {
  for (OpTable* ops : {&Reference(), &Tested()}) {
    Memory memory(1);
    const TensorView src = memory.Input({{1, 3, 2}, 1}), dst = memory.Output("dst", {{1, 3, 2}, 4});
    ASSERT_EQ(RunCall(*ops, StridedCopyParams{src, dst}, memory), absl::OkStatus());
    ASSERT_EQ(RunCall(*ops, StridedCopyParams{src, dst, true}, memory), absl::OkStatus());
    for (int64_t i = 0; i < 3; ++i)
      EXPECT_EQ(GetElement(dst, 0, i, 1), 2 * GetElement(src, 0, i, 1));
  }
}

// dst of a copy of the given elements, bit for bit, of every backend and instruction set.
template <typename From, typename To>
void ExpectCopies(std::vector<From> src, DType from, const std::vector<To>& expected, DType to) {
  const auto n = static_cast<int64_t>(src.size());
  const auto expect = [&](OpTable& ops, const char* backend) {
    std::vector<To> dst(src.size());
    const StridedCopyParams p = {TensorView::Tensor3(src.data(), from, {1, 1, n}, n, n),
                                 TensorView::Tensor3(dst.data(), to, {1, 1, n}, n, n)};
    ASSERT_EQ(RunCall(ops, p, Memory(1)), absl::OkStatus());
    int wrong = 0;
    for (int64_t i = 0; i < n && wrong < 5; ++i) {
      if (dst[i] == expected[i]) continue;
      ++wrong;
      ADD_FAILURE() << backend << ": " << std::hex << src[i] << " became " << dst[i] << ", not "
                    << expected[i];
    }
  };
  expect(Reference(), "reference");
  ForEachVariant([&](const std::string& variant) { expect(Tested(), variant.c_str()); });
}

std::vector<uint16_t> EveryBFloat16() {
  std::vector<uint16_t> all(1 << 16);
  for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<uint16_t>(i);
  return all;
}

// All 2^16 numbers: zeros of both signs, denormals, infinities and every NaN.
TEST(StridedCopy, EveryBFloat16WidensExactly) {
  const std::vector<uint16_t> all = EveryBFloat16();
  std::vector<uint32_t> wide;
  for (const uint16_t bits : all) wide.push_back(uint32_t{bits} << 16);
  ExpectCopies(all, DType::kBFloat16, wide, DType::kFloat32);
  ExpectCopies(all, DType::kBFloat16, all, DType::kBFloat16);
  ExpectCopies(wide, DType::kFloat32, wide, DType::kFloat32);
}

// A bf16 number comes back as itself, a NaN as a quiet one.
TEST(StridedCopy, EveryBFloat16ComesBack) {
  std::vector<uint32_t> wide;
  std::vector<uint16_t> back;
  for (const uint16_t bits : EveryBFloat16()) {
    wide.push_back(uint32_t{bits} << 16);
    const bool is_nan = (bits & 0x7fff) > 0x7f80;
    back.push_back(is_nan ? bits | 0x40 : bits);
  }
  ExpectCopies(wide, DType::kFloat32, back, DType::kBFloat16);
}

// Between every two neighbours: a bit below the middle goes down, the middle to the even one, a bit
// above goes up; above the largest number the middle is infinity. NaNs keep their upper payload,
// also when only lower bits say that it is one.
TEST(StridedCopy, RoundsToNearestEven) {
  std::vector<uint32_t> wide;
  std::vector<uint16_t> rounded;
  for (uint32_t low = 0; low < 0x7f80; ++low) {
    for (const uint32_t sign : {0u, 0x8000u}) {
      const uint32_t bits = low | sign, even = bits + (bits & 1);
      for (const auto& [tail, to] : {std::pair<uint32_t, uint32_t>{0x0001, bits},
                                     {0x7fff, bits},
                                     {0x8000, even},
                                     {0x8001, bits + 1},
                                     {0xffff, bits + 1}}) {
        wide.push_back(bits << 16 | tail);
        rounded.push_back(static_cast<uint16_t>(to));
      }
    }
  }
  for (const uint32_t nan : {0x7f800001u, 0xff800001u, 0x7f80ffffu, 0x7fffffffu, 0xffffffffu,
                             0x7fc00000u, 0x7fa12345u, 0xffbfffffu}) {
    wide.push_back(nan);
    rounded.push_back(static_cast<uint16_t>(nan >> 16 | 0x40));
  }
  ExpectCopies(wide, DType::kFloat32, rounded, DType::kBFloat16);
}

// 256 + 1 is a tie that goes down, 256 + 3 one that goes up, 256 + 2 is exact: one rounding, after
// the fp32 sum.
TEST(StridedCopy, AccumulatesInFp32AndRoundsOnce) {
  for (const DType from : {DType::kFloat32, DType::kBFloat16}) {
    for (OpTable* ops : {&Reference(), &Tested()}) {
      Memory memory(1, DType::kBFloat16);
      const TensorView src = memory.Input({{1, 1, 3}}, 1, from);
      const TensorView dst = memory.InOut("dst", {{1, 1, 3}});
      for (int64_t i = 0; i < 3; ++i) {
        SetElement(src, 0, 0, i, static_cast<double>(i + 1));
        SetElement(dst, 0, 0, i, 256);
      }
      memory.Seal();
      ASSERT_EQ(RunCall(*ops, StridedCopyParams{src, dst, true}, memory), absl::OkStatus());
      EXPECT_EQ(memory.Results()[0].values, (std::vector<double>{256, 258, 260}));
    }
  }
}

}  // namespace
}  // namespace upipe::kernels::testing
