#include "common/spec/job_spec.h"

#include <gmock/gmock.h>
#include <google/protobuf/text_format.h>
#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <string>
#include <vector>

namespace upipe {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

v1::JobSpec LegalSpec() {
  v1::JobSpec spec;
  spec.set_name("demo");
  v1::ModelSpec& model = *spec.mutable_model();
  model.set_vocab_size(257);
  model.set_hidden_size(128);
  model.set_num_layers(2);
  model.set_num_heads(8);
  model.set_num_kv_heads(2);
  model.set_head_dim(16);
  model.set_intermediate_size(352);
  spec.mutable_data()->set_path("data");
  spec.mutable_parallel()->set_ranks(4);
  spec.mutable_parallel()->set_method(v1::METHOD_UPIPE);
  spec.mutable_parallel()->set_heads_per_stage(4);
  spec.mutable_train()->set_context(8192);
  spec.mutable_train()->set_steps(60);
  return spec;
}

TEST(JobSpec, LegalSpecHasNoViolationsWithAndWithoutDefaults) {
  EXPECT_THAT(ValidateJobSpec(LegalSpec()), IsEmpty());
  EXPECT_THAT(ValidateJobSpec(WithDefaults(LegalSpec())), IsEmpty());
  EXPECT_THAT(JobSpecWarnings(LegalSpec()), IsEmpty());
}

TEST(JobSpec, DefaultsAreThoseOfTheProto) {
  const v1::JobSpec spec = WithDefaults(LegalSpec());
  EXPECT_EQ(spec.model().rms_norm_eps(), 1e-5);
  EXPECT_FALSE(spec.model().tie_embeddings());
  EXPECT_TRUE(spec.model().has_tie_embeddings());
  EXPECT_EQ(spec.model().rope().theta(), 500000);
  EXPECT_FALSE(spec.model().rope().has_llama3());
  EXPECT_EQ(spec.model().init_stddev(), 0.02);
  EXPECT_EQ(spec.parallel().threads_per_rank(), 1);
  EXPECT_EQ(spec.parallel().backend(), "cpu");
  EXPECT_EQ(spec.optimizer().learning_rate(), 3e-4);
  EXPECT_DOUBLE_EQ(spec.optimizer().min_learning_rate(), 3e-5);
  EXPECT_EQ(spec.optimizer().warmup_steps(), 0);
  EXPECT_EQ(spec.optimizer().beta1(), 0.9);
  EXPECT_EQ(spec.optimizer().beta2(), 0.95);
  EXPECT_EQ(spec.optimizer().eps(), 1e-8);
  EXPECT_EQ(spec.optimizer().weight_decay(), 0.1);
  EXPECT_EQ(spec.optimizer().clip_norm(), 1.0);
  EXPECT_EQ(spec.optimizer().max_skipped_steps(), 10);
  EXPECT_EQ(spec.train().seed(), 1u);
  EXPECT_EQ(spec.train().eval_every(), 0);
  EXPECT_EQ(spec.train().eval_sequences(), 1);
  EXPECT_FALSE(spec.train().has_memory_per_rank());
  EXPECT_EQ(spec.train().dtype(), v1::DTYPE_FP32);
  EXPECT_EQ(spec.train().gradient_accumulation(), 1);
  EXPECT_EQ(spec.data().documents(), v1::DOCUMENTS_JOIN);
  EXPECT_TRUE(spec.model().causal());
  EXPECT_TRUE(spec.model().has_qk_norm());
  EXPECT_FALSE(spec.model().qk_norm());
  EXPECT_TRUE(spec.model().has_qkv_bias());
  EXPECT_FALSE(spec.model().qkv_bias());
  EXPECT_FALSE(spec.model().has_window());
  EXPECT_FALSE(spec.model().has_max_position());
  EXPECT_FALSE(spec.model().rope().has_yarn());
}

TEST(JobSpec, DefaultsKeepWhatIsGiven) {
  v1::JobSpec spec = LegalSpec();
  spec.mutable_optimizer()->set_learning_rate(1e-2);
  spec.mutable_optimizer()->set_weight_decay(0);
  spec.mutable_train()->set_seed(0);
  spec.mutable_train()->set_eval_sequences(0);
  const v1::JobSpec full = WithDefaults(spec);
  EXPECT_EQ(full.optimizer().min_learning_rate(), 1e-3);
  EXPECT_EQ(full.optimizer().weight_decay(), 0);
  EXPECT_EQ(full.train().seed(), 0u);
  EXPECT_EQ(full.train().eval_sequences(), 0);
}

TEST(JobSpec, AnEmptySpecNamesItsMissingSections) {
  std::vector<std::string> fields;
  for (const Violation& violation : ValidateJobSpec(v1::JobSpec()))
    fields.push_back(violation.field);
  EXPECT_THAT(fields, ElementsAre("name", "model", "data", "parallel", "train"));
}

// Sets model.rope to what `text` says, in text format.
std::function<void(v1::JobSpec&)> Scaling(const char* text) {
  return [text](v1::JobSpec& spec) {
    EXPECT_TRUE(
        google::protobuf::TextFormat::ParseFromString(text, spec.mutable_model()->mutable_rope()))
        << text;
  };
}

struct Case {
  const char* field;
  std::function<void(v1::JobSpec&)> spoil;
  const char* message;
};

// Each changes one thing and expects exactly one violation.
const Case kCases[] = {
    {"name", [](v1::JobSpec& s) { s.set_name("Demo"); }, "lower-case"},
    {"name", [](v1::JobSpec& s) { s.set_name(std::string(64, 'a')); }, "64 characters"},
    {"name", [](v1::JobSpec& s) { s.set_name("-a"); }, "beginning with"},
    {"name", [](v1::JobSpec& s) { s.set_name("a/b"); }, "'a/b'"},
    {"model.vocab_size", [](v1::JobSpec& s) { s.mutable_model()->set_vocab_size(1); },
     "1 is outside 2 to 1,048,576"},
    {"model.hidden_size", [](v1::JobSpec& s) { s.mutable_model()->set_hidden_size(-1); },
     "-1 is outside"},
    {"model.hidden_size", [](v1::JobSpec& s) { s.mutable_model()->set_hidden_size(0); },
     "is required"},
    {"model.num_layers", [](v1::JobSpec& s) { s.mutable_model()->set_num_layers(1025); },
     "1,025 is outside 1 to 1,024"},
    {"model.num_kv_heads", [](v1::JobSpec& s) { s.mutable_model()->set_num_kv_heads(3); },
     "3 does not divide num_heads 8; legal values: 1, 2, 4, 8"},
    {"model.num_kv_heads", [](v1::JobSpec& s) { s.mutable_model()->set_num_kv_heads(16); },
     "does not divide"},
    {"model.head_dim", [](v1::JobSpec& s) { s.mutable_model()->set_head_dim(15); }, "15 is odd"},
    {"model.head_dim", [](v1::JobSpec& s) { s.mutable_model()->set_head_dim(514); },
     "514 is outside 2 to 256"},
    {"model.rms_norm_eps", [](v1::JobSpec& s) { s.mutable_model()->set_rms_norm_eps(0); },
     "above 0"},
    {"model.init_stddev",
     [](v1::JobSpec& s) {
       s.mutable_model()->set_init_stddev(std::numeric_limits<double>::quiet_NaN());
     },
     "nan"},
    {"model.rope.theta", [](v1::JobSpec& s) { s.mutable_model()->mutable_rope()->set_theta(1); },
     "above 1"},
    {"model.rope.llama3.high_freq_factor",
     [](v1::JobSpec& s) {
       auto& llama3 = *s.mutable_model()->mutable_rope()->mutable_llama3();
       llama3.set_factor(8);
       llama3.set_low_freq_factor(4);
       llama3.set_high_freq_factor(4);
       llama3.set_original_context(8192);
     },
     "4 is not above low_freq_factor 4"},
    {"model.rope.theta", [](v1::JobSpec& s) { s.mutable_model()->mutable_rope()->set_theta(1e16); },
     "1e+16 is not a number above 1, at most 1e+15"},
    {"model.rope.llama3.factor",
     Scaling("llama3 { factor: 0.5 low_freq_factor: 1 "
             "high_freq_factor: 4 original_context: 8192 }"),
     "is required: a number from 1 to 1,048,576; it is 0.5"},
    {"model.rope.linear.factor", Scaling("linear {}"), "it is 0"},
    {"model.rope.linear.factor", Scaling("linear { factor: nan }"), "it is nan"},
    {"model.rope.linear.factor", Scaling("linear { factor: 2e6 }"), "it is 2e+06"},
    {"model.rope.dynamic.factor", Scaling("dynamic { factor: inf original_context: 1 }"),
     "it is inf"},
    {"model.rope.dynamic.original_context", Scaling("dynamic { factor: 2 }"), "is required"},
    {"model.rope.dynamic",
     [](v1::JobSpec& s) {
       Scaling("dynamic { factor: 2 original_context: 8192 }")(s);
       s.mutable_model()->set_head_dim(2);
     },
     "head_dim is 2"},
    {"model.rope.yarn.factor", Scaling("yarn { factor: 0 original_context: 8192 }"), "it is 0"},
    {"model.rope.yarn.original_context", Scaling("yarn { factor: 2 }"), "is required"},
    {"model.rope.yarn.beta_fast",
     Scaling("yarn { factor: 2 original_context: 8192 beta_fast: 3 beta_slow: 3 }"),
     "3 is not above beta_slow 3"},
    {"model.rope.yarn.beta_slow", Scaling("yarn { factor: 2 original_context: 8192 beta_slow: 0 }"),
     "above 0"},
    {"model.rope.yarn.attention_factor",
     Scaling("yarn { factor: 2 original_context: 8192 attention_factor: 0 }"), "above 0"},
    {"model.rope.dynamic",
     Scaling("linear { factor: 2 } dynamic { factor: 2 original_context: 8192 }"),
     "is given beside linear; at most one scaling of llama3, linear, dynamic, yarn"},
    {"model.window", [](v1::JobSpec& s) { s.mutable_model()->set_window(0); },
     "0 is outside 1 to 1,073,741,824"},
    {"model.max_position", [](v1::JobSpec& s) { s.mutable_model()->set_max_position(0); },
     "0 is outside 1 to 1,073,741,824"},
    {"model.preset", [](v1::JobSpec& s) { s.mutable_model()->set_preset("llama3-9b"); },
     "'llama3-9b' is unknown; did you mean 'llama3-8b'?"},
    {"model.hf_config", [](v1::JobSpec& s) { s.mutable_model()->set_hf_config("config.json"); },
     "only whoever reads the job file can open"},
    {"train.dtype", [](v1::JobSpec& s) { s.mutable_train()->set_dtype(static_cast<v1::Dtype>(7)); },
     "7 is neither fp32 nor bf16"},
    {"train.dtype", [](v1::JobSpec& s) { s.mutable_train()->set_dtype(v1::DTYPE_UNSPECIFIED); },
     "0 is neither"},
    {"data.path", [](v1::JobSpec& s) { s.mutable_data()->set_path(""); }, "upipe data pack"},
    {"data.documents",
     [](v1::JobSpec& s) { s.mutable_data()->set_documents(static_cast<v1::Documents>(9)); },
     "9 is none of join, separate, restart"},
    {"data.documents",
     [](v1::JobSpec& s) { s.mutable_data()->set_documents(v1::DOCUMENTS_UNSPECIFIED); },
     "0 is none of"},
    {"parallel.threads_per_rank",
     [](v1::JobSpec& s) { s.mutable_parallel()->set_threads_per_rank(65); }, "65 is outside"},
    {"parallel.isa_cap", [](v1::JobSpec& s) { s.mutable_parallel()->set_isa_cap("AVX 2"); },
     "'AVX 2'"},
    {"parallel.backend", [](v1::JobSpec& s) { s.mutable_parallel()->set_backend("rocm"); },
     "'rocm' is unknown; backends: cpu, reference, cuda"},
    {"optimizer.learning_rate",
     [](v1::JobSpec& s) {
       s.mutable_optimizer()->set_learning_rate(-1);
       s.mutable_optimizer()->set_min_learning_rate(0);
     },
     "-1 is not"},
    {"optimizer.min_learning_rate",
     [](v1::JobSpec& s) { s.mutable_optimizer()->set_min_learning_rate(1); }, "above the peak"},
    {"optimizer.warmup_steps", [](v1::JobSpec& s) { s.mutable_optimizer()->set_warmup_steps(-1); },
     "-1 is outside"},
    {"optimizer.beta1", [](v1::JobSpec& s) { s.mutable_optimizer()->set_beta1(1); },
     "1 (excluded)"},
    {"optimizer.beta2", [](v1::JobSpec& s) { s.mutable_optimizer()->set_beta2(-0.1); },
     "-0.1 is outside"},
    {"optimizer.eps", [](v1::JobSpec& s) { s.mutable_optimizer()->set_eps(0); }, "above 0"},
    // What fp32 rounds to 0 or 1 would reach the engine as such.
    {"optimizer.eps", [](v1::JobSpec& s) { s.mutable_optimizer()->set_eps(1e-60); }, "fp32 holds"},
    {"model.init_stddev", [](v1::JobSpec& s) { s.mutable_model()->set_init_stddev(1e39); },
     "fp32 holds"},
    {"optimizer.beta2", [](v1::JobSpec& s) { s.mutable_optimizer()->set_beta2(0.99999999999); },
     "1 (excluded)"},
    {"optimizer.weight_decay", [](v1::JobSpec& s) { s.mutable_optimizer()->set_weight_decay(-1); },
     "from 0"},
    {"optimizer.clip_norm", [](v1::JobSpec& s) { s.mutable_optimizer()->set_clip_norm(0); },
     ".inf"},
    {"optimizer.max_skipped_steps",
     [](v1::JobSpec& s) { s.mutable_optimizer()->set_max_skipped_steps(0); }, "0 is outside"},
    {"train.context", [](v1::JobSpec& s) { s.mutable_train()->set_context(0); }, "is required"},
    {"train.context",
     [](v1::JobSpec& s) { s.mutable_train()->set_context((int64_t{1} << 40) + 1); }, "is outside"},
    {"train.steps", [](v1::JobSpec& s) { s.mutable_train()->set_steps((int64_t{1} << 31) + 1); },
     "is outside"},
    {"train.eval_every", [](v1::JobSpec& s) { s.mutable_train()->set_eval_every(-1); },
     "-1 is outside"},
    {"train.memory_per_rank", [](v1::JobSpec& s) { s.mutable_train()->set_memory_per_rank(0); },
     "0 is outside"},
    {"train.gradient_accumulation",
     [](v1::JobSpec& s) { s.mutable_train()->set_gradient_accumulation(0); },
     "0 is outside 1 to 1,048,576"},
    {"train.gradient_accumulation",
     [](v1::JobSpec& s) { s.mutable_train()->set_gradient_accumulation((1 << 20) + 1); },
     "1,048,577 is outside"},
    {"checkpoint.path", [](v1::JobSpec& s) { s.mutable_checkpoint()->set_path("here"); },
     "must be absolute"},
    {"checkpoint.path", [](v1::JobSpec& s) { s.mutable_checkpoint()->set_keep(3); },
     "is required in this section"},
    {"checkpoint.path",
     [](v1::JobSpec& s) { s.mutable_checkpoint()->set_path("/" + std::string(4000, 'a')); },
     "has 4001 bytes"},
    {"checkpoint.path",
     [](v1::JobSpec& s) { s.mutable_checkpoint()->set_path(std::string("/a\0b", 4)); }, "NUL"},
    {"checkpoint.every_steps",
     [](v1::JobSpec& s) {
       s.mutable_checkpoint()->set_path("/a");
       s.mutable_checkpoint()->set_every_steps(0);
     },
     "0 is outside"},
    {"checkpoint.keep",
     [](v1::JobSpec& s) {
       s.mutable_checkpoint()->set_path("/a");
       s.mutable_checkpoint()->set_keep(1001);
     },
     "1,001 is outside 1 to 1,000"},
    {"restarts.infrastructure",
     [](v1::JobSpec& s) { s.mutable_restarts()->set_infrastructure(-1); }, "-1 is outside 0 to"},
    {"restarts.application", [](v1::JobSpec& s) { s.mutable_restarts()->set_application(1 << 30); },
     "is outside 0 to 1,000,000"},
    {"restarts.no_progress", [](v1::JobSpec& s) { s.mutable_restarts()->set_no_progress(-1); },
     "-1 is outside 0 to"},
    {"priority", [](v1::JobSpec& s) { s.set_priority(1001); }, "1,001 is outside -1,000 to 1,000"},
    {"time_limit_seconds", [](v1::JobSpec& s) { s.set_time_limit_seconds(0); }, "0 is outside 1"},
};

TEST(JobSpec, RestartsHaveDefaultsAndTimeLimitsHaveNone) {
  const v1::JobSpec full = WithDefaults(LegalSpec());
  EXPECT_EQ(full.restarts().infrastructure(), 100);
  EXPECT_EQ(full.restarts().application(), 3);
  EXPECT_EQ(full.restarts().no_progress(), 3);
  EXPECT_EQ(full.priority(), 0);
  EXPECT_FALSE(full.has_time_limit_seconds());
  v1::JobSpec spec = LegalSpec();
  spec.mutable_restarts()->set_application(0);
  EXPECT_EQ(WithDefaults(spec).restarts().application(), 0);
}

TEST(JobSpec, CheckpointsHaveDefaultsOnlyWhereTheyGoSomewhere) {
  v1::JobSpec spec = LegalSpec();
  EXPECT_FALSE(WithDefaults(spec).has_checkpoint());
  spec.mutable_checkpoint()->set_path("/a");
  EXPECT_EQ(WithDefaults(spec).checkpoint().every_steps(), 100);
  EXPECT_EQ(WithDefaults(spec).checkpoint().keep(), 2);
  spec.mutable_checkpoint()->set_every_steps(7);
  spec.mutable_checkpoint()->set_keep(5);
  EXPECT_EQ(WithDefaults(spec).checkpoint().every_steps(), 7);
  EXPECT_EQ(WithDefaults(spec).checkpoint().keep(), 5);
  EXPECT_THAT(ValidateJobSpec(WithDefaults(spec)), IsEmpty());
}

TEST(JobSpec, EachViolationIsNamedOnceWithItsNumbers) {
  for (const Case& c : kCases) {
    v1::JobSpec spec = LegalSpec();
    c.spoil(spec);
    const std::vector<Violation> violations = ValidateJobSpec(spec);
    ASSERT_EQ(violations.size(), 1u) << c.field << " " << c.message << "\n" << spec.DebugString();
    EXPECT_EQ(violations[0].field, c.field);
    EXPECT_THAT(violations[0].message, HasSubstr(c.message)) << c.field;
  }
}

TEST(JobSpec, ViolationsComeAllAtOnce) {
  v1::JobSpec spec = LegalSpec();
  spec.mutable_model()->set_num_kv_heads(3);
  spec.mutable_model()->set_head_dim(7);
  spec.mutable_parallel()->set_heads_per_stage(5);
  spec.mutable_train()->set_steps(-3);
  EXPECT_EQ(ValidateJobSpec(spec).size(), 4u);
}

TEST(JobSpec, NoClippingIsLegal) {
  v1::JobSpec spec = LegalSpec();
  spec.mutable_optimizer()->set_clip_norm(std::numeric_limits<double>::infinity());
  EXPECT_THAT(ValidateJobSpec(spec), IsEmpty());
}

TEST(JobSpec, TheLongestContextIsLegalAndOneMoreIsNot) {
  v1::JobSpec spec = LegalSpec();
  spec.mutable_train()->set_context(int64_t{1} << 30);
  spec.mutable_model()->set_hidden_size(1 << 16);
  spec.mutable_model()->set_num_layers(1024);
  EXPECT_THAT(ValidateJobSpec(spec), IsEmpty());
  spec.mutable_train()->set_context((int64_t{1} << 30) + 1);
  const auto violations = ValidateJobSpec(spec);
  ASSERT_EQ(violations.size(), 1u);
  EXPECT_EQ(violations[0].field, "train.context");
  EXPECT_THAT(violations[0].message, HasSubstr("1,073,741,825 is outside 1 to 1,073,741,824"));
}

v1::JobSpec PresetSpec(const char* preset) {
  v1::JobSpec spec = LegalSpec();
  spec.mutable_model()->Clear();
  spec.mutable_model()->set_preset(preset);
  return spec;
}

TEST(JobSpec, APresetFillsWhatIsNotGiven) {
  v1::JobSpec spec = PresetSpec("llama3.1-8b");
  EXPECT_THAT(ValidateJobSpec(spec), IsEmpty());
  v1::ModelSpec model = WithDefaults(spec).model();
  EXPECT_EQ(model.preset(), "llama3.1-8b");
  EXPECT_EQ(model.num_layers(), 32);
  EXPECT_EQ(model.rope().llama3().factor(), 8);
  EXPECT_EQ(model.max_position(), 131072);
  spec.mutable_model()->set_num_layers(4);
  spec.mutable_model()->set_tie_embeddings(true);
  spec.mutable_model()->mutable_rope()->set_theta(1e6);
  spec.mutable_model()->mutable_rope()->mutable_llama3()->set_factor(16);
  model = WithDefaults(spec).model();
  EXPECT_EQ(model.num_layers(), 4);
  EXPECT_EQ(model.hidden_size(), 4096);
  EXPECT_TRUE(model.tie_embeddings());
  EXPECT_EQ(model.rope().theta(), 1e6);
  EXPECT_EQ(model.rope().llama3().factor(), 16);
  EXPECT_EQ(model.rope().llama3().original_context(), 8192);
}

TEST(JobSpec, AScalingOfAnotherKindReplacesThePresets) {
  v1::JobSpec spec = PresetSpec("llama3.1-8b");
  spec.mutable_model()->mutable_rope()->mutable_yarn()->set_factor(4);
  spec.mutable_model()->mutable_rope()->mutable_yarn()->set_original_context(8192);
  EXPECT_THAT(ValidateJobSpec(spec), IsEmpty());
  EXPECT_FALSE(WithDefaults(spec).model().rope().has_llama3());
}

TEST(JobSpec, YarnDefaultsAreThoseOfThePaper) {
  v1::JobSpec spec = LegalSpec();
  Scaling("yarn { factor: 4 original_context: 8192 }")(spec);
  const v1::YarnRopeScaling yarn = WithDefaults(spec).model().rope().yarn();
  EXPECT_EQ(yarn.beta_fast(), 32);
  EXPECT_EQ(yarn.beta_slow(), 1);
  EXPECT_NEAR(yarn.attention_factor(), 1.138629436111989, 1e-15);  // 0.1 ln 4 + 1
  EXPECT_TRUE(yarn.truncate());
}

TEST(JobSpec, AnUnknownPresetIsTheOnlyViolation) {
  EXPECT_EQ(ValidateJobSpec(PresetSpec("none")).size(), 1u);
  v1::JobSpec spec = LegalSpec();
  spec.mutable_model()->Clear();
  spec.mutable_model()->set_hf_config("x");
  EXPECT_EQ(ValidateJobSpec(spec).size(), 1u);
}

TEST(JobSpec, AWindowOfTheWholeContextIsNone) {
  v1::JobSpec spec = LegalSpec();
  spec.mutable_model()->set_window(8191);
  EXPECT_THAT(ValidateJobSpec(spec), IsEmpty());
  EXPECT_THAT(JobSpecWarnings(spec), IsEmpty());
  spec.mutable_model()->set_window(8192);
  EXPECT_THAT(ValidateJobSpec(spec), IsEmpty());
  EXPECT_THAT(JobSpecWarnings(spec),
              ElementsAre(HasSubstr("model.window 8,192 is not below train.context 8,192")));
}

TEST(JobSpec, AFullMaskIsLegalAndWarnedOf) {
  v1::JobSpec spec = LegalSpec();
  spec.mutable_model()->set_causal(false);
  EXPECT_THAT(ValidateJobSpec(spec), IsEmpty());
  EXPECT_THAT(JobSpecWarnings(spec), ElementsAre(HasSubstr("a query sees the token that its")));
}

TEST(JobSpec, WarnsOfPositionsBeyondWhatWasTrained) {
  v1::JobSpec spec = PresetSpec("qwen3-8b");
  spec.mutable_train()->set_context(40960);
  EXPECT_THAT(JobSpecWarnings(spec), IsEmpty());
  spec.mutable_train()->set_context(1 << 20);
  EXPECT_THAT(JobSpecWarnings(spec),
              ElementsAre(testing::AllOf(
                  HasSubstr("train.context 1,048,576 is above the 40,960 positions the model was "
                            "trained for (model.max_position)"),
                  HasSubstr("yarn: {factor: 26, original_context: 40K}"))));
  Scaling("yarn { factor: 26 original_context: 40960 }")(spec);
  EXPECT_THAT(JobSpecWarnings(spec), IsEmpty());
  spec.mutable_model()->mutable_rope()->mutable_yarn()->set_factor(25);
  EXPECT_THAT(JobSpecWarnings(spec),
              ElementsAre(HasSubstr("1,048,576 is above the 1,024,000 positions that model.rope "
                                    "scales to: raise its factor")));
}

TEST(JobSpec, EachScalingReachesItsFactorTimesTheOriginal) {
  for (const char* rope : {"llama3 { factor: 4 low_freq_factor: 1 high_freq_factor: 4 "
                           "original_context: 8192 }",
                           "linear { factor: 4 }", "dynamic { factor: 4 original_context: 8192 }",
                           "yarn { factor: 4 original_context: 8192 }"}) {
    v1::JobSpec spec = LegalSpec();
    spec.mutable_model()->set_max_position(8192);
    Scaling(rope)(spec);
    spec.mutable_train()->set_context(32768);
    EXPECT_THAT(JobSpecWarnings(spec), IsEmpty()) << rope;
    spec.mutable_train()->set_context(32772);
    EXPECT_THAT(JobSpecWarnings(spec), ElementsAre(HasSubstr("above the 32,768"))) << rope;
  }
  // Llama 3.1 was trained on to 128K, beyond 8 x 8K.
  v1::JobSpec spec = PresetSpec("llama3.1-8b");
  spec.mutable_train()->set_context(131072);
  EXPECT_THAT(JobSpecWarnings(spec), IsEmpty());
}

}  // namespace
}  // namespace upipe
