// Element offsets beyond 2^31 and 2^32: tensors whose rows or heads lie so far apart, in address
// space of which only the touched pages exist, must give the very bits of gapless ones.
#include <cstring>
#include <functional>
#include <vector>

#include "gtest/gtest.h"
#include "tests/kernels/kernels/support/address_space.h"
#include "tests/kernels/kernels/support/attention_case.h"
#include "tests/kernels/kernels/support/op_check.h"

namespace upipe::kernels::testing {
namespace {

// Row 18 lies beyond 2^31 elements, row 36 beyond 2^32; head 1 beyond 2^31, head 2 beyond 2^32.
// Strides are of whole 16-byte accesses.
constexpr int64_t kRows = 41;
constexpr int64_t kRowStride = (int64_t{1} << 32) / 36 + 1001;
constexpr int64_t kHeads = 3;
constexpr int64_t kHeadStride = (int64_t{1} << 31) + 1008;
static_assert(18 * kRowStride > int64_t{1} << 31 && 36 * kRowStride > int64_t{1} << 32);
static_assert(2 * kHeadStride > int64_t{1} << 32);
static_assert(kRowStride % 16 == 0 && kHeadStride % 16 == 0);

// A tensor of a call and the stride it gets; a tensor without one is only compared.
struct Stretch {
  TensorView* view;
  int dim = 0;
  int64_t stride = 0;
};
Stretch FarRows(TensorView& view) { return {&view, 0, kRowStride}; }
Stretch FarHeads(TensorView& view) { return {&view, view.rank - 2, kHeadStride}; }
Stretch Near(TensorView& view) { return {&view}; }

bool SameElements(const TensorView& a, const TensorView& b) {
  for (int64_t i = 0; i < a.shape[0]; ++i) {
    for (int64_t j = 0; j < a.shape[1]; ++j) {
      if (std::memcmp(a.At(i, j), b.At(i, j), a.shape[2] * SizeOf(a.dtype)) != 0) return false;
    }
  }
  return true;
}

// `build` fills the params and lists their tensors, the same every time it is called.
template <typename Params>
using Build = std::function<std::vector<Stretch>(Memory&, Params&)>;

// With tensors and strides of 16 bytes, and with others.
template <typename Params>
void ExpectFarEqualsNear(const Build<Params>& build, DType storage, Memory::Alignment alignment) {
  const auto expect = [&](OpTable& ops, int threads) {
    Memory near_memory(1, storage, alignment), far_memory(1, storage, alignment);
    FarMemory space;
    Params near, far;
    const std::vector<Stretch> near_views = build(near_memory, near);
    const std::vector<Stretch> far_views = build(far_memory, far);
    const int64_t odd = alignment == Memory::Alignment::kElement ? 1 : 0;
    for (const auto& [view, dim, stride] : far_views) {
      if (stride > 0) *view = space.Copy(*view, dim, stride + odd);
    }
    ASSERT_EQ(RunCall(ops, near, near_memory, threads), absl::OkStatus());
    ASSERT_EQ(RunCall(ops, far, far_memory, threads), absl::OkStatus());
    for (size_t i = 0; i < near_views.size(); ++i) {
      EXPECT_TRUE(SameElements(near_views[i].view->AsTensor3(), far_views[i].view->AsTensor3()))
          << NameOf(OpParams(near)) << ", tensor " << i << ", " << threads << " threads";
    }
  };
  expect(Reference(), 1);
  ForEachVariant([&](const std::string&) { expect(Tested(), 1); }, storage);
  expect(Tested(), 3);
}

template <typename Params>
void ExpectFarEqualsNear(const Build<Params>& build) {
  ForEachStorage([&](DType storage) {
    ExpectFarEqualsNear(build, storage, Memory::Alignment::kElement);
    ExpectFarEqualsNear(build, storage, Memory::Alignment::kSixteenBytes);
  });
}

std::vector<int32_t> SomeTokens() {
  std::vector<int32_t> tokens;
  for (int64_t t = 0; t < kRows; ++t) tokens.push_back(static_cast<int32_t>(t * 29 % kRows));
  return tokens;
}

TEST(Peers41, EmbeddingBeyond32BitOffsets) {
  ExpectFarEqualsNear<EmbeddingFwdParams>([](Memory& memory, EmbeddingFwdParams& p) {
    p = {memory.Ints(SomeTokens()), memory.Input({{kRows, 24}}),
         memory.Output("out", {{kRows, 24}})};
    return std::vector{FarRows(p.table), FarRows(p.out)};
  });
  ExpectFarEqualsNear<EmbeddingBwdParams>([](Memory& memory, EmbeddingBwdParams& p) {
    p = {memory.Ints(SomeTokens()), memory.Input({{kRows, 24}}),
         memory.InOut("dtable", {{kRows, 24}}, 1, kW)};
    return std::vector{FarRows(p.dout), FarRows(p.dtable)};
  });
}

TEST(Peers41, RmsNormBeyond32BitOffsets) {
  for (const bool heads : {false, true}) {
    const Memory::Shape shape = {heads ? std::vector<int64_t>{5, kHeads, 24}
                                       : std::vector<int64_t>{kRows, 24}};
    const auto far = heads ? FarHeads : FarRows;
    ExpectFarEqualsNear<RmsNormFwdParams>([&](Memory& memory, RmsNormFwdParams& p) {
      p = {.x = memory.Input(shape),
           .weight = memory.Input({{24}}),
           .y = memory.Output("y", shape),
           .residual = memory.Input(shape, 1, kW),
           .sum = memory.Output("sum", shape)};
      return std::vector{far(p.x), far(p.y), far(p.residual), far(p.sum)};
    });
    ExpectFarEqualsNear<RmsNormBwdParams>([&](Memory& memory, RmsNormBwdParams& p) {
      p = {.x = memory.Input(shape),
           .weight = memory.Input({{24}}),
           .dy = memory.Input(shape, 1, kW),
           .dx = memory.InOut("dx", shape),
           .dweight = memory.InOut("dweight", {{24}}, 1, kW)};
      return std::vector{far(p.x), far(p.dy), far(p.dx), Near(p.dweight)};
    });
  }
}

TEST(Peers41, MatmulBeyond32BitOffsets) {
  for (const bool transpose_a : {false, true}) {
    for (const bool transpose_b : {false, true}) {
      ExpectFarEqualsNear<MatmulParams>([&](Memory& memory, MatmulParams& p) {
        p = {.a = memory.Input({{kRows, kRows}}),
             .b = memory.Input({{kRows, kRows}}),
             .c = memory.InOut("c", {{kRows, kRows}}, 1, kW),
             .transpose_a = transpose_a,
             .transpose_b = transpose_b,
             .beta = 1,
             .bias = memory.Input({{kRows}})};
        // Sums that are exact in any order: a library may take another path for another stride.
        for (const TensorView& view : {p.a, p.b, p.c, p.bias}) SetSmallIntegers(view, 15, memory);
        return std::vector{FarRows(p.a), FarRows(p.b), FarRows(p.c)};
      });
    }
  }
}

TEST(Peers41, RopeBeyond32BitOffsets) {
  std::vector<int64_t> positions;
  for (int64_t t = 0; t < kRows; ++t) positions.push_back((int64_t{1} << 33) + 77 * t);
  for (const auto far : {FarRows, FarHeads}) {
    for (const bool accumulate : {false, true}) {
      ExpectFarEqualsNear<RopeParams>([&](Memory& memory, RopeParams& p) {
        p = {.src = memory.Input({{kRows, kHeads, 24}}),
             .dst = memory.InOut("dst", {{kRows, kHeads, 24}}, 1, kW),
             .positions = memory.Positions(positions),
             .accumulate = accumulate};
        return std::vector{far(p.src), far(p.dst)};
      });
    }
  }
}

TEST(Peers41, StridedCopyAndRowDotBeyond32BitOffsets) {
  for (const auto far : {FarRows, FarHeads}) {
    ExpectFarEqualsNear<StridedCopyParams>([&](Memory& memory, StridedCopyParams& p) {
      p = {.src = memory.Input({{kRows, kHeads, 24}}),
           .dst = memory.InOut("dst", {{kRows, kHeads, 24}}, 1, kW),
           .accumulate = true};
      return std::vector{far(p.src), far(p.dst)};
    });
    ExpectFarEqualsNear<RowDotParams>([&](Memory& memory, RowDotParams& p) {
      p = {memory.Input({{kRows, kHeads, 24}}), memory.Input({{kRows, kHeads, 24}}),
           memory.Output("out", {{kRows, kHeads}}, kW)};
      return std::vector{far(p.a), far(p.b), FarRows(p.out)};
    });
  }
}

TEST(Peers41, CrossEntropyBeyond32BitOffsets) {
  ExpectFarEqualsNear<CrossEntropyParams>([](Memory& memory, CrossEntropyParams& p) {
    p = {.logits = memory.Consumed({{kRows, kRows}}, 1, kW),
         .labels = memory.Ints(SomeTokens()),
         .dlogits = memory.Output("dlogits", {{kRows, kRows}}),
         .loss_and_count = memory.InOut("loss", {{2}}, 1, DType::kFloat64)};
    return std::vector{FarRows(p.logits), FarRows(p.dlogits), Near(p.loss_and_count)};
  });
}

TEST(Peers41, SwiGluAndColumnSumBeyond32BitOffsets) {
  ExpectFarEqualsNear<SwiGluFwdParams>([](Memory& memory, SwiGluFwdParams& p) {
    p = {memory.Input({{kRows, 24}}), memory.Input({{kRows, 24}}),
         memory.Output("out", {{kRows, 24}})};
    return std::vector{FarRows(p.gate), FarRows(p.up), FarRows(p.out)};
  });
  ExpectFarEqualsNear<SwiGluBwdParams>([](Memory& memory, SwiGluBwdParams& p) {
    p = {memory.InOut("dout", {{kRows, 24}}), memory.InOut("gate", {{kRows, 24}}),
         memory.InOut("up", {{kRows, 24}})};
    return std::vector{FarRows(p.dout), FarRows(p.gate), FarRows(p.up)};
  });
  ExpectFarEqualsNear<ColumnSumParams>([](Memory& memory, ColumnSumParams& p) {
    p = {memory.Input({{kRows, 24}}), memory.InOut("out", {{24}}, 1, kW)};
    return std::vector{FarRows(p.x), Near(p.out)};
  });
}

// Queries and keys at positions beyond 2^32 as well.
AttentionCase FarAttention() {
  constexpr int64_t kFirst = int64_t{1} << 33;
  return {.queries = {kFirst, kFirst + kRows},
          .keys = {kFirst - 10, kFirst - 10 + kRows},
          .head_dim = 24,
          .kv_slot = {0, 2, 1},
          .slots = kHeads,
          .window = 30};
}

TEST(Peers41, AttentionForwardBeyond32BitOffsets) {
  for (const auto far : {FarRows, FarHeads}) {
    for (const bool merge : {false, true}) {
      ExpectFarEqualsNear<AttentionFwdParams>([&](Memory& memory, AttentionFwdParams& p) {
        AttentionCase c = FarAttention();
        c.merge = merge;
        p = ForwardCall(c, memory);
        return std::vector{far(p.q), far(p.k), far(p.v), far(p.o), FarHeads(p.lse)};
      });
    }
  }
}

TEST(Peers41, AttentionBackwardBeyond32BitOffsets) {
  for (const auto far : {FarRows, FarHeads}) {
    for (const bool accumulate : {false, true}) {
      ExpectFarEqualsNear<AttentionBwdParams>([&](Memory& memory, AttentionBwdParams& p) {
        AttentionCase c = FarAttention();
        c.accumulate_dq = accumulate;
        p = BackwardCall(c, memory);
        return std::vector{far(p.q),  far(p.k),  far(p.v),  far(p.dout),     FarHeads(p.lse),
                           far(p.dq), far(p.dk), far(p.dv), FarRows(p.delta)};
      });
    }
  }
}

}  // namespace
}  // namespace upipe::kernels::testing
