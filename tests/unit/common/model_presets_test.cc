#include "common/spec/model_presets.h"

#include <gmock/gmock.h>
#include <google/protobuf/util/message_differencer.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <map>
#include <set>
#include <sstream>
#include <string>

#include "absl/strings/str_cat.h"
#include "common/spec/hf_config.h"
#include "common/spec/job_spec.h"
#include "common/spec/model_rules.h"

namespace upipe {
namespace {

using google::protobuf::util::MessageDifferencer;
using testing::IsEmpty;
using testing::StartsWith;

// As published, counted from the released weights; small ones counted by hand.
const std::map<std::string, int64_t> kParameters = {
    {"tiny", 418688},
    {"small", 2951936},
    {"medium", 22816256},
    {"llama3-8b", 8030261248},
    {"llama3-70b", 70553706496},
    {"llama3.1-8b", 8030261248},
    {"llama3.1-70b", 70553706496},
    {"llama3.2-1b", 1235814400},
    {"llama3.2-3b", 3212749824},
    {"qwen2.5-0.5b", 494032768},
    {"qwen2.5-1.5b", 1543714304},
    {"qwen2.5-7b", 7615616512},
    {"qwen3-0.6b", 596049920},
    {"qwen3-1.7b", 1720574976},
    {"qwen3-4b", 4022468096},
    {"qwen3-8b", 8190735360},
    {"qwen3-14b", 14768307200},
    {"qwen3-32b", 32762123264},
    {"mistral-7b-v0.3", 7248023552},
};

TEST(ModelPresets, HaveThePublishedNumberOfParameters) {
  std::set<std::string> names;
  for (const PresetInfo& preset : ModelPresets()) {
    ASSERT_TRUE(kParameters.contains(preset.name)) << preset.name;
    EXPECT_EQ(ParameterCount(preset.model), kParameters.at(preset.name)) << preset.name;
    EXPECT_TRUE(names.insert(preset.name).second) << preset.name;
    EXPECT_FALSE(preset.summary.empty());
    EXPECT_EQ(preset.model.preset(), "");
  }
  EXPECT_EQ(names.size(), kParameters.size());
}

// The rest of a shape, which the number of parameters does not tell: against the published file.
TEST(ModelPresets, EqualThePublishedFiles) {
  const std::map<std::string, std::string> files = {
      {"llama3-8b", "llama-3-8b"},     {"llama3-70b", "llama-3-70b"},
      {"llama3.1-8b", "llama-3.1-8b"}, {"llama3.2-1b", "llama-3.2-1b"},
      {"llama3.2-3b", "llama-3.2-3b"}, {"qwen2.5-0.5b", "qwen2.5-0.5b"},
      {"qwen3-0.6b", "qwen3-0.6b"},    {"qwen3-8b", "qwen3-8b"},
      {"qwen3-32b", "qwen3-32b"},      {"mistral-7b-v0.3", "mistral-7b-v0.3"},
  };
  const char* source = std::getenv("UPIPE_SOURCE_DIR");
  ASSERT_NE(source, nullptr) << "run through ctest";
  for (const auto& [name, file] : files) {
    std::ifstream json(absl::StrCat(source, "/tests/unit/common/data/hf/", file, ".json"));
    std::ostringstream text;
    text << json.rdbuf();
    v1::ModelSpec published;
    ASSERT_THAT(ReadHfConfig(text.str(), published), IsEmpty()) << file;
    EXPECT_TRUE(MessageDifferencer::Equals(WithModelDefaults(*ModelPreset(name)),
                                           WithModelDefaults(published)))
        << name << "\n"
        << published.DebugString();
  }
}

TEST(ModelPresets, AreLegalModels) {
  for (const PresetInfo& preset : ModelPresets()) {
    SpecChecker checker;
    const v1::ModelSpec model = WithModelDefaults(preset.model);
    CheckModel(model, checker);
    EXPECT_THAT(checker.Take(), IsEmpty()) << preset.name;
    EXPECT_THAT(ModelWarnings(model, 8192), IsEmpty()) << preset.name;
  }
}

TEST(ModelPresets, AMissNamesTheNearest) {
  EXPECT_EQ(ModelPreset("qwen3-8").status().message(),
            "'qwen3-8' is unknown; did you mean 'qwen3-8b'?");
  EXPECT_EQ(ModelPreset("gpt-5").status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(ModelPreset("gpt-5").status().message()),
              StartsWith("'gpt-5' is unknown; known: tiny, small, medium, llama3-8b, "));
  EXPECT_THAT(std::string(ModelPreset("").status().message()), StartsWith("'' is unknown"));
}

TEST(ModelPresets, ParametersCountEachKindOnce) {
  v1::ModelSpec model = *ModelPreset("tiny");  // d 128, 2 layers, H 8, K 2, D 16, F 352
  const int64_t plain = ParameterCount(model);
  model.set_qk_norm(true);
  EXPECT_EQ(ParameterCount(model) - plain, 2 * 2 * 16);
  model.set_qkv_bias(true);
  EXPECT_EQ(ParameterCount(model) - plain, 2 * 2 * 16 + 2 * (8 + 2 * 2) * 16);
  model.set_tie_embeddings(true);
  EXPECT_EQ(ParameterCount(model) - plain, 2 * 2 * 16 + 2 * (8 + 2 * 2) * 16 - 257 * 128);
}

}  // namespace
}  // namespace upipe
