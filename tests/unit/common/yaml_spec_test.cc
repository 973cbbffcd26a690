#include "common/spec/yaml_spec.h"

#include <gmock/gmock.h>
#include <google/protobuf/util/message_differencer.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <limits>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "common/spec/job_spec.h"

namespace upipe {
namespace {

using google::protobuf::util::MessageDifferencer;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::StartsWith;

constexpr char kLegal[] = R"(name: demo
model:
  vocab_size: 257
  hidden_size: 128
  num_layers: 2
  num_heads: 8
  num_kv_heads: 2
  head_dim: 16
  intermediate_size: 352
data:
  path: out/demo/data
parallel:
  ranks: 4
  method: upipe
  heads_per_stage: 4
train:
  context: 8K
  steps: 60
)";

std::string Replaced(absl::string_view from, absl::string_view to) {
  const std::string text = absl::StrReplaceAll(kLegal, {{from, to}});
  EXPECT_NE(text, kLegal) << from;
  return text;
}

std::vector<std::string> ErrorsOf(absl::string_view text,
                                  const std::vector<std::string>& overrides = {}) {
  const auto spec = ParseJobSpecYaml(text, "job.yaml", overrides);
  if (spec.ok()) return {};
  EXPECT_EQ(spec.status().code(), absl::StatusCode::kInvalidArgument);
  return absl::StrSplit(spec.status().message(), '\n');
}

TEST(YamlSpec, ReadsALegalFile) {
  const auto spec = ParseJobSpecYaml(kLegal, "job.yaml");
  ASSERT_TRUE(spec.ok()) << spec.status();
  EXPECT_EQ(spec->name(), "demo");
  EXPECT_EQ(spec->model().num_heads(), 8);
  EXPECT_EQ(spec->parallel().method(), v1::METHOD_UPIPE);
  EXPECT_EQ(spec->train().context(), 8192);
  EXPECT_FALSE(spec->has_optimizer());
  EXPECT_FALSE(spec->train().has_seed());
}

TEST(YamlSpec, ReadsEveryKindOfScalar) {
  const auto spec = ParseJobSpecYaml(
      absl::StrCat(kLegal, "  seed: 18446744073709551615\n  memory_per_rank: 80GiB\n",
                   "optimizer: {clip_norm: .inf, learning_rate: 3e-3, weight_decay: 0}\n"),
      "job.yaml", {"model.tie_embeddings=true", "model.rope.theta=1e6"});
  ASSERT_TRUE(spec.ok()) << spec.status();
  EXPECT_EQ(spec->train().seed(), std::numeric_limits<uint64_t>::max());
  EXPECT_EQ(spec->train().memory_per_rank(), int64_t{80} << 30);
  EXPECT_EQ(spec->optimizer().clip_norm(), std::numeric_limits<double>::infinity());
  EXPECT_EQ(spec->optimizer().learning_rate(), 3e-3);
  EXPECT_TRUE(spec->optimizer().has_weight_decay());
  EXPECT_TRUE(spec->model().tie_embeddings());
  EXPECT_EQ(spec->model().rope().theta(), 1e6);
}

TEST(YamlSpec, OnAndOffAreTrueAndFalse) {
  for (const auto& [text, value] : std::vector<std::pair<const char*, bool>>{
           {"on", true}, {"off", false}, {"true", true}, {"false", false}}) {
    const auto spec = ParseJobSpecYaml(absl::StrCat(kLegal, "memory: {overlap: ", text, "}\n"),
                                       "job.yaml", {absl::StrCat("model.causal=", text)});
    ASSERT_TRUE(spec.ok()) << spec.status();
    EXPECT_EQ(spec->memory().overlap(), value) << text;
    EXPECT_EQ(spec->model().causal(), value) << text;
  }
}

TEST(YamlSpec, ReadsTheWholeMemoryPolicy) {
  const auto spec = ParseJobSpecYaml(
      absl::StrCat(kLegal, "  gradient_accumulation: 8\n",
                   "memory: {attention_output: host, layer_inputs: host, checkpoint_stride: 2,\n",
                   "  hidden_stream: host, stage_kv: device, query_chunks: 3, overlap: on,\n",
                   "  ring_kv: keep, optimizer: host}\n"),
      "job.yaml",
      {"parallel.ring_ranks=2", "parallel.dp_ranks=1", "data.documents=restart",
       "model.window=1K"});
  ASSERT_TRUE(spec.ok()) << spec.status();
  const v1::MemorySpec& memory = spec->memory();
  EXPECT_EQ(memory.attention_output(), v1::ATTENTION_OUTPUT_HOST);
  EXPECT_EQ(memory.layer_inputs(), v1::PLACE_HOST);
  EXPECT_EQ(memory.checkpoint_stride(), 2);
  EXPECT_EQ(memory.hidden_stream(), v1::PLACE_HOST);
  EXPECT_EQ(memory.stage_kv(), v1::PLACE_DEVICE);
  EXPECT_EQ(memory.query_chunks(), 3);
  EXPECT_TRUE(memory.overlap());
  EXPECT_EQ(memory.ring_kv(), v1::RING_KV_KEEP);
  EXPECT_EQ(memory.optimizer(), v1::PLACE_HOST);
  EXPECT_EQ(spec->data().documents(), v1::DOCUMENTS_RESTART);
  EXPECT_EQ(spec->model().window(), 1024);
  EXPECT_EQ(spec->train().gradient_accumulation(), 8);
}

struct Case {
  const char* from;
  const char* to;
  std::vector<const char*> errors;  // exactly these lines, as prefixes or parts
};

const Case kCases[] = {
    {"  num_heads: 8",
     "  num_head: 8",
     {"job.yaml:2: model.num_heads: is required",
      "job.yaml:6: model.num_head: unknown field; did you mean 'num_heads'?"}},
    {"  steps: 60",
     "  steps: 60\n  colour: red",
     {"job.yaml:19: train.colour: unknown field; known: context, steps, seed"}},
    {"  steps: 60",
     "  steps: 60\n  steps: 61",
     {"job.yaml:19: train.steps: given twice; first on line 18"}},
    {"data:\n", "data:\n  path: a\ndata:\n", {"job.yaml:12: data: given twice; first on line 10"}},
    {"method: upipe",
     "method: upype",
     {"job.yaml:14: parallel.method: 'upype' is unknown; did you mean 'upipe'?"}},
    {"method: upipe",
     "method: METHOD_UPIPE",
     {"job.yaml:14: parallel.method: 'METHOD_UPIPE' is unknown"}},
    {"method: upipe",
     "method: unspecified",
     {"job.yaml:14: parallel.method: 'unspecified' is unknown; known: upipe, ulysses"}},
    {"heads_per_stage: 4",
     "heads_per_stage: 0",
     {"job.yaml:15: parallel.heads_per_stage: '0' is not a number of heads or ranks; auto lets the "
      "planner choose"}},
    {"ranks: 4", "ranks: auto", {"job.yaml:13: parallel.ranks: auto is not available"}},
    {"path: out/demo/data", "path: auto", {"job.yaml:11: data.path: auto is not available"}},
    {"steps: 60", "steps: 60.0", {"job.yaml:18: train.steps: '60.0' is not a whole number"}},
    {"steps: 60", "steps: \"60\"", {"job.yaml:18: train.steps: '60' is text in quotes"}},
    {"steps: 60", "steps: 060", {"job.yaml:18: train.steps: '060' is not a whole number"}},
    {"steps: 60", "steps: 0x3c", {"job.yaml:18: train.steps: '0x3c' is not a whole number"}},
    {"steps: 60", "steps: 6K", {"job.yaml:18: train.steps: '6K' is not a whole number"}},
    {"steps: 60",
     "steps: 99999999999999999999",
     {"job.yaml:18: train.steps: '99999999999999999999' is not between"}},
    {"ranks: 4",
     "ranks: 4294967300",
     {"job.yaml:13: parallel.ranks: '4294967300' is not between -2147483648 and"}},
    {"steps: 60", "steps: -1", {"job.yaml:18: train.steps: -1 is outside 1 to"}},
    {"steps: 60", "steps: 60\n  seed: -1", {"job.yaml:19: train.seed: '-1' is not between 0 and"}},
    {"steps: 60", "steps:", {"job.yaml:18: train.steps: has no value"}},
    {"steps: 60", "steps: ~", {"job.yaml:18: train.steps: has no value"}},
    {"steps: 60",
     "steps: [60]",
     {"job.yaml:18: train.steps: a single value is expected, but a list is given"}},
    {"steps: 60",
     "steps: {a: 1}",
     {"job.yaml:18: train.steps: a single value is expected, but fields of its own"}},
    {"context: 8K",
     "context: 8k",
     {"job.yaml:17: train.context: '8k' is not a whole number of tokens"}},
    {"steps: 60",
     "steps: 60\n  memory_per_rank: 80GB",
     {"job.yaml:19: train.memory_per_rank: '80GB' is not a number of bytes"}},
    {"head_dim: 16",
     "head_dim: 16\n  tie_embeddings: yes",
     {"job.yaml:9: model.tie_embeddings: 'yes' is not true, false, on or off"}},
    {"head_dim: 16",
     "head_dim: 16\n  init_stddev: 0.02f",
     {"job.yaml:9: model.init_stddev: '0.02f' is not a number"}},
    {"head_dim: 16",
     "head_dim: 16\n  init_stddev: 1e999",
     {"job.yaml:9: model.init_stddev: '1e999' is not a number a double"}},
    {"head_dim: 16",
     "head_dim: 16\n  init_stddev: .inf",
     {"job.yaml:9: model.init_stddev: inf is not a number above 0 that fp32 holds"}},
    {"head_dim: 16",
     "head_dim: 16\n  init_stddev: .nan",
     {"job.yaml:9: model.init_stddev: '.nan' is not a number"}},
    {"num_kv_heads: 2",
     "num_kv_heads: 3",
     {"job.yaml:7: model.num_kv_heads: 3 does not divide num_heads 8"}},
    {"heads_per_stage: 4",
     "heads_per_stage: 6",
     {"job.yaml:15: parallel.heads_per_stage: 6 is not a multiple of the 4 ranks"}},
    {"data:\n  path: out/demo/data\n",
     "data: out/demo/data\n",
     {"job.yaml:10: data: fields are expected, such as path"}},
    {"data:\n  path: out/demo/data\n", "", {"job.yaml:1: data: this section is required"}},
    {"data:\n  path: out/demo/data\n",
     "data:\n  - path\n",
     {"job.yaml:11: data: fields are expected, such as path, but a list"}},
    {"steps: 60",
     "[a, b]: 60",
     {"job.yaml:18: train: a field name is expected, but a list is given"}},
    {"name: demo", "name: Demo", {"job.yaml:1: name: must be 1 to 63 lower-case"}},
    {"steps: 60", "steps: 60\n  dtype: fp16", {"job.yaml:19: train.dtype: 'fp16' is unknown"}},
    {"steps: 60", "steps: 60\n  dtype: FP32", {"job.yaml:19: train.dtype: 'FP32' is unknown"}},
    {"head_dim: 16",
     "head_dim: 16\n  window: 0",
     {"job.yaml:9: model.window: 0 is outside 1 to 1,073,741,824"}},
    {"heads_per_stage: 4",
     "ring_ranks: 3\n  heads_per_stage: 4",
     {"job.yaml:15: parallel.ring_ranks: 3 does not divide the 4 context ranks; legal values: 1, "
      "2"}},
    {"steps: 60",
     "steps: 60\nmemory: {overlap: yes, layer_inputs: disk, hidden_stream: host, query_chunks: 0}",
     {"job.yaml:19: memory.overlap: 'yes' is not true, false, on or off",
      "job.yaml:19: memory.layer_inputs: 'disk' is unknown; known: device, host",
      "job.yaml:19: memory.query_chunks: 0 is outside 1 to 1,024",
      "job.yaml:19: memory.hidden_stream: host needs layer_inputs: host"}},
    {"head_dim: 16",
     "head_dim: 16\n  rope: {linear: {factor: 2},\n    yarn: {factor: 2, original_context: 1K}}",
     {"job.yaml:10: model.rope.yarn: is given beside linear; at most one scaling"}},
    {"model:\n",
     "model:\n  preset: llama3-9b\n",
     {"job.yaml:3: model.preset: 'llama3-9b' is unknown; did you mean 'llama3-8b'?"}},
    {"model:\n",
     "model:\n  preset: llama3-8b\n  hf_config: config.json\n",
     {"job.yaml:4: model.hf_config: names a file that only whoever reads the job file can open"}},
    {"num_layers: 2",
     "num_layers: 0\n  preset: llama3-8b",
     {"job.yaml:5: model.num_layers: is 0; give a number above it or remove the line"}},
    {"steps: 60", "steps: 0", {"job.yaml:18: train.steps: is 0; give a number above it"}},
};

TEST(YamlSpec, EachViolationNamesLinePathAndReason) {
  for (const Case& c : kCases) {
    const std::vector<std::string> errors = ErrorsOf(Replaced(c.from, c.to));
    ASSERT_EQ(errors.size(), c.errors.size()) << c.to << "\n" << testing::PrintToString(errors);
    for (size_t i = 0; i < errors.size(); ++i) EXPECT_THAT(errors[i], StartsWith(c.errors[i]));
  }
}

TEST(YamlSpec, RefusesTextThatIsNoSingleDocument) {
  EXPECT_THAT(
      ErrorsOf(""),
      ElementsAre(StartsWith("job.yaml:1: fields are expected, such as name, but nothing")));
  EXPECT_THAT(ErrorsOf("- a\n"), ElementsAre(HasSubstr("but a list is given")));
  EXPECT_THAT(ErrorsOf("just text\n"), ElementsAre(HasSubstr("but a single value is given")));
  EXPECT_THAT(ErrorsOf(absl::StrCat(kLegal, "---\nname: b\n")),
              ElementsAre(StartsWith("job.yaml:19: a second document")));
  EXPECT_THAT(ErrorsOf("a: [1, 2\n"), ElementsAre(HasSubstr("is no YAML")));
  EXPECT_THAT(ErrorsOf("a: b: c\n"), ElementsAre(StartsWith("job.yaml:1: is no YAML")));
  EXPECT_THAT(ErrorsOf(Replaced("  steps", "\tsteps")),
              ElementsAre(StartsWith("job.yaml:18: contains a tab")));
  EXPECT_THAT(ErrorsOf(absl::StrCat("name: a\n", absl::string_view("\0", 1))),
              ElementsAre(StartsWith("job.yaml:2: contains the control character 0x00")));
  for (const char* bad : {"\xff", "\xc0\x80", "\xed\xa0\x80", "\xf4\x90\x80\x80", "\xe2\x82"}) {
    EXPECT_THAT(
        ErrorsOf(absl::StrCat("# \xe2\x82\xac\nname: ", bad)),
        ElementsAre(AllOf(StartsWith("job.yaml:2: byte 0x"), HasSubstr("not part of UTF-8"))));
  }
  EXPECT_THAT(ErrorsOf(std::string(kMaxJobSpecBytes + 1, '#')),
              ElementsAre(HasSubstr("has at most 65536")));
}

TEST(YamlSpec, RefusesAliasesTagsAndDeepNesting) {
  EXPECT_THAT(ErrorsOf("&a [*a]\n"),
              ElementsAre(StartsWith("job.yaml:1: aliases (*name) are not accepted")));
  std::string bomb = "a: &a [x,x,x,x,x,x,x,x,x]\n";
  for (char c = 'b'; c <= 'z'; ++c) {
    const char before = static_cast<char>(c - 1);
    const std::string alias = absl::StrCat("*", absl::string_view(&before, 1));
    const absl::string_view name(&c, 1);
    absl::StrAppend(&bomb, name, ": &", name, " [", alias, ",", alias, ",", alias, ",", alias,
                    "]\n");
  }
  EXPECT_THAT(ErrorsOf(bomb), testing::Each(HasSubstr("aliases (*name) are not accepted")));
  EXPECT_THAT(ErrorsOf(Replaced("steps: 60", "steps: !!int 60")),
              ElementsAre(StartsWith("job.yaml:18: tags are not accepted")));
  EXPECT_THAT(ErrorsOf(std::string(30000, '[')), ElementsAre(HasSubstr("is no YAML")));
  EXPECT_THAT(ErrorsOf(absl::StrReplaceAll(std::string(30000, 'x'), {{"x", "- "}})),
              ElementsAre(HasSubstr("is no YAML")));
}

TEST(YamlSpec, AllViolationsComeAtOnceInOrderOfLines) {
  std::string text = Replaced("  num_heads: 8", "  num_heads: eight");
  text = absl::StrReplaceAll(
      text,
      {{"head_dim: 16", "head_dim: 15"}, {"steps: 60", "stepz: 60"}, {"ranks: 4", "ranks: auto"}});
  EXPECT_THAT(
      ErrorsOf(text),
      ElementsAre(StartsWith("job.yaml:6: model.num_heads: 'eight'"),
                  StartsWith("job.yaml:8: model.head_dim: 15 is odd"),
                  StartsWith("job.yaml:13: parallel.ranks: auto"),
                  StartsWith("job.yaml:16: train.steps: is required"),
                  StartsWith("job.yaml:18: train.stepz: unknown field; did you mean 'steps'?")));
}

TEST(YamlSpec, OverridesComeAfterTheFile) {
  const auto spec =
      ParseJobSpecYaml(kLegal, "job.yaml",
                       {"train.steps=7", "data.path=/a=b", "parallel.heads_per_stage=8",
                        "train.context=1K", "train.steps=9"});
  ASSERT_TRUE(spec.ok()) << spec.status();
  EXPECT_EQ(spec->train().steps(), 9);
  EXPECT_EQ(spec->data().path(), "/a=b");
  EXPECT_EQ(spec->train().context(), 1024);
  EXPECT_EQ(spec->parallel().heads_per_stage(), 8);
}

TEST(YamlSpec, AnEmptyOverrideUnsetsAFieldOrASection) {
  const std::string text = absl::StrCat(kLegal, "  seed: 5\noptimizer:\n  eps: 1e-6\n");
  const auto spec =
      ParseJobSpecYaml(text, "job.yaml",
                       {"parallel.method=ulysses", "parallel.heads_per_stage=", "train.seed=",
                        "optimizer=", "model.rope.llama3=", "train.seed=7", "train.seed="});
  ASSERT_TRUE(spec.ok()) << spec.status();
  EXPECT_FALSE(spec->parallel().has_heads_per_stage());
  EXPECT_FALSE(spec->train().has_seed());
  EXPECT_FALSE(spec->has_optimizer());
  EXPECT_FALSE(spec->model().has_rope());  // nothing was there, nothing is made
  EXPECT_THAT(ErrorsOf(kLegal, {"train.steps=", "model.rope.llama4.factor=", "name.x="}),
              ElementsAre(StartsWith("--set: model.rope.llama4: unknown field"),
                          StartsWith("--set: name: is a single value"),
                          StartsWith("--set: train.steps: is required")));
}

TEST(YamlSpec, AnOverrideSuppliesWhatTheFileLacks) {
  EXPECT_TRUE(ParseJobSpecYaml(Replaced("  steps: 60\n", ""), "job.yaml", {"train.steps=5"}).ok());
}

TEST(YamlSpec, WrongOverridesAreNamed) {
  EXPECT_THAT(
      ErrorsOf(kLegal, {"train.step=7", "train", "train=5", "train.steps.x=1", "train.steps=x",
                        "nope.a=1", "parallel.heads_per_stage=5", "train.seed=auto",
                        "data.path=/a\xff", absl::StrCat(std::string(79, 'a'), "\u20ac")}),
      ElementsAre(
          "--set: train.step: unknown field; did you mean 'steps'?",
          StartsWith("--set: 'train' has no '='"),
          StartsWith("--set: train: has fields of its own"),
          StartsWith("--set: train.steps: is a single value"),
          StartsWith("--set: train.steps: 'x' is not a whole number"),
          StartsWith("--set: nope: unknown field"),
          "--set: train.seed: auto is not available; name a value",
          "--set: 'data.path=/a?' has bytes that are not part of UTF-8 text",
          StartsWith(absl::StrCat("--set: '", std::string(79, 'a'), "' has no '='")),
          StartsWith("--set: parallel.heads_per_stage: 5 is not a multiple of the 4 ranks")));
}

TEST(YamlSpec, WhatIsWrittenReadsBackEqual) {
  const auto spec = ParseJobSpecYaml(
      absl::StrCat(
          kLegal, "  memory_per_rank: 1536MiB\n  seed: 18446744073709551615\n",
          "optimizer: {clip_norm: .inf, learning_rate: 0.30000000000000004, weight_decay: 0}\n"),
      "job.yaml",
      {"data.path=/a b/\"c\"\\\n\x01 \xe2\x82\xac: #x", "model.rope.llama3.factor=8",
       "model.rope.llama3.low_freq_factor=1", "model.rope.llama3.high_freq_factor=4",
       "model.rope.llama3.original_context=8K", "train.context=8191"});
  ASSERT_TRUE(spec.ok()) << spec.status();
  const v1::JobSpec full = WithDefaults(*spec);
  const auto again = ParseJobSpecYaml(JobSpecToYaml(full), "described");
  ASSERT_TRUE(again.ok()) << again.status() << "\n" << JobSpecToYaml(full);
  EXPECT_TRUE(MessageDifferencer::Equals(*again, full)) << JobSpecToYaml(full);
}

TEST(YamlSpec, WordsYamlWouldMisreadAreQuoted) {
  for (const char* path :
       {"auto", "null", "~", "", "123", "true", "- x", "a: b", "*a", "!x", " a"}) {
    v1::JobSpec spec = *ParseJobSpecYaml(kLegal, "job.yaml");
    spec.mutable_data()->set_path(path);
    const auto again = ParseJobSpecYaml(JobSpecToYaml(spec), "described");
    if (std::string(path).empty()) continue;  // not set, so not written
    ASSERT_TRUE(again.ok()) << again.status();
    EXPECT_EQ(again->data().path(), path);
  }
}

constexpr char kPreset[] = R"(name: demo
model:
  preset: llama3.1-8b
data: {path: out/demo/data}
parallel: {ranks: 4, method: upipe, heads_per_stage: 4}
train: {context: 8K, steps: 60, dtype: bf16}
)";

