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

enum class Gradient { kNone, kApart, kOverLogits };

// Every third row has no label.
CrossEntropyParams Call(const Shape& s, Memory& memory, Gradient gradient) {
  std::vector<int32_t> labels(s.tokens);
  for (int64_t t = 0; t < s.tokens; ++t)
    labels[t] = t % 3 == 2 ? -100 : memory.random()() % s.vocab;
  const Memory::Shape shape = {{s.tokens, s.vocab}, s.gap};
  CrossEntropyParams p = {.labels = memory.Ints(labels)};
  if (gradient == Gradient::kOverLogits) {
    p.logits = memory.Consumed(shape, s.scale, kW);
    p.dlogits = TensorView::Matrix(p.logits.data, memory.storage(), s.tokens, s.vocab,
                                   p.logits.stride[0] * SizeOf(kW) / SizeOf(memory.storage()));
    memory.AddResult("dlogits", p.dlogits);
  } else {
    p.logits = memory.Input(shape, s.scale, kW);
  }
  if (gradient == Gradient::kApart) p.dlogits = memory.Output("dlogits", {shape.dims, 5});
  p.loss_and_count = memory.InOut("loss_and_count", {{2}}, 0, DType::kFloat64);
  return p;
}

class CrossEntropy : public ::testing::TestWithParam<Shape> {};

TEST_P(CrossEntropy, WithinTheBound) {
  ExpectMatchesReference([](Memory& memory) { return Call(GetParam(), memory, Gradient::kApart); },
                         2);
}

TEST_P(CrossEntropy, GradientMayBeginWhereTheLogitsDo) {
  ExpectMatchesReference(
      [](Memory& memory) { return Call(GetParam(), memory, Gradient::kOverLogits); }, 2);
}

// The very bits of a gradient in memory of its own.
TEST_P(CrossEntropy, OverlayChangesNoBit) {
  ForEachStorage([](DType storage) {
    for (OpTable* ops : {&Reference(), &Tested()}) {
      Memory apart(1, storage), over(1, storage);
      ASSERT_EQ(RunCall(*ops, Call(GetParam(), apart, Gradient::kApart), apart), absl::OkStatus());
      ASSERT_EQ(RunCall(*ops, Call(GetParam(), over, Gradient::kOverLogits), over),
                absl::OkStatus());
      for (int i : {0, 1}) EXPECT_EQ(over.Results()[i].values, apart.Results()[i].values);
    }
  });
}

TEST_P(CrossEntropy, LossAloneLeavesTheLogits) {
  ExpectMatchesReferenceIn(
      DType::kFloat32, [](Memory& memory) { return Call(GetParam(), memory, Gradient::kNone); }, 2);
}

INSTANTIATE_TEST_SUITE_P(Shapes, CrossEntropy,
                         ::testing::Values(Shape{1, 1, 0, 1}, Shape{0, 5, 0, 1}, Shape{7, 2, 1, 1},
                                           Shape{50, 257, 3, 1}, Shape{6, 5003, 0, 10},
                                           Shape{20, 33, 0, 1e4}));

TEST(CrossEntropy, UniformLogitsCostLogVocabAndUnlabelledRowsAreZero) {
  ForEachStorage([](DType storage) {
    for (OpTable* ops : {&Reference(), &Tested()}) {
      Memory memory(1, storage);
      const CrossEntropyParams p = {memory.Input({{3, 8}}, 0, kW), memory.Ints({3, -1, 0}),
                                    memory.Output("dlogits", {{3, 8}}),
                                    memory.InOut("loss_and_count", {{2}}, 0, DType::kFloat64)};
      ASSERT_EQ(RunCall(*ops, p, memory), absl::OkStatus());
      EXPECT_NEAR(GetElement(p.loss_and_count, 0), 2 * std::log(8), 1e-6);
      EXPECT_EQ(GetElement(p.loss_and_count, 1), 2);
      EXPECT_NEAR(GetElement(p.dlogits, 0, 3), 0.125 - 1, 1e-7);
      EXPECT_NEAR(GetElement(p.dlogits, 2, 3), 0.125, 1e-7);
      for (int64_t i = 0; i < 8; ++i) EXPECT_EQ(GetElement(p.dlogits, 1, i), 0);
    }
  });
}

// 1/512 - 1 lies half way between -255/256 and -1: nearest even is -1.
TEST(CrossEntropy, GradientRoundsToNearestEven) {
  ForEachVariant([](const std::string&) {
    Memory memory(1, DType::kBFloat16);
    const CrossEntropyParams p = {memory.Input({{1, 512}}, 0, kW), memory.Ints({100}),
                                  memory.Output("dlogits", {{1, 512}}),
                                  memory.InOut("loss_and_count", {{2}}, 0, DType::kFloat64)};
    for (OpTable* ops : {&Reference(), &Tested()}) {
      ASSERT_EQ(RunCall(*ops, p, memory), absl::OkStatus());
      for (int64_t i = 0; i < 512; ++i) {
        EXPECT_EQ(GetElement(p.dlogits, 0, i), i == 100 ? -1 : 0x1p-9) << i;
      }
    }
  });
}

TEST(CrossEntropy, GradientEqualsFiniteDifferences) {
  Memory memory(2), forward(3);
  const CrossEntropyParams p = Call({5, 6, 0, 1}, memory, Gradient::kApart);
  const TensorView logits = forward.InOut("logits", {{5, 6}});
  const TensorView loss_and_count = forward.InOut("loss_and_count", {{2}}, 0, DType::kFloat64);
  CopyElements(p.logits, logits);
  ASSERT_EQ(RunCall(Reference(), p, memory), absl::OkStatus());
  ExpectGradient(logits, p.dlogits, [&] {
    SetElement(loss_and_count, 0, 0, 0, 0);
    const CrossEntropyParams loss = {
        .logits = logits, .labels = p.labels, .loss_and_count = loss_and_count};
    EXPECT_EQ(RunCall(Reference(), loss, forward), absl::OkStatus());
    return GetElement(loss_and_count, 0);
  });
}

TEST(CrossEntropy, LabelOutsideTheVocabularyFailsTheStream) {
  ExpectBothFail(
      [](Memory& memory) {
        return CrossEntropyParams{
            .logits = memory.Input({{2, 4}}),
            .labels = memory.Ints({1, 4}),
            .loss_and_count = memory.InOut("loss_and_count", {{2}}, 0, DType::kFloat64)};
      },
      absl::StatusCode::kOutOfRange);
}

}  // namespace
}  // namespace upipe::kernels::testing
