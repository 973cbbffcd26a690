// The engine against Hugging Face transformers in float64 (tests/golden/make): logits, loss, every
// gradient, and 20 AdamW steps, on one rank and on several.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>

#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "tests/golden/engine/golden_file.h"
#include "tests/support/engine/engine_harness.h"

namespace upipe {
namespace {

using golden::GoldenFile;
using testing::Collector;
using testing::Rank;
using testing::RelativeError;
using testing::Tensors;

constexpr double kTensorBound =
    1e-5;  // logits, loss, gradients: ||delta|| / ||reference|| per tensor
constexpr double kLossBound = 1e-4;   // over 20 steps, nats
constexpr double kDeltaBound = 1e-3;  // weight changes

std::string DataFile(const std::string& name) {
  return absl::StrCat(std::getenv("UPIPE_SOURCE_DIR"), "/tests/golden/data/", name, ".golden");
}

v1::JobSpec SpecOf(const GoldenFile& file, int ranks, int64_t heads_per_rank,
                   const std::string& backend) {
  const auto& c = file.config();
  const auto& t = file.training();
  v1::JobSpec spec = testing::MakeSpec({.ranks = ranks,
                                        .heads_per_rank = heads_per_rank,
                                        .num_heads = c.heads,
                                        .num_kv_heads = c.kv_heads,
                                        .head_dim = c.head_dim,
                                        .hidden_size = c.hidden_size,
                                        .intermediate_size = c.intermediate_size,
                                        .vocab_size = c.vocab_size,
                                        .num_layers = c.layers,
                                        .context = c.context_tokens,
                                        .tie_embeddings = c.tied_embeddings,
                                        .backend = backend});
  spec.mutable_model()->set_rms_norm_eps(c.rms_norm_eps);
  auto& rope = *spec.mutable_model()->mutable_rope();
  rope.set_theta(c.rope_theta);
  rope.set_hf_parity(c.hf_parity);
  if (c.rope_llama3) {
    rope.mutable_llama3()->set_factor(c.rope_llama3->factor);
    rope.mutable_llama3()->set_low_freq_factor(c.rope_llama3->low_freq_factor);
    rope.mutable_llama3()->set_high_freq_factor(c.rope_llama3->high_freq_factor);
    rope.mutable_llama3()->set_original_context(c.rope_llama3->original_context);
  }
  auto& optimizer = *spec.mutable_optimizer();
  optimizer.set_learning_rate(t.peak_lr);
  optimizer.set_min_learning_rate(t.min_lr);
  optimizer.set_warmup_steps(t.warmup_steps);
  optimizer.set_beta1(t.beta1);
  optimizer.set_beta2(t.beta2);
  optimizer.set_eps(t.eps);
  optimizer.set_weight_decay(t.weight_decay);
  optimizer.set_clip_norm(t.clip_norm);
  spec.mutable_train()->set_steps(t.steps);
  return spec;
}

Tensors Weights(const GoldenFile& file) {
  Tensors weights;
  for (const std::string& name : file.parameters()) {
    const auto data = *file.Tensor<float>(absl::StrCat("weight/", name));
    weights[name].assign(data.begin(), data.end());
  }
  return weights;
}

testing::Sequence Padded(absl::Span<const int32_t> tokens, absl::Span<const int32_t> labels,
                         int64_t padded) {
  testing::Sequence sequence;
  sequence.tokens.assign(tokens.begin(), tokens.end());
  sequence.labels.assign(labels.begin(), labels.end());
  sequence.tokens.resize(padded, 0);
  sequence.labels.resize(padded, -1);
  return sequence;
}

struct Case {
  std::string file;
  int ranks = 1;
  int64_t heads_per_rank = 1;
  std::string backend = "cpu";
};

class EngineGolden : public ::testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    auto file = GoldenFile::Open(DataFile(GetParam().file));
    ASSERT_TRUE(file.ok()) << file.status();
    file_ = std::make_unique<GoldenFile>(*std::move(file));
    auto plan = testing::MakePlan(
        SpecOf(*file_, GetParam().ranks, GetParam().heads_per_rank, GetParam().backend));
    ASSERT_TRUE(plan.ok()) << plan.status();
    plan_ = *std::move(plan);
  }
  // Room for the logits a test looks at beside the plan's own bytes.
  testing::RankThreads Threads() const {
    return {.plan = plan_,
            .adjust = [](int, kernels::DeviceOptions& options) { options.arena_bytes += 1 << 20; }};
  }