TEST(YamlSpec, APresetIsEnough) {
  const auto spec = ParseJobSpecYaml(kPreset, "job.yaml");
  ASSERT_TRUE(spec.ok()) << spec.status();
  EXPECT_EQ(spec->train().dtype(), v1::DTYPE_BF16);
  EXPECT_EQ(spec->model().num_layers(), 0);  // defaults are not filled in here
  EXPECT_EQ(WithDefaults(*spec).model().num_layers(), 32);
}

TEST(YamlSpec, ViolationsOfAPresetsFieldsAreOnItsLine) {
  EXPECT_THAT(ErrorsOf(kPreset, {"parallel.ranks=64"}),
              ElementsAre(StartsWith("job.yaml:5: parallel.heads_per_stage: 4 is below the 64")));
  EXPECT_THAT(ErrorsOf(kPreset, {"model.num_heads=20"}),
              ElementsAre(StartsWith("job.yaml:3: model.num_kv_heads: 8 does not divide")));
}

TEST(YamlSpec, AnUnknownPresetHidesNoOtherViolation) {
  EXPECT_THAT(ErrorsOf(absl::StrReplaceAll(
                  kPreset, {{"llama3.1-8b", "gpt-5\n  head_dim: 15"}, {"steps: 60", "stepz: 60"}})),
              ElementsAre(StartsWith("job.yaml:3: model.preset: 'gpt-5' is unknown; known: tiny"),
                          StartsWith("job.yaml:4: model.head_dim: 15 is odd"),
                          StartsWith("job.yaml:7: train.stepz: unknown field"),
                          StartsWith("job.yaml:7: train.steps: is required")));
}

