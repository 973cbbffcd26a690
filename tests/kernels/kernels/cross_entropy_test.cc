#include <cmath>

#include "gtest/gtest.h"
#include "tests/kernels/kernels/support/finite_difference.h"
#include "tests/kernels/kernels/support/op_check.h"

namespace upipe::kernels::testing {
namespace {

struct Shape {
  int64_t tokens, vocab, gap;
  double scale;
};

// Every third row has no label.
CrossEntropyParams Call(const Shape& s, Memory& memory, bool write_gradient) {
  std::vector<int32_t> labels(s.tokens);
  for (int64_t t = 0; t < s.tokens; ++t)
    labels[t] = t % 3 == 2 ? -100 : memory.random()() % s.vocab;
  const TensorView given = memory.Ints(labels);
  const Memory::Shape shape = {{s.tokens, s.vocab}, s.gap};
  return {write_gradient ? memory.InOut("logits", shape, s.scale) : memory.Input(shape, s.scale),
          given, memory.InOut("loss_and_count", {{2}}, 0, DType::kFloat64), write_gradient};
}

class CrossEntropy : public ::testing::TestWithParam<Shape> {};

TEST_P(CrossEntropy, WithinTheBound) {
  ExpectCpuMatchesReference([](Memory& memory) { return Call(GetParam(), memory, true); });
}

TEST_P(CrossEntropy, LossAloneLeavesTheLogits) {
  ExpectCpuMatchesReference([](Memory& memory) { return Call(GetParam(), memory, false); });
}

INSTANTIATE_TEST_SUITE_P(Shapes, CrossEntropy,
                         ::testing::Values(Shape{1, 1, 0, 1}, Shape{0, 5, 0, 1}, Shape{7, 2, 1, 1},
                                           Shape{50, 257, 3, 1}, Shape{6, 5003, 0, 10},
                                           Shape{20, 33, 0, 1e4}));

TEST(CrossEntropy, UniformLogitsCostLogVocabAndUnlabelledRowsAreZero) {
  for (OpTable* ops : {&Reference(), &Cpu()}) {
    Memory memory(1);
    const CrossEntropyParams p = {memory.InOut("logits", {{3, 8}}, 0), memory.Ints({3, -1, 0}),
                                  memory.InOut("loss_and_count", {{2}}, 0, DType::kFloat64)};
    ASSERT_EQ(RunCall(*ops, p, memory), absl::OkStatus());
    EXPECT_NEAR(GetElement(p.loss_and_count, 0), 2 * std::log(8), 1e-6);
    EXPECT_EQ(GetElement(p.loss_and_count, 1), 2);
    EXPECT_NEAR(GetElement(p.logits, 0, 3), 0.125 - 1, 1e-7);
    EXPECT_NEAR(GetElement(p.logits, 2, 3), 0.125, 1e-7);
    for (int64_t i = 0; i < 8; ++i) EXPECT_EQ(GetElement(p.logits, 1, i), 0);
  }
}

TEST(CrossEntropy, GradientEqualsFiniteDifferences) {
  Memory memory(2), forward(3);
  const CrossEntropyParams p = Call({5, 6, 0, 1}, memory, true);
  const TensorView logits = forward.InOut("logits", {{5, 6}});
  const TensorView loss_and_count = forward.InOut("loss_and_count", {{2}}, 0, DType::kFloat64);
  CopyElements(p.logits, logits);
  ASSERT_EQ(RunCall(Reference(), p, memory), absl::OkStatus());
  ExpectGradient(logits, p.logits, [&] {
    SetElement(loss_and_count, 0, 0, 0, 0);
    EXPECT_EQ(
        RunCall(Reference(), CrossEntropyParams{logits, p.labels, loss_and_count, false}, forward),
        absl::OkStatus());
    return GetElement(loss_and_count, 0);
  });
}

TEST(CrossEntropy, LabelOutsideTheVocabularyFailsTheStream) {
  ExpectBothFail(
      [](Memory& memory) {
        return CrossEntropyParams{memory.InOut("logits", {{2, 4}}), memory.Ints({1, 4}),
                                  memory.InOut("loss_and_count", {{2}}, 0, DType::kFloat64)};
      },
      absl::StatusCode::kOutOfRange);
}

}  // namespace
}  // namespace upipe::kernels::testing
