// The released code's closed form against what its authors report: peaks, longest contexts, what
// runs out of memory and what does not, and the saving in both ways of counting.
#include "planner/released_model.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "common/check.h"
#include "common/spec/model_presets.h"
#include "common/spec/model_rules.h"
#include "planner/device_file.h"

namespace upipe::planner {
namespace {

using testing::HasSubstr;
using testing::Not;

constexpr int64_t kK = 1024;
constexpr int64_t kM = 1024 * kK;
constexpr double kGiB = 1 << 30;

v1::ModelSpec Preset(const char* name) {
  const auto model = ModelPreset(name);
  UPIPE_CHECK(model.ok()) << model.status();
  return WithModelDefaults(*model);
}

// The paper's 32B is Qwen3 32B in width and depth, with Llama's tokenizer and without q/k-norm.
v1::ModelSpec Paper32B() {
  v1::ModelSpec model = Preset("qwen3-32b");
  model.set_vocab_size(128256);
  model.set_qk_norm(false);
  return model;
}

// As deploy/devices/h100-80gb.yaml has it, with the sources.
v1::DeviceFile H100() {
  auto device = FindDevice("h100-80gb", /*folder=*/"");
  UPIPE_CHECK(device.ok()) << device.status();
  return *std::move(device);
}

ReleasedSetup Eight(ReleasedCode code, int64_t context) {
  return {.code = code,
          .model = Preset("llama3-8b"),
          .context = context,
          .ulysses_ranks = 8,
          .ring_ranks = 1,
          .device = H100()};
}
ReleasedSetup Sixteen(ReleasedCode code, const v1::ModelSpec& model, int64_t context) {
  return {.code = code,
          .model = model,
          .context = context,
          .ulysses_ranks = 8,
          .ring_ranks = 2,
          .device = H100()};
}

ReleasedMemory Of(const ReleasedSetup& setup) {
  const auto memory = ReleasedMemoryOf(setup);
  UPIPE_CHECK(memory.ok()) << memory.status();
  return *memory;
}

void ExpectGiB(const ReleasedSetup& setup, double reported) {
  const double peak = static_cast<double>(Of(setup).peak_bytes) / kGiB;
  EXPECT_NEAR(peak, reported, 0.10 * reported) << setup.context << " tokens";
}

TEST(ReleasedModel, ReportedPeaksOfEightBillionParameters) {
  ExpectGiB(Eight(ReleasedCode::kUpipe, 128 * kK), 21.1);
  ExpectGiB(Eight(ReleasedCode::kUpipe, 3 * kM), 51.1);
  ExpectGiB(Eight(ReleasedCode::kUlysses, 3 * kM), 64.6);
}

TEST(ReleasedModel, ReportedPeakOfThirtyTwoBillionParametersOnTwoNodes) {
  ExpectGiB(Sixteen(ReleasedCode::kUpipe, Paper32B(), 128 * kK), 39.98);
}

// Read off a chart, to half a GiB.
TEST(ReleasedModel, ReportedPeaksOfEightBillionParametersOnTwoNodes) {
  const v1::ModelSpec model = Preset("llama3-8b");
  ExpectGiB(Sixteen(ReleasedCode::kUpipe, model, 512 * kK), 15.8);
  ExpectGiB(Sixteen(ReleasedCode::kUpipe, model, 2 * kM), 26.5);
  ExpectGiB(Sixteen(ReleasedCode::kUpipe, model, 4 * kM), 40.8);
  ExpectGiB(Sixteen(ReleasedCode::kUpipe, model, 6 * kM), 55.1);
  ExpectGiB(Sixteen(ReleasedCode::kUpipe, model, 8 * kM), 69.6);
}

TEST(ReleasedModel, WhatRunsOutOfMemoryInThePaperDoesSoHere) {
  const v1::ModelSpec model32 = Paper32B();
  EXPECT_TRUE(Of(Eight(ReleasedCode::kUpipe, 5 * kM)).fits);
  EXPECT_FALSE(Of(Eight(ReleasedCode::kUlysses, 5 * kM)).fits);
  EXPECT_FALSE(Of(Eight(ReleasedCode::kUlysses, 4 * kM)).fits);
  EXPECT_TRUE(Of(Sixteen(ReleasedCode::kUpipe, model32, 4 * kM)).fits);
  EXPECT_FALSE(Of(Sixteen(ReleasedCode::kUpipe, model32, 5 * kM)).fits);
  EXPECT_TRUE(Of(Sixteen(ReleasedCode::kUlysses, model32, 2 * kM)).fits);
  EXPECT_FALSE(Of(Sixteen(ReleasedCode::kUlysses, model32, 3 * kM)).fits);
}

TEST(ReleasedModel, LongestContexts) {
  const ReleasedMemory ulysses = Of(Eight(ReleasedCode::kUlysses, 128 * kK));
  EXPECT_GE(ulysses.context_max, 3 * kM);
  EXPECT_LT(ulysses.context_max, 4.5 * kM);
  const ReleasedMemory upipe = Of(Eight(ReleasedCode::kUpipe, 128 * kK));
  EXPECT_GE(upipe.context_max, 5 * kM);
  EXPECT_LT(upipe.context_max, 6 * kM);
  // The longest fits and the next does not.
  EXPECT_TRUE(Of(Eight(ReleasedCode::kUpipe, upipe.context_max)).fits);
  EXPECT_FALSE(Of(Eight(ReleasedCode::kUpipe, upipe.context_max + 16)).fits);
}

// 9.5 and 14.5 hidden states, the input of layer 0, and the log-sum-exp: per token, whatever is
// held at any context.
TEST(ReleasedModel, BytesPerTokenOfEightBillionParameters) {
  const auto slope = [](ReleasedCode code) {
    return static_cast<double>(Of(Eight(code, 3 * kM)).peak_bytes -
                               Of(Eight(code, 2 * kM)).peak_bytes) /
           kM;
  };
  const double x = 2.0 * 4096 / 8, log_sum_exp = 4.0 * 32 / 8;
  EXPECT_EQ(slope(ReleasedCode::kUpipe), 10.5 * x + log_sum_exp);
  EXPECT_EQ(slope(ReleasedCode::kUlysses), 15.5 * x + log_sum_exp);
}

// The sums of the other moments in hidden states X; H D = d, a stage is a quarter of X.
TEST(ReleasedModel, OtherMomentsOfEightBillionParameters) {
  const int64_t tokens = 3 * kM / 8, x = 2 * tokens * 4096, log_sum_exp = 4 * tokens * 32;
  const int64_t gradients = 4 * 2 * int64_t{128256} * 4096;
  const auto bytes_of = [](ReleasedCode code, const std::string& name) {
    for (const auto& moment : Of(Eight(code, 3 * kM)).moments) {
      if (moment.name == name) return moment.bytes;
    }
    ADD_FAILURE() << "no moment " << name;
    return int64_t{0};
  };
  constexpr auto kUpipe = ReleasedCode::kUpipe, kUlysses = ReleasedCode::kUlysses;
  EXPECT_EQ(bytes_of(kUpipe, "forward, a stage"), 3 * x + 7 * x / 4 + log_sum_exp);
  EXPECT_EQ(bytes_of(kUpipe, "forward, heads put in order"), 4 * x + log_sum_exp);
  EXPECT_EQ(bytes_of(kUlysses, "forward"), 3 * x + 2 * x + 2 * x / 4 + log_sum_exp);
  for (const ReleasedCode code : {kUpipe, kUlysses}) {
    EXPECT_EQ(bytes_of(code, "MLP backward"),
              8 * x + log_sum_exp + gradients + 10 * int64_t{4096} * 14336);
    // 32 chunks of 12,288 tokens, to the next power of two.
    EXPECT_EQ(bytes_of(code, "loss"), 3 * x + gradients + 2 * int64_t{128256} * 16384);
  }
}

// A share of the fp32 states, embedding and head whole, the whole RoPE table, an X.
TEST(ReleasedModel, HeldThroughout) {
  int64_t sum = 0;
  for (const auto& term : Of(Eight(ReleasedCode::kUpipe, 3 * kM)).throughout) sum += term.bytes;
  EXPECT_EQ(sum, 16 * ParameterCount(Preset("llama3-8b")) / 8 + 2 * 2 * int64_t{128256} * 4096 +
                     4 * 3 * kM * 128 + 2 * (3 * kM / 8) * 4096);
}

// Fewer K/V heads than Ulysses ranks are repeated until there are as many: kv is hh / 2 here.
TEST(ReleasedModel, FewKvHeadsAreRepeated) {
  const auto peak = [](int64_t context) {
    ReleasedSetup setup = Eight(ReleasedCode::kUlysses, context);
    setup.ulysses_ranks = 16;
    return Of(setup).peak_bytes;
  };
  const int64_t x = 2 * 4096 / 16, rope = 4 * 128, log_sum_exp = 4 * 32 / 16;
  EXPECT_EQ((peak(3 * kM) - peak(2 * kM)) / kM, 5 * x + 8 * x + 8 * x / 2 + rope + log_sum_exp);
}

TEST(ReleasedModel, ThePeakIsAttentionsBackwardAtLengthAndItsTermsAddUp) {
  for (const ReleasedCode code : {ReleasedCode::kUpipe, ReleasedCode::kUlysses}) {
    const ReleasedMemory memory = Of(Eight(code, 3 * kM));
    EXPECT_THAT(memory.moments[memory.peak_moment].name, HasSubstr("attention backward"));
    int64_t sum = 0;
    for (const auto& term : memory.throughout) sum += term.bytes;
    for (const auto& term : memory.moments[memory.peak_moment].terms) sum += term.bytes;
    EXPECT_EQ(memory.peak_bytes, sum);
    for (const auto& moment : memory.moments) {
      EXPECT_LE(moment.bytes, memory.moments[memory.peak_moment].bytes) << moment.name;
    }
  }
}

TEST(ReleasedModel, TheDeviceCountsWhatTheAllocatorDoesNot) {
  ReleasedSetup setup = Eight(ReleasedCode::kUpipe, 3 * kM);
  const ReleasedMemory plain = Of(setup);
  EXPECT_EQ(plain.device_bytes, plain.peak_bytes + setup.device.context().bytes() +
                                    setup.device.communicator().bytes());
  setup.device.mutable_fragmentation()->set_value(0.5);
  const ReleasedMemory broken = Of(setup);
  EXPECT_EQ(broken.peak_bytes, plain.peak_bytes);
  EXPECT_NEAR(static_cast<double>(broken.device_bytes - plain.device_bytes),
              static_cast<double>(plain.peak_bytes), 16.0);
  EXPECT_FALSE(broken.fits);
}

TEST(ReleasedModel, LayerInputsButTheFirstWaitOnTheHostWithRowsOfTheRopeTable) {
  const ReleasedMemory memory = Of(Eight(ReleasedCode::kUpipe, kM));
  EXPECT_EQ(memory.host_bytes, 31 * (kM / 8) * (2 * 4096 + 8 * 64));
}

TEST(ReleasedModel, TheSavingInBothCounts) {
  const AttentionSaving saving = ReleasedAttentionSaving(Paper32B(), 8);
  EXPECT_DOUBLE_EQ(saving.paper, 0.875);
  EXPECT_NEAR(saving.forward, 1 - 4.0 / 18, 1e-12);    // 78 %
  EXPECT_NEAR(saving.backward, 1 - 12.0 / 56, 1e-12);  // 79 %
  // Where K = H the two counts of the forward pass agree.
  v1::ModelSpec equal = Paper32B();
  equal.set_num_kv_heads(64);
  EXPECT_DOUBLE_EQ(ReleasedAttentionSaving(equal, 8).forward, 0.875);
  EXPECT_DOUBLE_EQ(ReleasedAttentionSaving(equal, 8).backward, 1 - 12.0 / 8 / 10);
}

TEST(ReleasedModel, WhatTheReleasedCodeCannotRunIsRefused) {
  ReleasedSetup setup = Eight(ReleasedCode::kUpipe, 128 * kK);
  setup.ulysses_ranks = 6;
  EXPECT_EQ(ReleasedMemoryOf(setup).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(ReleasedMemoryOf(setup).status().message(), HasSubstr("6 Ulysses ranks"));
  setup.ulysses_ranks = 64;
  EXPECT_THAT(ReleasedMemoryOf(setup).status().message(), HasSubstr("64 Ulysses ranks"));
  setup = Eight(ReleasedCode::kUpipe, 128 * kK + 8);
  EXPECT_THAT(ReleasedMemoryOf(setup).status().message(), HasSubstr("131088 would be"));
  setup = Eight(ReleasedCode::kUpipe, 0);
  EXPECT_FALSE(ReleasedMemoryOf(setup).ok());
  setup = Eight(ReleasedCode::kUpipe, 128 * kK);
  setup.ring_ranks = 0;
  EXPECT_THAT(ReleasedMemoryOf(setup).status().message(), HasSubstr("no mesh"));
}

TEST(ReleasedModel, RenderedAsATable) {
  const ReleasedSetup setup = Eight(ReleasedCode::kUpipe, 5 * kM);
  const std::string text = RenderReleased(setup, Of(setup));
  EXPECT_THAT(text, HasSubstr("not this engine"));
  EXPECT_THAT(text, HasSubstr("C 8 x R 1"));
  EXPECT_THAT(text, HasSubstr("at \"attention backward, a stage\""));
  EXPECT_THAT(text, HasSubstr(": fits"));
  EXPECT_THAT(text, HasSubstr("75.0 % by the paper's count (1 - U/H)"));
  const ReleasedSetup ulysses = Eight(ReleasedCode::kUlysses, 5 * kM);
  const std::string other = RenderReleased(ulysses, Of(ulysses));
  EXPECT_THAT(other, HasSubstr(": does not fit"));
  EXPECT_THAT(other, Not(HasSubstr("saving")));
}

}  // namespace
}  // namespace upipe::planner