absl::StatusOr<v1::JobSpec> WithConfig(absl::string_view yaml, const std::string& json,
                                       const std::vector<std::string>& overrides = {}) {
  return ParseJobSpecYaml(yaml, "job.yaml", overrides,
                          [&](const std::string& path) -> absl::StatusOr<std::string> {
                            EXPECT_EQ(path, "models/config.json");
                            if (json.empty()) return absl::NotFoundError("cannot read it");
                            return json;
                          });
}

std::string HfYaml() {
  return absl::StrReplaceAll(kPreset, {{"preset: llama3.1-8b", "hf_config: models/config.json"}});
}

TEST(YamlSpec, AConfigFileIsReplacedByWhatItSays) {
  const auto spec =
      WithConfig(HfYaml(), R"({"model_type": "qwen3", "num_attention_heads": 64})",
                 {"model.num_layers=3", "model.tie_embeddings=true", "model.rope.yarn.factor=2",
                  "model.rope.yarn.original_context=32K"});
  ASSERT_TRUE(spec.ok()) << spec.status();
  EXPECT_EQ(spec->model().hf_config(), "");
  EXPECT_EQ(spec->model().num_heads(), 64);
  EXPECT_EQ(spec->model().num_layers(), 3);
  EXPECT_TRUE(spec->model().tie_embeddings());
  EXPECT_TRUE(spec->model().qk_norm());
  EXPECT_EQ(spec->model().rope().theta(), 10000);
  EXPECT_EQ(spec->model().rope().yarn().original_context(), 32768);
}

