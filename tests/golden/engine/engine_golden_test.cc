// The engine against Hugging Face transformers in float64 (tests/golden/make): logits, loss, every
// gradient, and 20 AdamW steps, on one rank and on several, in fp32 and in bf16.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <ostream>

#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "kernels/cpu/isa.h"
#include "tests/golden/engine/golden_file.h"
#include "tests/golden/engine/golden_job.h"
#include "tests/support/engine/engine_harness.h"

namespace upipe {
namespace {

using golden::GoldenFile;
using testing::Collector;
using testing::Rank;
using testing::RelativeError;
using testing::Tensors;

Tensors Weights(const GoldenFile& file) {
  Tensors weights;
  for (const std::string& name : file.parameters()) {
    const auto data = *file.Tensor<float>(absl::StrCat("weight/", name));
    weights[name].assign(data.begin(), data.end());
  }
  return weights;
}

testing::Sequence SequenceOf(absl::Span<const int32_t> tokens, absl::Span<const int32_t> labels) {
  testing::Sequence sequence;
  sequence.tokens.assign(tokens.begin(), tokens.end());
  sequence.labels.assign(labels.begin(), labels.end());
  return sequence;
}

struct Case {
  std::string file;
  golden::GoldenRun run;
  bool bf16_products = true;  // of the processor, where it has them; else converted to fp32
};

std::string NameOf(const Case& c) {
  return absl::StrCat(c.file, "_ranks", c.run.ranks, "_u", c.run.heads_per_rank, "_", c.run.backend,
                      c.run.bf16 ? "_bf16" : "", c.bf16_products ? "" : "_converted",
                      c.run.hf_parity ? "_hf_parity" : "");
}
void PrintTo(const Case& c, std::ostream* out) { *out << NameOf(c); }

class EngineGolden : public ::testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    auto file = GoldenFile::Open(golden::DataFile(GetParam().file));
    ASSERT_TRUE(file.ok()) << file.status();
    file_ = std::make_unique<GoldenFile>(*std::move(file));
    auto plan = testing::MakePlan(golden::SpecOf(*file_, GetParam().run));
    ASSERT_TRUE(plan.ok()) << plan.status();
    plan_ = *std::move(plan);
    kernels::SetBf16ProductsForTest(GetParam().bf16_products);
  }
  void TearDown() override { kernels::SetBf16ProductsForTest(true); }
  // Room for the logits a test looks at beside the plan's own bytes.
  testing::RankThreads Threads() const {
    return {.plan = plan_,
            .adjust = [](int, kernels::DeviceOptions& options) { options.arena_bytes += 1 << 20; }};
  }
  // Bounds of ||delta|| / ||reference||. In bf16: three times the error of PyTorch's own bf16 run,
  // and half an epsilon of bf16 for tensors. Losses and norms are not stored in bf16.
  void ExpectNear(absl::Span<const float> actual, const std::string& name,
                  double fp32_bound) const {
    const double bound =
        Bf16() ? 3 * Bf16Error(name) + upipe::testing::kHalfEpsilonOfBf16 : fp32_bound;
    EXPECT_LE(RelativeError(actual, *file_->Tensor<float>(name)), bound) << name;
  }
  // One number a step: each of them in fp32, all together in bf16.
  void ExpectCurveNear(const std::vector<double>& actual, const std::string& name) const {
    const auto expected = *file_->Tensor<double>(name);
    ASSERT_EQ(actual.size(), expected.size()) << name;
    double delta = 0, norm = 0;
    for (size_t i = 0; i < actual.size(); ++i) {
      delta += (actual[i] - expected[i]) * (actual[i] - expected[i]);
      norm += expected[i] * expected[i];
      if (Bf16()) continue;
      EXPECT_NEAR(actual[i], expected[i], kCurveBound * expected[i]) << name << " step " << i + 1;
    }
    if (Bf16()) {
      EXPECT_LE(std::sqrt(delta / norm), 3 * Bf16Error(name)) << name;
    }
  }
  // A single loss of PyTorch's can be exact by luck: the curve's error stands in where it is
  // larger.
  double LossBound() const {
    return Bf16() ? 3 * std::max(Bf16Error("loss"), Bf16Error("train/losses")) : kTensorBound;
  }
  bool Bf16() const { return GetParam().run.bf16; }
  double Bf16Error(const std::string& name) const { return *file_->PytorchError("bf16", name); }

  static constexpr double kTensorBound = 1e-5;  // logits, loss, gradients
  static constexpr double kDeltaBound = 1e-3;   // weight changes over 20 steps
  static constexpr double kCurveBound = 2.5e-5;

  std::unique_ptr<GoldenFile> file_;
  v1::RunPlan plan_;
};

