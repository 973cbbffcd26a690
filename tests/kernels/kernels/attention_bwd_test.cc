#include "gtest/gtest.h"
#include "tests/kernels/kernels/support/attention_case.h"
#include "tests/kernels/kernels/support/finite_difference.h"
#include "tests/kernels/kernels/support/op_check.h"

namespace upipe::kernels::testing {
namespace {

class AttentionBwd : public ::testing::TestWithParam<AttentionCase> {};

TEST_P(AttentionBwd, WithinTheBoundOfReference) {
  ExpectMatchesReference([](Memory& memory) { return BackwardCall(GetParam(), memory); }, 2);
}

INSTANTIATE_TEST_SUITE_P(Cases, AttentionBwd, ::testing::ValuesIn(AttentionCases()),
                         [](const auto& info) { return info.param.name; });

// Long enough that three threads work in rounds of chunk pairs.
TEST(AttentionBwd, ChunkPairsOfThreadsMatchReference) {
  for (const bool causal : {true, false}) {
    ExpectMatchesReference(
        [&](Memory& memory) {
          return BackwardCall({.queries = {100, 700},
                               .keys = {0, 500},
                               .head_dim = 8,
                               .kv_slot = {0, 1, 1, 0},
                               .slots = 2,
                               .causal = causal,
                               .document_starts = {0, 333}},
                              memory);
        },
        1);
  }
}

class AttentionGradient : public ::testing::TestWithParam<AttentionCase> {};

TEST_P(AttentionGradient, OfReferenceEqualsFiniteDifferences) {
  Memory memory(3), forward(4);
  AttentionBwdParams p = BackwardCall(GetParam(), memory);
  const Memory::Shape keys = {{p.k.shape[0], p.k.shape[1], p.k.shape[2]}};
  p.dk = memory.InOut("dk", keys, 0);
  p.dv = memory.InOut("dv", keys, 0);
  p.grad_slot = p.kv_slot;
  ASSERT_EQ(RunCall(Reference(), p, memory), absl::OkStatus());
  const TensorView o = forward.Output("o", {{p.q.shape[0], p.q.shape[1], p.q.shape[2]}});
  const TensorView lse = forward.Output("lse", {{p.q.shape[1], p.q.shape[0]}});
  const auto loss = [&] {
    const AttentionFwdParams call = {p.q,       p.k,       p.v,    o,      lse,
                                     p.kv_slot, p.queries, p.keys, p.mask, p.scale};
    EXPECT_EQ(RunCall(Reference(), call, forward), absl::OkStatus());
    return WeightedSum(p.dout, o);
  };
  ExpectGradient(p.q, p.dq, loss);
  ExpectGradient(p.k, p.dk, loss);
  ExpectGradient(p.v, p.dv, loss);
}

INSTANTIATE_TEST_SUITE_P(Cases, AttentionGradient,
                         ::testing::Values(AttentionCase{.name = "Grouped",
                                                         .queries = {0, 6},
                                                         .keys = {0, 6},
                                                         .head_dim = 3,
                                                         .kv_slot = {0, 1, 1},
                                                         .slots = 2},
                                           AttentionCase{.name = "Runs",
                                                         .queries = {3, 9},
                                                         .keys = {0, 5},
                                                         .head_dim = 4,
                                                         .window = 4},
                                           AttentionCase{.name = "Full",
                                                         .queries = {0, 7},
                                                         .keys = {0, 7},
                                                         .head_dim = 2,
                                                         .causal = false,
                                                         .document_starts = {0, 2, 3}}),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace upipe::kernels::testing