TEST(YamlSpec, EachProblemOfAConfigFileIsOnItsLine) {
  const auto spec =
      WithConfig(HfYaml(), R"({"model_type": "llama", "hidden_act": "relu", "num_experts": 8})",
                 {"train.steps=-1"});
  ASSERT_FALSE(spec.ok());
  EXPECT_EQ(spec.status().message(),
            "job.yaml:3: model.hf_config: models/config.json: hidden_act: 'relu' is not supported; "
            "only silu is\n"
            "job.yaml:3: model.hf_config: models/config.json: num_experts: is part of a mixture of "
            "experts, which this version does not compute\n"
            "--set: train.steps: -1 is outside 1 to 2,147,483,648");
  EXPECT_EQ(WithConfig(HfYaml(), "{").status().message().substr(0, 67),
            "job.yaml:3: model.hf_config: models/config.json is no JSON: parse e");
  EXPECT_EQ(WithConfig(HfYaml(), "").status().message(),
            "job.yaml:3: model.hf_config: cannot read it");
  const auto mistral = WithConfig(HfYaml(), R"({"model_type": "mistral"})");
  ASSERT_TRUE(mistral.ok()) << mistral.status();
  EXPECT_EQ(mistral->model().window(), 4096);
  EXPECT_EQ(WithConfig(HfYaml(), "{}", {"model.preset=tiny"}).status().message(),
            "job.yaml:3: model.hf_config: is given beside model.preset tiny; keep one");
}