  std::unique_ptr<GoldenFile> file_;
  v1::RunPlan plan_;
};

TEST_P(EngineGolden, LogitsLossAndEveryGradient) {
  const testing::Sequence sequence = Padded(
      *file_->Tensor<int32_t>("tokens"), *file_->Tensor<int32_t>("labels"), plan_.padded_context());
  const Tensors weights = Weights(*file_);
  const int64_t n = plan_.tokens_per_rank();
  const int64_t vocab = file_->config().vocab_size;
  std::vector<float> logits(plan_.padded_context() * vocab);
  std::vector<double> loss(2);
  Collector gradients;
  ASSERT_TRUE(
      testing::RunRanks(Threads(), [&](Rank rank) -> absl::Status {
        UPIPE_RETURN_IF_ERROR(testing::SetWeights(rank, weights));
        const auto host = sequence.Slice(rank.step.tokens(), rank.rank);
        UPIPE_ASSIGN_OR_RETURN(kernels::Buffer buffer,
                               rank.context.AllocateFloats(kernels::MemoryTag::kLogits, n * vocab));
        UPIPE_ASSIGN_OR_RETURN(model::Batch batch, rank.step.Upload(host));
        UPIPE_RETURN_IF_ERROR(rank.step.model().Evaluate(
            batch, 1,
            kernels::TensorView::Matrix(buffer.data(), kernels::DType::kFloat32, n, vocab)));
        rank.context.device().CopyToHost(logits.data() + rank.rank * n * vocab, buffer.data(),
                                         buffer.size_bytes(), rank.context.stream());
        UPIPE_ASSIGN_OR_RETURN(auto evaluated, rank.step.Evaluate(1, host));
        UPIPE_ASSIGN_OR_RETURN(auto result, rank.step.Run(1, host));
        if (rank.rank == 0) loss = {result.loss, evaluated.loss_sum / evaluated.valid_tokens};
        return gradients.Add(rank, rank.step.parameters().gradients(), 1 / result.valid_tokens);
      }).ok());
  const auto expected_logits = *file_->Tensor<float>("logits");
  logits.resize(expected_logits.size());  // drops the padding's rows
  EXPECT_LE(RelativeError(logits, expected_logits), kTensorBound);
  const double expected_loss = (*file_->Tensor<double>("loss"))[0];
  EXPECT_NEAR(loss[0], expected_loss, kTensorBound * expected_loss);
  EXPECT_NEAR(loss[1], expected_loss, kTensorBound * expected_loss);
  ASSERT_EQ(gradients.tensors().size(), file_->parameters().size());
  for (const std::string& name : file_->parameters()) {
    EXPECT_LE(RelativeError(gradients.tensors().at(name),
                            *file_->Tensor<float>(absl::StrCat("grad/", name))),
              kTensorBound)
        << name;
  }
}

TEST_P(EngineGolden, TwentyAdamWSteps) {
  const auto tokens = *file_->Tensor<int32_t>("train/tokens");
  const auto labels = *file_->Tensor<int32_t>("train/labels");
  const auto losses = *file_->Tensor<double>("train/losses");
  const auto norms = *file_->Tensor<double>("train/grad_norms");
  const int64_t length = file_->config().context_tokens;
  const Tensors weights = Weights(*file_);
  Collector trained;
  ASSERT_TRUE(
      testing::RunRanks(Threads(), [&](Rank rank) -> absl::Status {
        UPIPE_RETURN_IF_ERROR(testing::SetWeights(rank, weights));
        for (int64_t step = 1; step <= file_->training().steps; ++step) {
          const testing::Sequence sequence =
              Padded(tokens.subspan((step - 1) * length, length),
                     labels.subspan((step - 1) * length, length), plan_.padded_context());
          UPIPE_ASSIGN_OR_RETURN(
              auto result, rank.step.Run(step, sequence.Slice(rank.step.tokens(), rank.rank)));
          EXPECT_NEAR(result.loss, losses[step - 1], kLossBound) << "step " << step;
          EXPECT_NEAR(result.grad_norm, norms[step - 1], 1e-4 * norms[step - 1]) << "step " << step;
          EXPECT_FALSE(result.skipped);
        }
        return trained.Add(rank, rank.step.parameters().weights());
      }).ok());
  for (const std::string& name : file_->parameters()) {
    std::vector<float> delta = trained.tensors().at(name);
    for (size_t i = 0; i < delta.size(); ++i) delta[i] -= weights.at(name)[i];
    EXPECT_LE(RelativeError(delta, *file_->Tensor<float>(absl::StrCat("train/delta/", name))),
              kDeltaBound)
        << name;
  }
}

