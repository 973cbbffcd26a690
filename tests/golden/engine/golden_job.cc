#include "tests/golden/engine/golden_job.h"

#include <cstdlib>

#include "absl/strings/str_cat.h"
#include "common/check.h"
#include "tests/support/engine/engine_harness.h"

namespace upipe::golden {
namespace {

void SetScaling(const RopeScaling& from, v1::RopeSpec& rope) {
  if (from.type == "llama3") {
    auto& to = *rope.mutable_llama3();
    to.set_factor(from.factor);
    to.set_low_freq_factor(from.low_freq_factor);
    to.set_high_freq_factor(from.high_freq_factor);
    to.set_original_context(from.original_context);
  } else if (from.type == "linear") {
    rope.mutable_linear()->set_factor(from.factor);
  } else if (from.type == "dynamic") {
    rope.mutable_dynamic()->set_factor(from.factor);
    rope.mutable_dynamic()->set_original_context(from.original_context);
  } else {
    UPIPE_CHECK(from.type == "yarn") << from.type;
    auto& to = *rope.mutable_yarn();
    to.set_factor(from.factor);
    to.set_original_context(from.original_context);
    to.set_beta_fast(from.beta_fast);
    to.set_beta_slow(from.beta_slow);
    to.set_truncate(from.truncate);
    if (from.attention_factor) to.set_attention_factor(*from.attention_factor);
  }
}

}  // namespace

std::string DataFile(const std::string& name) {
  return absl::StrCat(std::getenv("UPIPE_SOURCE_DIR"), "/tests/golden/data/", name, ".golden");
}

v1::JobSpec SpecOf(const GoldenFile& file, const GoldenRun& run) {
  const auto& c = file.config();
  const auto& t = file.training();
  v1::JobSpec spec = testing::MakeSpec({.ranks = run.ranks,
                                        .heads_per_rank = run.heads_per_rank,
                                        .num_heads = c.heads,
                                        .num_kv_heads = c.kv_heads,
                                        .head_dim = c.head_dim,
                                        .hidden_size = c.hidden_size,
                                        .intermediate_size = c.intermediate_size,
                                        .vocab_size = c.vocab_size,
                                        .num_layers = c.layers,
                                        .context = c.context_tokens,
                                        .tie_embeddings = c.tied_embeddings,
                                        .qk_norm = c.qk_norm,
                                        .qkv_bias = c.qkv_bias,
                                        .bf16 = run.bf16,
                                        .backend = run.backend});
  spec.mutable_model()->set_rms_norm_eps(c.rms_norm_eps);
  auto& rope = *spec.mutable_model()->mutable_rope();
  rope.set_theta(c.rope_theta);
  rope.set_hf_parity(run.hf_parity);
  if (c.rope_scaling) SetScaling(*c.rope_scaling, rope);
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

}  // namespace upipe::golden
