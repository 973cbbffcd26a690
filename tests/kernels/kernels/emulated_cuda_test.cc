// What is particular to our CUDA kernels: shapes that take another path through them, elements
// beyond 2^32, and parts that are no op of the table.
#include <cuda_runtime.h>

#include <cmath>
#include <functional>
#include <random>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cuda/attention_merge.h"
#include "kernels/cuda/cuda_kernels.h"
#include "kernels/cuda/fault.h"
#include "kernels/cuda/launch_shape.h"
#include "kernels/cuda/sin_cos.cuh"
#include "kernels/cuda/workspace_bytes.h"
#include "tests/kernels/kernels/support/address_space.h"
#include "tests/kernels/kernels/support/op_check.h"

namespace upipe::kernels::testing {
namespace {

constexpr Memory::Alignment kSixteenBytes = Memory::Alignment::kSixteenBytes;

// A row that does not fit shared memory is read a second time.
TEST(EmulatedCuda, RmsNormOfRowsWiderThanSharedMemory) {
  const Memory::Shape shape = {{3, 70'000}};
  ExpectMatchesReference(
      [&](Memory& memory) {
        return RmsNormFwdParams{.x = memory.Input(shape),
                                .weight = memory.Input({{70'000}}),
                                .y = memory.Output("y", shape),
                                .residual = memory.Input(shape, 1, kW),
                                .sum = memory.Output("sum", shape)};
      },
      2);
  ExpectMatchesReference(
      [&](Memory& memory) {
        return RmsNormBwdParams{.x = memory.Input(shape),
                                .weight = memory.Input({{70'000}}),
                                .dy = memory.Input(shape, 1, kW),
                                .dx = memory.InOut("dx", shape),
                                .dweight = memory.InOut("dweight", {{70'000}}, 1, kW)};
      },
      2);
}

// Thousands of rows, so that every block of the reduction has some and its rows end in between.
TEST(EmulatedCuda, ReductionsOfManyRows) {
  const Memory::Shape shape = {{5003, 8}};
  ExpectMatchesReference(
      [&](Memory& memory) {
        return RmsNormBwdParams{.x = memory.Input(shape),
                                .weight = memory.Input({{8}}),
                                .dy = memory.Input(shape),
                                .dx = memory.Output("dx", shape),
                                .dweight = memory.InOut("dweight", {{8}}, 1, kW),
                                .accumulate = false};
      },
      2);
  ExpectMatchesReference(
      [&](Memory& memory) {
        return ColumnSumParams{memory.Input({{5003, 24}}), memory.InOut("out", {{24}}, 1, kW)};
      },
      2);
}

// More pairs than the parameters of one launch hold.
TEST(EmulatedCuda, RopeOfHeadsWiderThanALaunch) {
  ExpectMatchesReference(
      [](Memory& memory) {
        return RopeParams{.src = memory.Input({{3, 2, 1200}}),
                          .dst = memory.Output("dst", {{3, 2, 1200}}),
                          .positions = memory.Positions({0, 5'000'000, 77})};
      },
      2);
}

// Tokens of every part of the vocabulary, many times each, and more columns than a block has.
TEST(EmulatedCuda, EmbeddingBackwardOfManyTokens) {
  ExpectEqualsReference([](Memory& memory) {
    std::vector<int32_t> tokens(1500);
    for (int32_t& token : tokens) {
      token = static_cast<int32_t>(memory.random()() % (memory.random()() % 2 == 0 ? 3 : 700));
    }
    return EmbeddingBwdParams{memory.Ints(tokens), memory.Input({{1500, 16}}),
                              memory.InOut("dtable", {{700, 16}}, 1, kW)};
  });
  ExpectEqualsReference([](Memory& memory) {
    return EmbeddingBwdParams{memory.Ints({1, 0, 1, 1}), memory.Input({{4, 1100}}),
                              memory.InOut("dtable", {{2, 1100}}, 1, kW)};
  });
}

// Three quarters of the rows have one token; others of the same part of the vocabulary come
// between.
TEST(EmulatedCuda, EmbeddingBackwardOfATokenThatIsEverywhere) {
  for (const int64_t d : {8, 3}) {
    ExpectEqualsReference([d](Memory& memory) {
      std::vector<int32_t> tokens(400, 5);
      for (size_t t = 0; t < tokens.size(); t += 4) tokens[t] = t % 3 == 0 ? 5 + 264 : 6;
      return EmbeddingBwdParams{memory.Ints(tokens), memory.Input({{400, d}}),
                                memory.InOut("dtable", {{600, d}}, 1, kW)};
    });
  }
}

TEST(EmulatedCuda, CrossEntropyOfRowsOfManySteps) {
  for (const bool over_logits : {false, true}) {
    ExpectMatchesReference(
        [&](Memory& memory) {
          const Memory::Shape shape = {{3, 9004}};
          CrossEntropyParams p = {.logits = memory.Consumed(shape, 3, kW),
                                  .labels = memory.Ints({9003, -1, 0})};
          if (over_logits) {
            p.dlogits =
                TensorView::Matrix(p.logits.data, memory.storage(), 3, 9004,
                                   p.logits.stride[0] * SizeOf(kW) / SizeOf(memory.storage()));
            memory.AddResult("dlogits", p.dlogits);
          } else {
            p.dlogits = memory.Output("dlogits", shape);
          }
          p.loss_and_count = memory.InOut("loss_and_count", {{2}}, 0, DType::kFloat64);
          return p;
        },
        2);
  }
}

// A NaN logit must reach loss and gradient, minus infinity is a probability of zero.
TEST(EmulatedCuda, CrossEntropyOfNanAndMinusInfinity) {
  Memory memory(1);
  const CrossEntropyParams p = {memory.Input({{2, 40}}, 1, kW), memory.Ints({3, 5}),
                                memory.Output("dlogits", {{2, 40}}),
                                memory.InOut("loss_and_count", {{2}}, 0, DType::kFloat64)};
  for (int64_t i = 0; i < 40; ++i) {
    if (i != 5) SetElement(p.logits, 1, i, 0, -INFINITY);
  }
  memory.Seal();
  ASSERT_EQ(RunCall(Tested(), p, memory), absl::OkStatus());
  EXPECT_TRUE(std::isfinite(GetElement(p.loss_and_count, 0)));
  for (int64_t i = 0; i < 40; ++i) EXPECT_EQ(GetElement(p.dlogits, 1, i), 0) << i;
  SetElement(p.logits, 0, 17, 0, std::nan(""));
  memory.Seal();
  ASSERT_EQ(RunCall(Tested(), p, memory), absl::OkStatus());
  EXPECT_TRUE(std::isnan(GetElement(p.loss_and_count, 0)));
  EXPECT_TRUE(std::isnan(GetElement(p.dlogits, 0, 2)));
}

// The first row of the first op that met one; other rows are as they should be.
TEST(EmulatedCuda, BadTokensAreReportedAndSkipped) {
  Memory memory(1);
  const EmbeddingFwdParams forward = {memory.Ints({2, 9, -4, 0}), memory.Input({{5, 4}}),
                                      memory.Output("out", {{4, 4}})};
  CUstream_st stream;
  cuda::FaultWords fault = cuda::kNoFault;
  const cuda::LaunchContext context = {&stream, 132, fault.data()};
  cuda::Run(forward, {}, context);
  const absl::Status first = cuda::FaultStatus(fault);
  EXPECT_EQ(first.message(), "embedding: token 9 at row 1 is outside the vocabulary [0, 5)");
  for (int64_t i = 0; i < 4; ++i) {
    EXPECT_EQ(GetElement(forward.out, 3, i), GetElement(forward.table, 0, i));
  }
  std::vector<double> losses(1);
  const CrossEntropyParams loss = {
      .logits = memory.Input({{1, 4}}),
      .labels = memory.Ints({4}),
      .loss_and_count = memory.InOut("loss_and_count", {{2}}, 0, DType::kFloat64)};
  cuda::Run(loss, {losses.data(), 8}, context);
  EXPECT_EQ(cuda::FaultStatus(fault), first);
  EXPECT_EQ(GetElement(loss.loss_and_count, 1), 0);
}

TEST(EmulatedCuda, SinesAndCosinesOfLargeAngles) {
  std::mt19937_64 random(3);
  for (int power = -20; power <= 36; ++power) {
    for (int i = 0; i < 200; ++i) {
      const double angle = std::ldexp(static_cast<double>(random()) / 0x1p64 - 0.5, power + 1);
      const cuda::SinCosPair pair = cuda::SinCos(angle);
      ASSERT_NEAR(pair.sine, std::sin(angle), 4e-16) << angle;
      ASSERT_NEAR(pair.cosine, std::cos(angle), 4e-16) << angle;
    }
  }
}

// o and lse over keys of two runs, in double.
void ExpectMerges(Memory& memory, int64_t tokens, int64_t heads, int64_t head_dim) {
  const cuda::AttentionMergeParams p = {
      .part = memory.Input({{tokens, heads, head_dim}}, 1, DType::kBFloat16),
      .part_lse = memory.Input({{heads, tokens}, 3}, 3, kW),
      .o = memory.InOut("o", {{tokens, heads, head_dim}}, 1, kW),
      .lse = memory.InOut("lse", {{heads, tokens}, 5}, 3, kW)};
  for (int64_t t = 0; t < tokens; ++t) {
    if (t % 3 == 1) SetElement(p.part_lse, t % heads, t, 0, -INFINITY);
    if (t % 4 == 2) SetElement(p.lse, t % heads, t, 0, -INFINITY);
    if (t % 5 == 3) SetElement(p.lse, t % heads, t, 0, 3e38);
  }
  memory.Seal();
  const std::vector<Memory::Result> before = memory.Results();
  CUstream_st stream;
  cuda::Run(p, cuda::LaunchContext{&stream, 132, nullptr});
  ASSERT_EQ(stream.error, "");
  EXPECT_EQ(memory.Damage(), "");
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t h = 0; h < heads; ++h) {
      const double part_lse = GetElement(p.part_lse, h, t), lse = before[1].values[h * tokens + t];
      const double max = std::max(part_lse, lse);
      const double a = std::exp(lse - max), b = std::exp(part_lse - max);
      if (part_lse == -INFINITY) {
        ASSERT_EQ(GetElement(p.lse, h, t), lse);
      } else {
        ASSERT_NEAR(GetElement(p.lse, h, t), max + std::log(a + b), 1e-6 * (1 + std::abs(max)));
      }
      for (int64_t k = 0; k < head_dim; ++k) {
        const double o = before[0].values[(t * heads + h) * head_dim + k];
        const double part = GetElement(p.part, t, h, k);
        if (part_lse == -INFINITY) {
          ASSERT_EQ(GetElement(p.o, t, h, k), o);
        } else if (lse == -INFINITY) {
          ASSERT_EQ(GetElement(p.o, t, h, k), part);
        } else {
          ASSERT_NEAR(GetElement(p.o, t, h, k), (a * o + b * part) / (a + b), 2e-6);
        }
      }
    }
  }
}

TEST(EmulatedCuda, AttentionOverTwoRunsMerges) {
  for (const Memory::Alignment alignment : {Memory::Alignment::kElement, kSixteenBytes}) {
    for (const int64_t head_dim : {1, 13, 64, 128, 256}) {
      Memory memory(7, DType::kBFloat16, alignment);
      ExpectMerges(memory, 13, 3, head_dim);
    }
  }
}

// The last rows of tensors of more than 2^32 elements, of which only these are in memory and only
// the last blocks run, against a call on these rows alone.
class BeyondFourBillion : public ::testing::Test {
 protected:
  static constexpr int64_t kTail = 64;  // rows that are looked at

  // A tensor [rows, columns] of which the tail is `tail`.
  TensorView Huge(const TensorView& tail, int64_t rows) {
    const int64_t columns = tail.rank == 1 ? 1 : tail.shape[1];
    const int64_t bytes = rows * columns * SizeOf(tail.dtype);
    spaces_.push_back(std::make_unique<AddressSpace>(bytes, AddressSpace::Access::kOpen));
    TensorView huge = tail.rank == 1
                          ? TensorView::Vector(spaces_.back()->data(), tail.dtype, rows)
                          : TensorView::Matrix(spaces_.back()->data(), tail.dtype, rows, columns);
    CopyElements(tail, huge.Rows(rows - tail.shape[0], tail.shape[0]));
    return huge;
  }

  // `fields` of p are the tensors that grow; `last_blocks` reach over the tail.
  template <typename Params>
  void ExpectTailIsRight(Params p, const std::vector<TensorView Params::*>& fields, int64_t rows,
                         unsigned last_blocks) {
    Params huge = p;
    for (TensorView Params::*field : fields) huge.*field = Huge(p.*field, rows);
    std::vector<char> scratch(cuda::WorkspaceBytes(p, cuda::AttentionKernel::kOwn));
    std::vector<char> huge_scratch(cuda::WorkspaceBytes(huge, cuda::AttentionKernel::kOwn));
    const auto run = [](const Params& params, std::vector<char>& workspace, CUstream_st stream) {
      cuda::FaultWords fault = cuda::kNoFault;
      cuda::Run(params, {workspace.data(), static_cast<int64_t>(workspace.size())},
                cuda::LaunchContext{&stream, 132, fault.data()});
      EXPECT_EQ(stream.error, "");
      EXPECT_EQ(cuda::FaultStatus(fault), absl::OkStatus());
    };
    run(p, scratch, {});
    CUstream_st last;
    last.last_blocks = last_blocks;
    run(huge, huge_scratch, last);
    for (TensorView Params::*field : fields) {
      const TensorView& small = p.*field;
      const TensorView tail = (huge.*field).Rows(rows - small.shape[0], small.shape[0]);
      for (int64_t i = 0; i < small.shape[0]; ++i) {
        for (int64_t j = 0; j < small.shape[1]; ++j) {
          ASSERT_EQ(GetElement(tail, i, j), GetElement(small, i, j))
              << NameOf(OpParams(p)) << ", row " << i << ", column " << j;
        }
      }
    }
  }

  std::vector<std::unique_ptr<AddressSpace>> spaces_;
};

constexpr int64_t kElements = (int64_t{1} << 32) + (int64_t{1} << 14);

TEST_F(BeyondFourBillion, Vectors) {
  Memory memory(1, DType::kFloat32, kSixteenBytes);
  const auto vector = [&](const char* name) { return memory.InOut(name, {{1024}}); };
  const FillParams fill = {vector("dst"), 3};
  ExpectTailIsRight<FillParams>(fill, {&FillParams::dst}, kElements, 3);
  const AdamWParams adamw = {.param = vector("param"),
                             .grad = vector("grad"),
                             .m = vector("m"),
                             .v = memory.InOut("v", {{1024}}, 0),
                             .scale = memory.Input({{1}}),
                             .skip = memory.Ints({0}),
                             .lr = 0.1f};
  ExpectTailIsRight<AdamWParams>(
      adamw, {&AdamWParams::param, &AdamWParams::grad, &AdamWParams::m, &AdamWParams::v}, kElements,
      3);
  const RandomNormalParams normal = {.dst = vector("dst"), .seed = 5, .first_index = kElements};
  RandomNormalParams shifted = normal;
  shifted.dst = Huge(normal.dst, kElements);
  shifted.first_index = 1024;
  CUstream_st whole, last;
  last.last_blocks = 4;
  cuda::Run(normal, {}, cuda::LaunchContext{&whole, 132, nullptr});
  cuda::Run(shifted, {}, cuda::LaunchContext{&last, 132, nullptr});
  for (int64_t i = 0; i < 1024; ++i) {
    ASSERT_EQ(GetElement(shifted.dst, kElements - 1024 + i), GetElement(normal.dst, i));
  }
}

TEST_F(BeyondFourBillion, RowsWithoutGaps) {
  Memory memory(1, DType::kBFloat16, kSixteenBytes);
  constexpr int64_t kColumns = 128, kRows = kElements / kColumns;
  const auto rows = [&](const char* name) { return memory.InOut(name, {{kTail, kColumns}}); };
  ExpectTailIsRight<SwiGluFwdParams>(
      {rows("gate"), rows("up"), rows("out")},
      {&SwiGluFwdParams::gate, &SwiGluFwdParams::up, &SwiGluFwdParams::out}, kRows, 8);
  ExpectTailIsRight<SwiGluBwdParams>(
      {rows("dout"), rows("gate"), rows("up")},
      {&SwiGluBwdParams::dout, &SwiGluBwdParams::gate, &SwiGluBwdParams::up}, kRows, 8);
  ExpectTailIsRight<RmsNormFwdParams>(
      {.x = rows("x"), .weight = memory.Input({{kColumns}}), .y = rows("y")},
      {&RmsNormFwdParams::x, &RmsNormFwdParams::y}, kRows, 8);
  std::vector<int32_t> tokens(kTail);
  for (int64_t t = 0; t < kTail; ++t) tokens[t] = static_cast<int32_t>(t * 7 % 40);
  ExpectTailIsRight<EmbeddingFwdParams>(
      {memory.Ints(tokens), memory.Input({{40, kColumns}}), rows("out")},
      {&EmbeddingFwdParams::tokens, &EmbeddingFwdParams::out}, kRows, 8);
}

TEST_F(BeyondFourBillion, Logits) {
  Memory memory(1, DType::kBFloat16, kSixteenBytes);
  constexpr int64_t kVocab = 1024, kRows = kElements / kVocab;
  CrossEntropyParams p = {
      .logits = memory.InOut("logits", {{kTail, kVocab}}, 1, kW),
      .labels = memory.Ints(std::vector<int32_t>(kTail, 1000)),
      .dlogits = memory.InOut("dlogits", {{kTail, kVocab}}),
      .loss_and_count = memory.InOut("loss_and_count", {{2}}, 0, DType::kFloat64)};
  ExpectTailIsRight<CrossEntropyParams>(
      p, {&CrossEntropyParams::logits, &CrossEntropyParams::labels, &CrossEntropyParams::dlogits},
      kRows, kTail);
}

}  // namespace
}  // namespace upipe::kernels::testing
