#include "gtest/gtest.h"
#include "tests/kernels/kernels/support/finite_difference.h"
#include "tests/kernels/kernels/support/op_check.h"

namespace upipe::kernels::testing {
namespace {

struct Shape {
  int64_t tokens, vocab, d, gap;
};

class Embedding : public ::testing::TestWithParam<Shape> {
 protected:
  static TensorView Tokens(Memory& memory) {
    std::vector<int32_t> tokens(GetParam().tokens);
    for (int32_t& token : tokens) token = memory.random()() % GetParam().vocab;
    return memory.Ints(tokens);
  }
  static EmbeddingFwdParams Forward(Memory& memory) {
    const auto [tokens, vocab, d, gap] = GetParam();
    return {Tokens(memory), memory.Input({{vocab, d}, gap}),
            memory.Output("out", {{tokens, d}, gap})};
  }
  static EmbeddingBwdParams Backward(Memory& memory) {
    const auto [tokens, vocab, d, gap] = GetParam();
    return {Tokens(memory), memory.Input({{tokens, d}, gap}),
            memory.InOut("dtable", {{vocab, d}, gap}, 1, kW)};
  }
};

// The backward adds in one order in fp32 in both backends.
TEST_P(Embedding, EqualsReference) {
  ExpectEqualsReference(Forward);
  ExpectEqualsReference(Backward);
}

TEST_P(Embedding, GradientEqualsFiniteDifferences) {
  Memory memory(5), forward(6);
  EmbeddingBwdParams p = Backward(memory);
  p.dtable = memory.InOut("dtable", {{GetParam().vocab, GetParam().d}}, 0);
  ASSERT_EQ(RunCall(Reference(), p, memory), absl::OkStatus());
  const TensorView table = forward.InOut("table", {{GetParam().vocab, GetParam().d}});
  const TensorView out = forward.Output("out", {{GetParam().tokens, GetParam().d}});
  ExpectGradient(table, p.dtable, [&] {
    EXPECT_EQ(RunCall(Reference(), EmbeddingFwdParams{p.tokens, table, out}, forward),
              absl::OkStatus());
    return WeightedSum(p.dout, out);
  });
}

INSTANTIATE_TEST_SUITE_P(Shapes, Embedding,
                         ::testing::Values(Shape{1, 1, 1, 0}, Shape{20, 3, 17, 5},
                                           Shape{9, 30, 4, 0}));

TEST(Embedding, TokenOutsideTheVocabularyFailsTheStream) {
  for (const int32_t bad : {-1, 7}) {
    ExpectBothFail(
        [&](Memory& memory) {
          return EmbeddingFwdParams{memory.Ints({0, bad}), memory.Input({{7, 4}}),
                                    memory.Output("out", {{2, 4}})};
        },
        absl::StatusCode::kOutOfRange);
    ExpectBothFail(
        [&](Memory& memory) {
          return EmbeddingBwdParams{memory.Ints({0, bad}), memory.Input({{2, 4}}),
                                    memory.InOut("dtable", {{7, 4}})};
        },
        absl::StatusCode::kOutOfRange);
  }
}

}  // namespace
}  // namespace upipe::kernels::testing
