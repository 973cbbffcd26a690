// Texts as long as they may be, of one token over and over: what a fuzzer with small inputs does
// not come to. None may take seconds or the stack.
#include <gtest/gtest.h>

#include <string>

#include "absl/strings/escaping.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "common/spec/hf_config.h"
#include "common/spec/yaml_spec.h"

namespace upipe {
namespace {

constexpr const char* kYamlTokens[] = {
    "auto", ".inf", ".nan",  "~",     "0",     "1e999", "8K", "preset: tiny\n",
    "&a ",  "*a",   "!!int", "---\n", "...\n", "? ",    ": ", "- ",
    "\t",   "\n",   "\r",    "  ",    "{",     "}",     "[",  "]",
    "#",    "\"",   "'",     "|\n",   ">\n",   "%TAG",  "<<", "\xff"};

constexpr const char* kJsonTokens[] = {
    "{", "}",   "[",  "]",  ",",    ":",    "\"",    "\\",      "\\u",    "null",
    "-", "NaN", "//", "/*", "\xff", "\x1b", "1e999", "\\ud800", "\"a\":", "99999999"};

std::string Repeat(const char* token, size_t bytes, std::string text) {
  while (text.size() < bytes) text += token;
  return text;
}

template <typename Parse>
void ExpectCheap(const char* token, const Parse& parse) {
  const absl::Time start = absl::Now();
  parse();
  EXPECT_LT(absl::Now() - start, absl::Seconds(2)) << absl::CHexEscape(token);
}

TEST(LongRuns, OfJobFilesStayCheap) {
  for (const char* token : kYamlTokens) {
    const std::string text = Repeat(token, kMaxJobSpecBytes - 16, "");
    ExpectCheap(token, [&] { EXPECT_FALSE(ParseJobSpecYaml(text, "f").ok()); });
  }
}

TEST(LongRuns, OfModelConfigurationsStayCheap) {
  for (const char* token : kJsonTokens) {
    const std::string text =
        Repeat(token, kMaxHfConfigBytes - 16, R"({"model_type": "llama", "a": )");
    v1::ModelSpec model;
    ExpectCheap(token, [&] { EXPECT_FALSE(ReadHfConfig(text, model).empty()); });
  }
}

}  // namespace
}  // namespace upipe