INSTANTIATE_TEST_SUITE_P(Goldens, EngineGolden,
                         ::testing::Values(Case{"tiny"}, Case{"tiny", 1, 4}, Case{"tiny", 2, 1},
                                           Case{"tiny", 3, 2}, Case{"tiny", 1, 1, "reference"},
                                           Case{"llama3_rope"}, Case{"llama3_rope", 4, 1},
                                           Case{"llama3_rope_hf_parity"}, Case{"multi_query"},
                                           Case{"multi_query", 3, 1},
                                           Case{"multi_query", 8, 1, "reference"}),
                         [](const auto& info) {
                           return absl::StrCat(info.param.file, "_ranks", info.param.ranks, "_u",
                                               info.param.heads_per_rank, "_", info.param.backend);
                         });

// A misreading of the hf_parity mode is invisible at 40 tokens, so the rotation itself is compared
// at far positions.
TEST(RopeGolden, AnglesAtFarPositions) {
  for (const char* name : {"llama3_rope", "llama3_rope_hf_parity"}) {
    auto file = GoldenFile::Open(DataFile(name));
    ASSERT_TRUE(file.ok()) << file.status();
    const auto positions = *file->Tensor<int32_t>("rope/positions");
    const auto cosines = *file->Tensor<double>("rope/cos");
    const auto sines = *file->Tensor<double>("rope/sin");
    const int64_t dim = file->config().head_dim;
    const int64_t stored = static_cast<int64_t>(cosines.size() / positions.size());
    kernels::DeviceOptions options;
    options.arena_bytes = 1 << 20;
    auto device = kernels::CreateDevice(options);
    ASSERT_TRUE(device.ok());
    const auto stream = (*device)->CreateStream("rope");
    const auto count = static_cast<int64_t>(positions.size());
    auto x =
        *(*device)->allocator().Allocate(kernels::MemoryTag::kWorkspace, count * dim * 4, *stream);
    auto p = *(*device)->allocator().Allocate(kernels::MemoryTag::kWorkspace, count * 8, *stream);
    std::vector<float> host(count * dim, 0);  // first half 1, second half 0: rotated = (cos, sin)
    for (int64_t t = 0; t < count; ++t) std::fill_n(host.begin() + t * dim, dim / 2, 1.0f);
    std::vector<int64_t> wide(positions.begin(), positions.end());
    (*device)->CopyFromHost(x.data(), host.data(), x.size_bytes(), *stream);
    (*device)->CopyFromHost(p.data(), wide.data(), p.size_bytes(), *stream);
    const auto spec = SpecOf(*file, 1, 1, "cpu");
    const auto view =
        kernels::TensorView::Matrix(x.data(), kernels::DType::kFloat32, count, dim).AsTensor3();
    ASSERT_TRUE(
        (*device)
            ->ops()
            .Enqueue(kernels::RopeParams{.src = view,
                                         .dst = view,
                                         .positions = kernels::TensorView::Vector(
                                             p.data(), kernels::DType::kInt64, count),
                                         .config = model::ModelConfig::From(spec.model()).rope},
                     {}, *stream)
            .ok());
    (*device)->CopyToHost(host.data(), x.data(), x.size_bytes(), *stream);
    ASSERT_TRUE(stream->Synchronize().ok());
    for (int64_t t = 0; t < count; ++t) {
      const double tolerance = 2e-7;
      for (int64_t i = 0; i < dim / 2; ++i) {
        EXPECT_NEAR(host[t * dim + i], cosines[t * stored + i], tolerance)
            << name << " position " << positions[t];
        EXPECT_NEAR(host[t * dim + dim / 2 + i], sines[t * stored + i], tolerance) << name;
      }
    }
  }
}

}  // namespace
}  // namespace upipe
