// docs/memory.md says what the code says: its tables and its plot are made anew and compared, and
// the curves of this engine, composed from short runs, are the bytes of whole steps.
#include "tools/memory/memory_figures.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <sstream>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "common/check.h"
#include "common/spec/model_presets.h"
#include "common/spec/model_rules.h"
#include "tools/memory/engine_bytes.h"

namespace upipe::memory {
namespace {

using testing::HasSubstr;

std::string TextOf(const std::string& path) {
  std::ifstream in(absl::StrCat(std::getenv("UPIPE_SOURCE_DIR"), "/", path));
  std::stringstream text;
  text << in.rdbuf();
  EXPECT_FALSE(text.str().empty()) << path;
  return text.str();
}

TEST(MemoryFigures, TheDocumentSaysWhatTheCodeSays) {
  const auto figures = MakeFigures();
  ASSERT_TRUE(figures.ok()) << figures.status();
  const std::string page = TextOf("docs/memory.md");
  const auto filled = Filled(page, figures->tables);
  ASSERT_TRUE(filled.ok()) << filled.status();
  const std::vector<std::string> is = absl::StrSplit(page, '\n');
  const std::vector<std::string> should = absl::StrSplit(*filled, '\n');
  EXPECT_EQ(is, should) << "run build/bin/upipe-memory-figures";
  EXPECT_TRUE(TextOf("docs/pictures/memory-by-context.svg") == figures->picture)
      << "run build/bin/upipe-memory-figures";
}

EngineSetup Llama8B(bool hidden_on_host, int64_t query_chunks) {
  const auto model = ModelPreset("llama3-8b");
  UPIPE_CHECK(model.ok()) << model.status();
  EngineSetup setup = {.model = WithModelDefaults(*model), .ulysses_ranks = 8};
  setup.memory.set_layer_inputs(v1::PLACE_HOST);
  if (hidden_on_host) setup.memory.set_hidden_stream(v1::PLACE_HOST);
  setup.memory.set_query_chunks(query_chunks);
  return setup;
}

void ExpectComposed(const EngineSetup& setup, int64_t context) {
  const auto whole = WholeStep(setup, context);
  const auto composed = ComposedSteps(setup, {context});
  ASSERT_TRUE(whole.ok() && composed.ok()) << whole.status() << composed.status();
  EXPECT_EQ((*composed)[0].device, whole->device) << context;
  EXPECT_EQ((*composed)[0].host, whole->host) << context;
}

TEST(EngineBytes, ComposedOfFewLayersAreThoseOfAll) {
  for (const auto& [hidden, chunks] :
       {std::pair(false, 1), std::pair(true, 1), std::pair(true, 16)}) {
    ExpectComposed(Llama8B(hidden, chunks), 256 << 10);
  }
  EngineSetup stride = Llama8B(false, 1);
  stride.memory.set_checkpoint_stride(2);
  ExpectComposed(stride, 128 << 10);
}

// Sixteen ranks as the paper's second set-up: ring ranks hold as much as one another.
TEST(EngineBytes, RanksAreAlike) {
  EngineSetup setup = Llama8B(false, 1);
  setup.ring_ranks = 2;
  setup.model.set_num_layers(2);
  const auto first = WholeStep(setup, 128 << 10);
  ASSERT_TRUE(first.ok()) << first.status();
  for (int rank = 1; rank < 16; ++rank) {
    const auto other = WholeStep(setup, 128 << 10, rank);
    ASSERT_TRUE(other.ok()) << other.status();
    EXPECT_EQ(other->device, first->device) << rank;
    EXPECT_EQ(other->host, first->host) << rank;
  }
}

TEST(EngineBytes, BeyondTheLongestRunTheyLieOnALine) {
  for (const auto& [hidden, chunks] :
       {std::pair(false, 1), std::pair(true, 1), std::pair(true, 16)}) {
    EngineSetup setup = Llama8B(hidden, chunks);
    setup.model.set_num_layers(2);
    ExpectComposed(setup, 6 << 20);
  }
}

TEST(MemoryFigures, ATableNobodyMakesOrWantsIsAnError) {
  const std::string text = "a\n<!-- table x -->\nold\n<!-- end -->\nb\n";
  EXPECT_EQ(*Filled(text, {{"x", "new\n"}}), "a\n<!-- table x -->\nnew\n<!-- end -->\nb\n");
  EXPECT_THAT(Filled(text, {}).status().message(), HasSubstr("no table x"));
  EXPECT_THAT(Filled(text, {{"x", ""}, {"y", ""}}).status().message(), HasSubstr("for table y"));
  EXPECT_THAT(Filled("<!-- table x -->\nold", {{"x", ""}}).status().message(),
              HasSubstr("follows"));
}

// A colour that is used and not defined is drawn black.
TEST(MemoryFigures, EveryColourOfThePictureIsDefined) {
  const std::string picture = TextOf("docs/pictures/memory-by-context.svg");
  size_t found = 0;
  for (size_t at = picture.find("var("); at != std::string::npos; at = picture.find("var(", at)) {
    at += 4;
    const std::string name = picture.substr(at, picture.find(')', at) - at);
    EXPECT_NE(picture.find(name + ":"), std::string::npos) << name;
    ++found;
  }
  EXPECT_GT(found, 10u);
}

}  // namespace
}  // namespace upipe::memory