TEST_P(EngineGolden, LogitsLossAndEveryGradient) {
  const testing::Sequence sequence =
      SequenceOf(*file_->Tensor<int32_t>("tokens"), *file_->Tensor<int32_t>("labels"));
  const Tensors weights = Weights(*file_);
  const int64_t n = plan_.tokens_per_rank();
  const int64_t vocab = file_->config().vocab_size;
  std::vector<float> logits(plan_.padded_context() * vocab);
  std::vector<double> loss(2);
  Collector gradients;
  const absl::Status status = testing::RunRanks(Threads(), [&](Rank rank) -> absl::Status {
    UPIPE_RETURN_IF_ERROR(testing::SetWeights(rank, weights));
    const testing::RankTokens part = sequence.Slice(rank.step.tokens(), rank.rank);
    UPIPE_ASSIGN_OR_RETURN(kernels::Buffer buffer,
                           rank.context.AllocateFloats(kernels::MemoryTag::kLogits, n * vocab));
    UPIPE_RETURN_IF_ERROR(rank.step.model().Evaluate(
        rank.step.Upload(part.host()), 1,
        kernels::TensorView::Matrix(buffer.data(), kernels::DType::kFloat32, n, vocab)));
    rank.context.device().CopyToHost(logits.data() + rank.rank * n * vocab, buffer.data(),
                                     buffer.size_bytes(), rank.context.stream());
    UPIPE_ASSIGN_OR_RETURN(auto by_position, rank.step.Evaluate(1, part.host()));
    UPIPE_ASSIGN_OR_RETURN(auto result, rank.step.Run(1, {part.host()}));
    const auto evaluated = optim::TotalOf(by_position);
    if (rank.rank == 0) loss = {result.loss, evaluated.loss / evaluated.count};
    return gradients.Add(rank, rank.step.parameters().gradients(), 1 / result.valid_tokens);
  });
  ASSERT_TRUE(status.ok()) << status;
  logits.resize(file_->Tensor<float>("logits")->size());  // drops the padding's rows
  ExpectNear(logits, "logits", kTensorBound);
  const double expected_loss = (*file_->Tensor<double>("loss"))[0];
  for (const double value : loss) {
    EXPECT_NEAR(value, expected_loss, LossBound() * expected_loss);
  }
  ASSERT_EQ(gradients.tensors().size(), file_->parameters().size());
  for (const std::string& name : file_->parameters()) {
    ExpectNear(gradients.tensors().at(name), absl::StrCat("grad/", name), kTensorBound);
  }
}

TEST_P(EngineGolden, TwentyAdamWSteps) {
  const auto tokens = *file_->Tensor<int32_t>("train/tokens");
  const auto labels = *file_->Tensor<int32_t>("train/labels");
  const int64_t length = file_->config().context_tokens;
  const Tensors weights = Weights(*file_);
  std::vector<double> losses, norms;
  Collector trained;
  const absl::Status status = testing::RunRanks(Threads(), [&](Rank rank) -> absl::Status {
    UPIPE_RETURN_IF_ERROR(testing::SetWeights(rank, weights));
    for (int64_t step = 1; step <= file_->training().steps; ++step) {
      const testing::Sequence sequence = SequenceOf(tokens.subspan((step - 1) * length, length),
                                                    labels.subspan((step - 1) * length, length));
      UPIPE_ASSIGN_OR_RETURN(auto result, testing::RunStep(rank, step, sequence));
      EXPECT_FALSE(result.skipped);
      if (rank.rank != 0) continue;
      losses.push_back(result.loss);
      norms.push_back(result.grad_norm);
    }
    return trained.Add(rank, rank.step.parameters().weights());
  });
  ASSERT_TRUE(status.ok()) << status;
  ExpectCurveNear(losses, "train/losses");
  ExpectCurveNear(norms, "train/grad_norms");
  for (const std::string& name : file_->parameters()) {
    std::vector<float> delta = trained.tensors().at(name);
    for (size_t i = 0; i < delta.size(); ++i) delta[i] -= weights.at(name)[i];
    ExpectNear(delta, absl::StrCat("train/delta/", name), kDeltaBound);
  }
}

// Each model at 1 rank on both backends, and over ranks that its heads, K/V heads and context do
// and do not divide by.
std::vector<Case> Cases() {
  std::vector<Case> cases;
  const auto add = [&](const std::vector<std::string>& models,
                       const std::vector<golden::GoldenRun>& runs) {
    for (const std::string& model : models) {
      for (golden::GoldenRun run : runs) {
        for (const bool bf16 : {false, true}) {
          run.bf16 = bf16;
          cases.push_back({model, run});
        }
      }
    }
  };
  add({"qwen3", "qwen2_5"},
      {{}, {1, 4}, {2, 1}, {3, 2}, {4, 1}, {8, 1}, {1, 1, "reference"}, {3, 1, "reference"}});
  add({"tiny"}, {{}, {1, 4}, {2, 1}, {3, 2}, {1, 1, "reference"}});
  const std::vector<std::string> scaled = {"llama3_rope", "linear_rope", "dynamic_rope",
                                           "yarn_rope", "qwen3_yarn"};
  add(scaled, {{}, {4, 1}, {2, 2, "reference"}});
  add({"multi_query"}, {{}, {3, 1}, {8, 1, "reference"}});
  for (const std::string& model : scaled) cases.push_back({model, {.hf_parity = true}});
  for (const char* model : {"qwen3", "qwen2_5", "llama3_rope"}) {
    cases.push_back({model, {.ranks = 2, .bf16 = true}, /*bf16_products=*/false});
  }
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Goldens, EngineGolden, ::testing::ValuesIn(Cases()),
                         [](const auto& info) { return NameOf(info.param); });

}  // namespace
}  // namespace upipe
