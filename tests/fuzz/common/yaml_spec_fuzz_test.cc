// Job files are untrusted: seeded mutations of legal and hostile texts must each end, quickly, in a
// spec that validates or in an error that names a line. Replays from its seed; a failing input is
// printed.
#include <google/protobuf/util/message_differencer.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "common/spec/job_spec.h"
#include "common/spec/yaml_spec.h"

namespace upipe {
namespace {

constexpr uint64_t kSeed = 20260221;
constexpr int kRounds = 20000;

const std::vector<std::string>& Corpus() {
  static const auto* corpus = new std::vector<std::string>{
      "name: demo\nmodel: {vocab_size: 257, hidden_size: 128, num_layers: 2, num_heads: 8, "
      "num_kv_heads: 2,\n"
      "  head_dim: 16, intermediate_size: 352}\ndata: {path: out/data}\n"
      "parallel:\n  ranks: 4\n  method: upipe\n  heads_per_stage: 4\n"
      "train:\n  context: 8K\n  steps: 60\n  memory_per_rank: 1.5GiB\noptimizer:\n  clip_norm: "
      ".inf\n",
      "a: &a [*a, *b]\n? {x: y}\n: !!map {<<: *a}\n",
      "%YAML 1.2\n---\n- |\n  text\n- >-\n  folded\n...\n---\n'it''s': \"\\x41\\u20ac\\n\"\n",
      "[[[[{{{{- - - ? ? ?",
      "model:\n  rope:\n    llama3: {factor: 8, low_freq_factor: 1, high_freq_factor: 4, "
      "original_context: 8K}\n",
      "name: p\nmodel:\n  preset: qwen3-8b\n  window: 8K\n  max_position: 40960\n  rope:\n    "
      "yarn: "
      "{factor: 4, original_context: 32K, beta_fast: 24, truncate: false}\n  qk_norm: true\ndata: "
      "{path: d}\nparallel: {ranks: 2, method: ulysses}\ntrain: {context: 8K, steps: 1, dtype: "
      "bf16}\n",
  };
  return *corpus;
}

constexpr const char* kTokens[] = {"auto",
                                   ".inf",
                                   "-.inf",
                                   ".nan",
                                   "~",
                                   "null",
                                   "99999999999999999999",
                                   "-1",
                                   "0",
                                   "1e999",
                                   "8K",
                                   "preset: tiny\n",
                                   "hf_config: c\n",
                                   "dynamic: {factor: 2}\n",
                                   "5M",
                                   "&a ",
                                   "*a",
                                   "!!int",
                                   "---\n",
                                   "...\n",
                                   "? ",
                                   ": ",
                                   "- ",
                                   "\t",
                                   "\n",
                                   "\r",
                                   "  ",
                                   "{",
                                   "}",
                                   "[",
                                   "]",
                                   "#",
                                   "\"",
                                   "'",
                                   "|\n",
                                   ">\n",
                                   "%TAG",
                                   "<<",
                                   "\xff",
                                   "\xe2\x82\xac",
                                   "\\x00"};

std::string Mutate(std::string text, std::mt19937_64& random) {
  const auto below = [&](size_t n) {
    return n == 0 ? size_t{0} : static_cast<size_t>(random() % n);
  };
  for (size_t edits = 1 + below(6); edits > 0; --edits) {
    const size_t at = below(text.size() + 1);
    const size_t length = std::min(text.size() - at, below(12));
    switch (below(5)) {
      case 0:
        text.erase(at, length);
        break;
      case 1:
        text.insert(at, text.substr(at, length));
        break;
      case 2:
        text.insert(at, kTokens[below(std::size(kTokens))]);
        break;
      case 3:
        text.insert(at, 1, static_cast<char>(below(256)));
        break;
      default: {
        const std::string& other = Corpus()[below(Corpus().size())];
        const size_t from = below(other.size());
        text.insert(at, other.substr(from, below(60)));
      }
    }
  }
  return text;
}

void Check(const std::string& text, const std::vector<std::string>& overrides) {
  const absl::Time start = absl::Now();
  const auto spec = ParseJobSpecYaml(text, "f", overrides);
  ASSERT_LT(absl::Now() - start, absl::Seconds(2)) << absl::CHexEscape(text);
  if (!spec.ok()) {
    ASSERT_TRUE(absl::StartsWith(spec.status().message(), "f:") ||
                absl::StartsWith(spec.status().message(), "--set: "))
        << spec.status() << "\n"
        << absl::CHexEscape(text);
    return;
  }
  ASSERT_TRUE(ValidateJobSpec(*spec).empty()) << absl::CHexEscape(text);
  const auto again = ParseJobSpecYaml(JobSpecToYaml(*spec), "again");
  ASSERT_TRUE(again.ok()) << again.status() << "\n" << absl::CHexEscape(text);
  ASSERT_TRUE(google::protobuf::util::MessageDifferencer::Equals(*again, *spec))
      << absl::CHexEscape(text);
}

TEST(YamlSpecFuzz, MutatedFilesEndInASpecOrAnError) {
  std::mt19937_64 random(kSeed);
  for (int round = 0; round < kRounds; ++round) {
    Check(Mutate(Corpus()[static_cast<size_t>(round) % Corpus().size()], random), {});
    ASSERT_FALSE(HasFatalFailure()) << "round " << round;
  }
}

TEST(YamlSpecFuzz, MutatedOverridesEndInASpecOrAnError) {
  std::mt19937_64 random(kSeed + 1);
  for (int round = 0; round < kRounds / 10; ++round) {
    Check(Corpus()[0],
          {Mutate("parallel.heads_per_stage=8", random), Mutate("data.path=x", random)});
    ASSERT_FALSE(HasFatalFailure()) << "round " << round;
  }
}

TEST(YamlSpecFuzz, LongRunsOfOneTokenStayCheap) {
  for (const char* token : kTokens) {
    std::string text;
    while (text.size() < kMaxJobSpecBytes - 16) text += token;
    Check(text, {});
    ASSERT_FALSE(HasFatalFailure()) << token;
  }
}

}  // namespace
}  // namespace upipe
