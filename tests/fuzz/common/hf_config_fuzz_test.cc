// config.json files are untrusted: seeded mutations of the published ones, of their text and of
// single values, must each end, quickly, in a model that can be written and read back or in
// problems that print on one line. Replays from its seed; a failing input is printed.
#include <google/protobuf/util/message_differencer.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "common/spec/hf_config.h"
#include "common/spec/job_spec.h"
#include "common/spec/yaml_spec.h"
#include "common/utf8.h"

namespace upipe {
namespace {

using nlohmann::json;

constexpr uint64_t kSeed = 20261130;
constexpr int kRounds = 6000;

const std::vector<std::string>& Corpus() {
  static const auto* corpus = [] {
    auto* texts = new std::vector<std::string>;
    const char* source = std::getenv("UPIPE_SOURCE_DIR");
    for (const char* folder : {"/tests/unit/common/data/hf", "/tests/fuzz/common/corpus/hf"}) {
      std::vector<std::filesystem::path> files;
      for (const auto& entry : std::filesystem::directory_iterator(
               std::string(source == nullptr ? "" : source) + folder))
        files.push_back(entry.path());
      std::sort(files.begin(), files.end());
      for (const auto& path : files) {
        std::ifstream file(path, std::ios::binary);
        std::ostringstream text;
        text << file.rdbuf();
        texts->push_back(text.str());
      }
    }
    return texts;
  }();
  return *corpus;
}

// Values in place of any other.
constexpr const char* kValues[] = {"null",
                                   "true",
                                   "false",
                                   "0",
                                   "-1",
                                   "1",
                                   "2",
                                   "1e308",
                                   "1e-320",
                                   "-0.0",
                                   "0.5",
                                   "4096",
                                   "9223372036854775807",
                                   "9223372036854775808",
                                   "18446744073709551615",
                                   "\"\"",
                                   "\"silu\"",
                                   "\"llama\"",
                                   "\"qwen3\"",
                                   "\"mistral\"",
                                   "\"yarn\"",
                                   "\"dynamic\"",
                                   "[]",
                                   "[null]",
                                   "{}",
                                   R"({"rope_type": "yarn", "factor": 4})",
                                   R"({"type": "dynamic", "factor": 1e300})",
                                   R"({"rope_type": "llama3"})",
                                   "[\"full_attention\"]",
                                   R"("\u0000\u001b[31m\n\u2028")"};

constexpr const char* kTokens[] = {"{",    "}",    "[",      "]",        ",",      ":",
                                   "\"",   "\\",   "\\u",    "\\ud800",  "null",   "1e999",
                                   "-",    "NaN",  "//",     "/*",       "\xff",   "\xe2\x82\xac",
                                   "\x1b", "\x00", "\"a\":", "99999999", "\"rope", "_experts\": 1"};

class Mutator {
 public:
  explicit Mutator(uint64_t seed) : random_(seed) {}

  size_t Below(size_t n) { return n == 0 ? 0 : static_cast<size_t>(random_() % n); }

  std::string Text(std::string text) {
    for (size_t edits = 1 + Below(6); edits > 0; --edits) {
      const size_t at = Below(text.size() + 1);
      const size_t length = std::min(text.size() - at, Below(12));
      switch (Below(4)) {
        case 0:
          text.erase(at, length);
          break;
        case 1:
          text.insert(at, text.substr(at, length));
          break;
        case 2:
          text.insert(at, kTokens[Below(std::size(kTokens))]);
          break;
        default:
          text.insert(at, 1, static_cast<char>(Below(256)));
      }
    }
    return text;
  }

  // Still JSON: some values of the file and of its RoPE section replaced.
  std::string Values(const std::string& text) {
    json object = json::parse(text, nullptr, false);
    if (!object.is_object()) return text;
    for (size_t edits = 1 + Below(4); edits > 0 && !object.empty(); --edits) {
      auto member = std::next(object.begin(), static_cast<int64_t>(Below(object.size())));
      json* value = &member.value();
      if (value->is_object() && !value->empty() && Below(2) == 0) {
        value = &std::next(value->begin(), static_cast<int64_t>(Below(value->size()))).value();
      }
      *value = json::parse(kValues[Below(std::size(kValues))]);
    }
    return object.dump();
  }

 private:
  std::mt19937_64 random_;
};

bool PrintsOnOneLine(const std::string& text) {
  return ToUtf8(text, text.size()) == text && text.size() < 600 &&
         std::none_of(text.begin(), text.end(), absl::ascii_iscntrl);
}

v1::JobSpec JobOf(const v1::ModelSpec& model) {
  v1::JobSpec spec = *ParseJobSpecYaml(
      "name: a\nmodel: {preset: tiny}\ndata: {path: b}\n"
      "parallel: {ranks: 1, method: upipe, heads_per_stage: 1}\ntrain: {context: 1, steps: 1}\n",
      "job");
  *spec.mutable_model() = model;
  return spec;
}

// Counts the models that could be trained.
void Check(const std::string& text, int& legal) {
  const absl::Time start = absl::Now();
  v1::ModelSpec model;
  const std::vector<Violation> violations = ReadHfConfig(text, model);
  ASSERT_LT(absl::Now() - start, absl::Seconds(2)) << absl::CHexEscape(text);
  for (const Violation& violation : violations) {
    ASSERT_TRUE(PrintsOnOneLine(violation.field) && PrintsOnOneLine(violation.message))
        << absl::CHexEscape(violation.field) << ": " << absl::CHexEscape(violation.message) << "\n"
        << absl::CHexEscape(text);
  }
  if (!violations.empty()) return;
  const v1::JobSpec spec = JobOf(model);
  if (!ValidateJobSpec(spec).empty()) return;
  ++legal;
  const auto again = ParseJobSpecYaml(JobSpecToYaml(spec), "again");
  ASSERT_TRUE(again.ok()) << again.status() << "\n" << absl::CHexEscape(text);
  ASSERT_TRUE(google::protobuf::util::MessageDifferencer::Equals(*again, spec))
      << absl::CHexEscape(text);
}

TEST(HfConfigFuzz, MutatedFilesEndInAModelOrInProblems) {
  ASSERT_GE(Corpus().size(), 48u) << "run through ctest";
  Mutator mutator(kSeed);
  int legal = 0;
  for (int round = 0; round < kRounds; ++round) {
    const std::string& text = Corpus()[static_cast<size_t>(round) % Corpus().size()];
    Check(round % 2 == 0 ? mutator.Text(text) : mutator.Values(text), legal);
    ASSERT_FALSE(HasFatalFailure()) << "round " << round;
  }
  EXPECT_GT(legal, kRounds / 50) << "mutations no longer reach past the refusals";
}

TEST(HfConfigFuzz, KeptInputsEndInAModelOrInProblems) {
  int legal = 0;
  for (const std::string& text : Corpus()) {
    Check(text, legal);
    ASSERT_FALSE(HasFatalFailure());
  }
}

TEST(HfConfigFuzz, LongRunsOfOneTokenStayCheap) {
  int legal = 0;
  for (const char* token : kTokens) {
    if (*token == '\0') continue;
    std::string text = R"({"model_type": "llama", "a": )";
    while (text.size() < kMaxHfConfigBytes - 16) text += token;
    Check(text, legal);
    ASSERT_FALSE(HasFatalFailure()) << token;
  }
}

}  // namespace
}  // namespace upipe