TEST(YamlSpec, AConfigFileIsRelativeToTheJobFile) {
  const std::filesystem::path folder =
      std::filesystem::path(testing::TempDir()) / absl::StrCat("spec_test_", getpid());
  std::filesystem::create_directories(folder / "models");
  std::ofstream(folder / "job.yaml") << HfYaml();
  const std::string job = (folder / "job.yaml").string();
  EXPECT_THAT(std::string(ReadJobSpecFile(job).status().message()),
              AllOf(StartsWith(absl::StrCat(job, ":3: model.hf_config: cannot read ")),
                    HasSubstr("models/config.json")));
  std::ofstream(folder / "models/config.json") << R"({"model_type": "qwen3"})";
  const auto spec = ReadJobSpecFile(job);
  EXPECT_TRUE(spec.ok()) << spec.status();
  std::filesystem::remove_all(folder);
}

TEST(YamlSpec, UnreadableFilesAreNamed) {
  const auto missing = ReadJobSpecFile("/nonexistent/job.yaml");
  EXPECT_EQ(missing.status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(missing.status().message()), HasSubstr("/nonexistent/job.yaml"));
  EXPECT_FALSE(ReadJobSpecFile("/").ok());
}

TEST(YamlSpec, SamplesAreLegal) {
  const char* source = std::getenv("UPIPE_SOURCE_DIR");
  ASSERT_NE(source, nullptr) << "run through ctest";
  int samples = 0;
  for (const auto& entry :
       std::filesystem::directory_iterator(absl::StrCat(source, "/deploy/samples"))) {
    if (entry.path().extension() != ".yaml") continue;
    ++samples;
    const auto spec = ReadJobSpecFile(entry.path().string());
    ASSERT_TRUE(spec.ok()) << spec.status();
    EXPECT_THAT(JobSpecWarnings(*spec), testing::IsEmpty()) << entry.path();
  }
  EXPECT_GE(samples, 6);
}

}  // namespace
}  // namespace upipe
