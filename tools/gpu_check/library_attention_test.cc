// Attention of the tested backend against the reference where its results are bf16 first, as
// cuDNN's are: dq, dk, dv and wide outputs too, log-sum-exp apart.
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "tests/kernels/kernels/support/attention_case.h"
#include "tests/kernels/kernels/support/op_check.h"

namespace upipe::kernels::testing {
namespace {

void ExpectWithinTheBoundOfBf16(const BuildCall& build) {
  Memory memory(3, DType::kBFloat16, Memory::Alignment::kSixteenBytes);
  const OpParams params = build(memory);
  memory.Seal();
  const auto results = [&](OpTable& ops) {
    memory.Restore();
    EXPECT_EQ(RunCall(ops, params, memory), absl::OkStatus());
    return memory.Results();
  };
  std::vector<Memory::Result> reference = results(Reference());
  for (Memory::Result& result : reference) {
    if (result.name != "lse") result.dtype = DType::kBFloat16;
  }
  const std::vector<Memory::Result> naive = results(Naive());
  ExpectWithinTheBound(results(Tested()), naive, reference, "tested");
}

class LibraryAttention : public ::testing::TestWithParam<AttentionCase> {};

TEST_P(LibraryAttention, ForwardWithinTheBound) {
  ExpectWithinTheBoundOfBf16([](Memory& memory) { return ForwardCall(GetParam(), memory); });
}

TEST_P(LibraryAttention, WideOutputWithinTheBound) {
  AttentionCase c = GetParam();
  c.wide_output = true;
  ExpectWithinTheBoundOfBf16([&](Memory& memory) { return ForwardCall(c, memory); });
}

TEST_P(LibraryAttention, MergeWithinTheBound) {
  AttentionCase c = GetParam();
  c.merge = true;
  ExpectWithinTheBoundOfBf16([&](Memory& memory) { return ForwardCall(c, memory); });
}

TEST_P(LibraryAttention, BackwardWithinTheBound) {
  ExpectWithinTheBoundOfBf16([](Memory& memory) { return BackwardCall(GetParam(), memory); });
}

std::vector<AttentionCase> Cases() {
  std::vector<AttentionCase> cases = AttentionCases();
  // Where o is wide, the bound needs scores of a few hundred.
  for (AttentionCase& c : cases) c.score_scale = std::min(c.score_scale, 300.0);
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Each, LibraryAttention, ::testing::ValuesIn(Cases()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace upipe::kernels::testing
