// A model like the demo's, trained in fp32 and in bf16: the two loss curves lie closer together
// than curves of fp32 that differ only in their seed. What bf16 must not lose is shown by a
// control: the same run with master weights rounded to bf16 after every step leaves that noise.
#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "common/status.h"
#include "kernels/api/bfloat16.h"
#include "tests/support/engine/engine_harness.h"

namespace upipe {
namespace {

constexpr int kSeeds = 4;
constexpr int64_t kSteps = 60, kWindow = 10;
constexpr int64_t kVocabulary = 61, kContext = 256;

// Token t is three times the one before plus 1 in six draws of eight, the token 7 before in one,
// else chance.
testing::Sequence StructuredSequence(uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<int32_t> stream(kContext + 1);
  for (int64_t t = 0; t <= kContext; ++t) {
    const uint64_t draw = random() % 8;
    stream[t] = static_cast<int32_t>(random() % kVocabulary);
    if (t >= 7 && draw < 6) stream[t] = (3 * stream[t - 1] + 1) % kVocabulary;
    if (t >= 7 && draw == 6) stream[t] = stream[t - 7];
  }
  testing::Sequence sequence;
  sequence.tokens.assign(stream.begin(), stream.end() - 1);
  sequence.labels.assign(stream.begin() + 1, stream.end());
  return sequence;
}

struct Training {
  uint64_t seed = 0;
  bool bf16 = false;
  bool round_masters = false;
};

absl::Status RoundWeights(testing::Rank rank) {
  const kernels::TensorView weights = rank.step.parameters().weights();
  std::vector<float> host(weights.shape[0]);
  rank.context.device().CopyToHost(host.data(), weights.data, weights.num_bytes(),
                                   rank.context.stream());
  UPIPE_RETURN_IF_ERROR(rank.context.stream().Synchronize());
  for (float& value : host) value = kernels::BFloat16::From(value).ToFloat();
  rank.context.device().CopyFromHost(weights.data, host.data(), weights.num_bytes(),
                                     rank.context.stream());
  return rank.context.stream().Synchronize();
}

// Mean loss of each window of kWindow steps.
std::vector<double> Curve(const Training& training) {
  v1::JobSpec spec = testing::MakeSpec({.ranks = 2,
                                        .heads_per_rank = 1,
                                        .num_heads = 4,
                                        .num_kv_heads = 2,
                                        .head_dim = 8,
                                        .hidden_size = 32,
                                        .intermediate_size = 88,
                                        .vocab_size = kVocabulary,
                                        .context = kContext,
                                        .bf16 = training.bf16});
  spec.mutable_model()->set_init_stddev(0.06);
  spec.mutable_optimizer()->set_learning_rate(3e-3);
  spec.mutable_optimizer()->set_warmup_steps(8);
  spec.mutable_train()->set_steps(kSteps);
  spec.mutable_train()->set_seed(training.seed);
  const auto plan = testing::MakePlan(spec);
  EXPECT_TRUE(plan.ok()) << plan.status();
  std::vector<double> curve(kSteps / kWindow);
  const absl::Status status =
      testing::RunRanks({.plan = *plan}, [&](testing::Rank rank) -> absl::Status {
        for (int64_t step = 1; step <= kSteps; ++step) {
          UPIPE_ASSIGN_OR_RETURN(
              const auto result,
              testing::RunStep(rank, step, StructuredSequence(training.seed * kSteps + step)));
          if (training.round_masters) UPIPE_RETURN_IF_ERROR(RoundWeights(rank));
          if (rank.rank == 0) curve[(step - 1) / kWindow] += result.loss / kWindow;
        }
        return absl::OkStatus();
      });
  EXPECT_TRUE(status.ok()) << status;
  return curve;
}

TEST(LossCurve, Bf16LiesWithinTheNoiseOfFp32) {
  std::vector<std::vector<double>> fp32, bf16;
  for (uint64_t seed = 1; seed <= kSeeds; ++seed) {
    fp32.push_back(Curve({.seed = seed}));
    bf16.push_back(Curve({.seed = seed, .bf16 = true}));
  }
  const auto control = Curve({.seed = 1, .bf16 = true, .round_masters = true});
  EXPECT_LT(fp32[0].back(), 0.7 * fp32[0].front()) << "nothing was learned";
  double noise = 0;  // standard deviation over seeds
  for (int64_t window = 0; window < kSteps / kWindow; ++window) {
    double mean = 0, variance = 0;
    for (const auto& curve : fp32) mean += curve[window] / kSeeds;
    for (const auto& curve : fp32) {
      variance += (curve[window] - mean) * (curve[window] - mean) / (kSeeds - 1);
    }
    noise = std::sqrt(variance);
    for (int i = 0; i < kSeeds; ++i) {
      EXPECT_NEAR(bf16[i][window], fp32[i][window], noise) << "window " << window << " seed " << i;
    }
  }
  EXPECT_GT(std::abs(control.back() - fp32[0].back()), noise) << "the control stays in the noise";
}

}  // namespace
}  // namespace upipe
