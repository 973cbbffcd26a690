#include "common/spec/model_rules.h"

#include <algorithm>
#include <cmath>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "common/spec/model_presets.h"

namespace upipe {
namespace {

// Beyond any use; bounds what dynamic scaling makes of theta to a finite number.
constexpr double kMaxTheta = 1e15;
constexpr double kMaxFactor = 1 << 20;

bool HasScaling(const v1::RopeSpec& rope) {
  return rope.has_llama3() || rope.has_linear() || rope.has_dynamic() || rope.has_yarn();
}

// arXiv 2309.00071, eq. 22: the temperature of attention, as a factor of q and k.
double YarnAttentionFactor(double factor) { return 0.1 * std::log(factor) + 1; }

void CheckFactor(absl::string_view field, double factor, SpecChecker& checker) {
  if (factor >= 1 && factor <= kMaxFactor) return;
  checker.Fail(field,
               absl::StrCat("is required: a number from 1 to ",
                            FormatCount(static_cast<int64_t>(kMaxFactor)), "; it is ", factor));
}

void CheckOriginalContext(absl::string_view field, int64_t tokens, SpecChecker& checker) {
  checker.Required(field, tokens, 1, kMaxContext);
}

void CheckLlama3(const v1::Llama3RopeScaling& llama3, SpecChecker& checker) {
  CheckFactor("model.rope.llama3.factor", llama3.factor(), checker);
  const bool low = checker.Positive("model.rope.llama3.low_freq_factor", llama3.low_freq_factor());
  const bool high =
      checker.Positive("model.rope.llama3.high_freq_factor", llama3.high_freq_factor());
  if (low && high && llama3.high_freq_factor() <= llama3.low_freq_factor()) {
    checker.Fail("model.rope.llama3.high_freq_factor",
                 absl::StrCat(llama3.high_freq_factor(), " is not above low_freq_factor ",
                              llama3.low_freq_factor()));
  }
  CheckOriginalContext("model.rope.llama3.original_context", llama3.original_context(), checker);
}

void CheckDynamic(const v1::ModelSpec& model, SpecChecker& checker) {
  const v1::DynamicNtkRopeScaling& dynamic = model.rope().dynamic();
  CheckFactor("model.rope.dynamic.factor", dynamic.factor(), checker);
  CheckOriginalContext("model.rope.dynamic.original_context", dynamic.original_context(), checker);
  if (model.head_dim() == 2) {
    checker.Fail("model.rope.dynamic",
                 "scales theta by a power head_dim / (head_dim - 2), and head_dim is 2");
  }
}

void CheckYarn(const v1::YarnRopeScaling& yarn, SpecChecker& checker) {
  CheckFactor("model.rope.yarn.factor", yarn.factor(), checker);
  CheckOriginalContext("model.rope.yarn.original_context", yarn.original_context(), checker);
  const bool fast = checker.Positive("model.rope.yarn.beta_fast", yarn.beta_fast());
  const bool slow = checker.Positive("model.rope.yarn.beta_slow", yarn.beta_slow());
  if (fast && slow && yarn.beta_fast() <= yarn.beta_slow()) {
    checker.Fail("model.rope.yarn.beta_fast",
                 absl::StrCat(yarn.beta_fast(), " is not above beta_slow ", yarn.beta_slow()));
  }
  if (yarn.has_attention_factor()) {
    checker.PositiveFloat("model.rope.yarn.attention_factor", yarn.attention_factor());
  }
}

void CheckRope(const v1::ModelSpec& model, SpecChecker& checker) {
  const v1::RopeSpec& rope = model.rope();
  if (!(rope.theta() > 1 && rope.theta() <= kMaxTheta)) {
    checker.Fail("model.rope.theta",
                 absl::StrCat(rope.theta(), " is not a number above 1, at most ", kMaxTheta));
  }
  std::vector<std::string> scalings;
  if (rope.has_llama3()) scalings.push_back("llama3");
  if (rope.has_linear()) scalings.push_back("linear");
  if (rope.has_dynamic()) scalings.push_back("dynamic");
  if (rope.has_yarn()) scalings.push_back("yarn");
  if (scalings.size() > 1) {
    checker.Fail(absl::StrCat("model.rope.", scalings.back()),
                 absl::StrCat("is given beside ", scalings.front(), "; at most one scaling of ",
                              "llama3, linear, dynamic, yarn"));
  }
  if (rope.has_llama3()) CheckLlama3(rope.llama3(), checker);
  if (rope.has_linear()) {
    CheckFactor("model.rope.linear.factor", rope.linear().factor(), checker);
  }
  if (rope.has_dynamic()) CheckDynamic(model, checker);
  if (rope.has_yarn()) CheckYarn(rope.yarn(), checker);
}

// Reports what is wrong with where the model comes from. False when sizes that are absent are
// missing for that reason.
bool CheckSource(const v1::ModelSpec& model, SpecChecker& checker) {
  bool known = true;
  if (!model.preset().empty()) {
    const absl::StatusOr<v1::ModelSpec> preset = ModelPreset(model.preset());
    if (!preset.ok()) known = checker.Fail("model.preset", std::string(preset.status().message()));
  }
  if (!model.hf_config().empty()) {
    known = checker.Fail("model.hf_config",
                         "names a file that only whoever reads the job file can open: send the "
                         "fields it stands for, as `upipe submit` does");
  }
  return known;
}

// Tokens the scaling stretches the positions to; 0 when that is not known.
int64_t ReachOf(const v1::ModelSpec& model) {
  const v1::RopeSpec& rope = model.rope();
  double reach = static_cast<double>(model.max_position());
  const auto stretched = [&](double factor, int64_t original) {
    reach = std::max(reach, factor * static_cast<double>(original));
  };
  if (rope.has_llama3()) stretched(rope.llama3().factor(), rope.llama3().original_context());
  if (rope.has_linear()) stretched(rope.linear().factor(), model.max_position());
  if (rope.has_dynamic()) stretched(rope.dynamic().factor(), rope.dynamic().original_context());
  if (rope.has_yarn()) stretched(rope.yarn().factor(), rope.yarn().original_context());
  return static_cast<int64_t>(reach);
}

// A context beyond the positions the model was trained for, or that its RoPE scaling reaches.
std::vector<std::string> PositionWarnings(const v1::ModelSpec& model, int64_t context) {
  const int64_t reach = ReachOf(model);
  if (reach == 0 || context <= reach) return {};
  if (HasScaling(model.rope())) {
    return {absl::StrCat("train.context ", FormatCount(context), " is above the ",
                         FormatCount(reach), " positions that model.rope scales to: raise its ",
                         "factor")};
  }
  const int64_t factor = (context + reach - 1) / reach;
  return {absl::StrCat("train.context ", FormatCount(context), " is above the ", FormatCount(reach),
                       " positions the model was trained for (model.max_position) and model.rope ",
                       "has no scaling: a model trained on needs one, e.g. yarn: {factor: ", factor,
                       ", original_context: ", FormatTokenCount(reach),
                       "}; for a model trained from scratch remove or raise max_position")};
}

}  // namespace

v1::ModelSpec LaidOver(const v1::ModelSpec& base, const v1::ModelSpec& given) {
  v1::ModelSpec model = base;
  if (HasScaling(given.rope())) {
    v1::RopeSpec& rope = *model.mutable_rope();
    if (!given.rope().has_llama3()) rope.clear_llama3();
    if (!given.rope().has_linear()) rope.clear_linear();
    if (!given.rope().has_dynamic()) rope.clear_dynamic();
    if (!given.rope().has_yarn()) rope.clear_yarn();
  }
  model.MergeFrom(given);
  return model;
}

v1::ModelSpec WithModelDefaults(const v1::ModelSpec& given) {
  v1::ModelSpec model = given;
  if (!given.preset().empty()) {
    const absl::StatusOr<v1::ModelSpec> preset = ModelPreset(given.preset());
    if (preset.ok()) model = LaidOver(*preset, given);
  }
  if (!model.has_rms_norm_eps()) model.set_rms_norm_eps(1e-5);
  if (!model.has_tie_embeddings()) model.set_tie_embeddings(false);
  if (!model.has_init_stddev()) model.set_init_stddev(0.02);
  if (!model.has_qk_norm()) model.set_qk_norm(false);
  if (!model.has_qkv_bias()) model.set_qkv_bias(false);
  if (!model.has_causal()) model.set_causal(true);
  v1::RopeSpec& rope = *model.mutable_rope();
  if (!rope.has_theta()) rope.set_theta(500000);
  if (!rope.has_hf_parity()) rope.set_hf_parity(false);
  if (rope.has_yarn()) {
    v1::YarnRopeScaling& yarn = *rope.mutable_yarn();
    if (!yarn.has_beta_fast()) yarn.set_beta_fast(32);
    if (!yarn.has_beta_slow()) yarn.set_beta_slow(1);
    if (!yarn.has_attention_factor() && yarn.factor() >= 1 && yarn.factor() <= kMaxFactor) {
      yarn.set_attention_factor(YarnAttentionFactor(yarn.factor()));
    }
    if (!yarn.has_truncate()) yarn.set_truncate(true);
  }
  return model;
}

void CheckModel(const v1::ModelSpec& model, SpecChecker& checker) {
  const bool complete = CheckSource(model, checker);
  const auto size = [&](absl::string_view field, int64_t value, int64_t min, int64_t max) {
    return (value != 0 || complete) && checker.Required(field, value, min, max);
  };
  size("model.vocab_size", model.vocab_size(), 2, 1 << 20);
  size("model.hidden_size", model.hidden_size(), 1, 1 << 16);
  size("model.num_layers", model.num_layers(), 1, 1024);
  const bool heads = size("model.num_heads", model.num_heads(), 1, 1024);
  const bool kv_heads = size("model.num_kv_heads", model.num_kv_heads(), 1, 1024);
  if (heads && kv_heads && model.num_heads() % model.num_kv_heads() != 0) {
    checker.Fail(
        "model.num_kv_heads",
        absl::StrCat(model.num_kv_heads(), " does not divide num_heads ", model.num_heads(),
                     "; legal values: ", DivisorsOf(model.num_heads())));
  }
  if (size("model.head_dim", model.head_dim(), 2, 256) && model.head_dim() % 2 != 0) {
    checker.Fail("model.head_dim",
                 absl::StrCat(model.head_dim(), " is odd; rotary positions turn pairs of ",
                              "columns, so it must be even"));
  }
  size("model.intermediate_size", model.intermediate_size(), 1, 1 << 20);
  checker.PositiveFloat("model.rms_norm_eps", model.rms_norm_eps());
  CheckRope(model, checker);
  checker.PositiveFloat("model.init_stddev", model.init_stddev());
  if (model.has_window()) checker.InRange("model.window", model.window(), 1, kMaxContext);
  if (model.has_max_position()) {
    checker.InRange("model.max_position", model.max_position(), 1, kMaxContext);
  }
}

std::vector<std::string> ModelWarnings(const v1::ModelSpec& model, int64_t context) {
  std::vector<std::string> warnings = PositionWarnings(model, context);
  if (model.has_window() && model.window() >= context) {
    warnings.push_back(absl::StrCat("model.window ", FormatCount(model.window()),
                                    " is not below train.context ", FormatCount(context),
                                    ": it hides nothing"));
  }
  if (!model.causal()) {
    warnings.push_back(
        "model.causal is false: a query sees the token that its label is, so the loss says nothing "
        "about predicting text");
  }
  return warnings;
}

}  // namespace upipe
