// The search over made-up prices: what is chosen fits, no single change is better, bounds leave out
// only what cannot win, and what is written stays.
#include "planner/search.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/check.h"
#include "common/spec/job_spec.h"
#include "common/spec/yaml_spec.h"
#include "planner/points.h"

namespace upipe::planner {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

constexpr char kJob[] = R"(name: search
model: {vocab_size: 64, hidden_size: 64, num_layers: 8, num_heads: 8, num_kv_heads: 2, head_dim: 8,
  intermediate_size: 48}
data: {path: none}
parallel: {ranks: 8, method: auto}
memory: {policy: auto}
train: {context: 64K, steps: 3}
)";

v1::JobSpec Spec(const std::vector<std::string>& overrides = {}) {
  const auto spec = ParseJobSpecYaml(kJob, "job.yaml", overrides);
  UPIPE_CHECK(spec.ok()) << spec.status();
  return WithDefaults(*spec);
}

// More in memory is faster, each knob by its own weight; narrow stages are lean and slow.
Price MadeUp(const v1::JobSpec& spec) {
  const v1::MemorySpec& memory = spec.memory();
  const ContextRanks ranks = *ContextRanksOf(spec.parallel());
  const int64_t u = spec.parallel().method() == v1::METHOD_UPIPE
                        ? spec.parallel().heads_per_stage() / ranks.ulysses
                        : 8 / ranks.ulysses;
  Price price = {.device_bytes = 100 + 10 * u, .host_bytes = 10, .seconds = 100};
  price.seconds += 8.0 / static_cast<double>(u) + 3.0 * static_cast<double>(ranks.ring);
  const auto place = [&](v1::Place where, int64_t bytes, double seconds) {
    (where == v1::PLACE_HOST ? price.host_bytes : price.device_bytes) += bytes;
    if (where == v1::PLACE_HOST) price.seconds += seconds;
  };
  place(memory.layer_inputs(), 80 / memory.checkpoint_stride(), 1);
  place(memory.hidden_stream(), 40, 5);
  place(memory.stage_kv(), 20, 4);
  place(memory.optimizer(), 60, 2);
  if (memory.attention_output() == v1::ATTENTION_OUTPUT_DEVICE) price.device_bytes += 80;
  if (memory.attention_output() == v1::ATTENTION_OUTPUT_HOST) price.host_bytes += 80;
  if (memory.attention_output() == v1::ATTENTION_OUTPUT_RECOMPUTE) price.seconds += 25;
  price.device_bytes += 5 * memory.checkpoint_stride() + 30 / memory.query_chunks();
  price.seconds += 0.5 * memory.checkpoint_stride() + static_cast<double>(memory.query_chunks());
  if (memory.overlap()) price.device_bytes += 10;
  if (!memory.overlap()) price.seconds += 3;
  return price;
}

Pricer MadeUpPricer() {
  return [](const v1::JobSpec& spec) -> absl::StatusOr<Price> {
    UPIPE_CHECK(ValidateJobSpec(spec).empty()) << "an illegal point was priced";
    UPIPE_CHECK(!HasAuto(spec)) << "something auto was priced";
    return MadeUp(spec);
  };
}

// Every legal point of every split.
std::vector<v1::JobSpec> AllPoints(const v1::JobSpec& spec) {
  std::vector<v1::JobSpec> points;
  for (const v1::JobSpec& split : SplitsOf(spec)) {
    const std::vector<Knob> knobs = KnobsOf(split);
    std::set<std::string> seen;
    std::vector<v1::JobSpec> open = {Leanest(split, knobs)};
    while (!open.empty()) {
      v1::JobSpec at = open.back();
      open.pop_back();
      if (!seen.insert(at.memory().SerializeAsString()).second) continue;
      for (Move& move : MovesOf(at, knobs)) open.push_back(std::move(move.spec));
      points.push_back(std::move(at));
    }
  }
  return points;
}

TEST(Points, EachPointOfTheSpaceHasOneName) {
  std::set<std::string> names;
  for (const v1::JobSpec& split : SplitsOf(Spec())) {
    const ContextRanks ranks = *ContextRanksOf(split.parallel());
    const bool upipe = split.parallel().method() == v1::METHOD_UPIPE;
    const int64_t u =
        upipe ? split.parallel().heads_per_stage() / ranks.ulysses : 8 / ranks.ulysses;
    EXPECT_EQ(upipe, u < 8 / ranks.ulysses);
    EXPECT_TRUE(names.insert(absl::StrCat(ranks.ulysses, " ", ranks.ring, " ", u)).second);
  }
  // C 8: 1; C 4: 1, 2; C 2: 1, 2, 4; C 1: 1, 2, 4, 8.
  EXPECT_EQ(names.size(), 10u);
}

TEST(Points, WhatIsWrittenStays) {
  const v1::JobSpec spec = Spec({"parallel.method=usp", "parallel.ring_ranks=auto",
                                 "memory.overlap=true", "memory.optimizer=host"});
  for (const v1::JobSpec& split : SplitsOf(spec)) {
    EXPECT_EQ(split.parallel().method(), v1::METHOD_USP);
    EXPECT_GE(split.parallel().ring_ranks(), 2);
    for (const Move& move : MovesOf(Leanest(split, KnobsOf(split)), KnobsOf(split))) {
      EXPECT_TRUE(move.spec.memory().overlap());
      EXPECT_EQ(move.spec.memory().optimizer(), v1::PLACE_HOST);
    }
  }
  const std::vector<v1::JobSpec> one =
      SplitsOf(Spec({"parallel.method=upipe", "parallel.heads_per_stage=8", "memory.policy="}));
  ASSERT_EQ(one.size(), 1u);
  EXPECT_TRUE(KnobsOf(one[0]).empty());
}

TEST(Points, EndsAreTheLeanestAndTheFastestLegalValues) {
  for (const v1::JobSpec& split : SplitsOf(Spec())) {
    const v1::MemorySpec lean = Leanest(split, KnobsOf(split)).memory();
    EXPECT_EQ(lean.layer_inputs(), v1::PLACE_HOST);
    EXPECT_EQ(lean.hidden_stream(), v1::PLACE_HOST);
    EXPECT_EQ(lean.attention_output(), v1::ATTENTION_OUTPUT_RECOMPUTE);
    const v1::MemorySpec fast = Fastest(split, KnobsOf(split)).memory();
    EXPECT_EQ(fast.layer_inputs(), v1::PLACE_DEVICE);
    EXPECT_EQ(fast.hidden_stream(), v1::PLACE_DEVICE);
    EXPECT_EQ(fast.attention_output(), v1::ATTENTION_OUTPUT_DEVICE);
    EXPECT_EQ(fast.query_chunks(), 1);
    EXPECT_EQ(fast.checkpoint_stride(), 1);
  }
}

TEST(Search, WhatIsChosenFitsAndIsNearTheBestOfAllPoints) {
  const std::vector<v1::JobSpec> all = AllPoints(Spec());
  for (const int64_t device : {150, 180, 220, 260, 300, 400, 1000}) {
    for (const int64_t host : {0, 60, 120, 400}) {
      const Room room = {.device_bytes = device, .host_bytes = host};
      double best = std::numeric_limits<double>::infinity();
      for (const v1::JobSpec& point : all) {
        const Price price = MadeUp(point);
        if (Fits(price, room)) best = std::min(best, price.seconds);
      }
      const auto found =
          Search(Spec(), MadeUpPricer(), {.room = room, .num_threads = 2, .most_points = 1 << 20});
      const auto any = AnythingThatFits(Spec(), MadeUpPricer(), room);
      ASSERT_TRUE(any.ok()) << any.status();
      EXPECT_EQ(found.ok(), any->has_value()) << device << " " << host;
      if (!found.ok()) {
        EXPECT_TRUE(absl::IsResourceExhausted(found.status())) << found.status();
        EXPECT_THAT(found.status().message(), HasSubstr("nothing fits"));
        continue;
      }
      EXPECT_TRUE(Fits(found->price, room));
      EXPECT_LE(found->price.seconds, best * 1.06) << device << " " << host;
      EXPECT_LT(found->priced, static_cast<int64_t>(all.size()) / 3);
      EXPECT_EQ(found->candidates.size(), 10u);
      EXPECT_EQ(found->candidates[0].verdict(), "the fastest that fits");
    }
  }
}

TEST(Search, RunnersUpSayWhyTheyLost) {
  const auto found = Search(Spec(), MadeUpPricer(), {.room = {.device_bytes = 178}});
  ASSERT_TRUE(found.ok()) << found.status();
  std::map<std::string, int> verdicts;
  for (const v1::Candidate& candidate : found->candidates) {
    EXPECT_FALSE(candidate.verdict().empty());
    ++verdicts[candidate.verdict().substr(0, 4)];
  }
  EXPECT_EQ(verdicts["the "], 1);
  EXPECT_GE(verdicts["fits"] + verdicts["not "], 1);
}

TEST(Search, ErrorsOfAPriceEndIt) {
  const auto found =
      Search(Spec(), [](const v1::JobSpec&) { return absl::NotFoundError("no rate"); },
             {.room = {.device_bytes = 178}, .num_threads = 2});
  EXPECT_TRUE(absl::IsNotFound(found.status())) << found.status();
}

TEST(Search, AShortageNamesBothNumbers) {
  const Room room = {.device_bytes = 1 << 20, .host_bytes = 1 << 20};
  EXPECT_EQ(Shortage({.device_bytes = 1 << 20, .host_bytes = 1 << 20, .seconds = 1}, room), "");
  EXPECT_EQ(Shortage({.device_bytes = 2 << 20, .host_bytes = 3 << 20, .seconds = 1}, room),
            "2.0 MiB of device memory per rank and may take 1.0 MiB; 3.0 MiB of host memory per "
            "node and may take 1.0 MiB");
  EXPECT_TRUE(Fits({.device_bytes = 1, .host_bytes = 3 << 20, .seconds = 1}, {.device_bytes = 2}));
}

TEST(LargestThatFits, IsWithinItsPrecisionForEveryLimit) {
  for (const int64_t edge : {0, 1, 2, 3, 63, 64, 65, 1000, 4097, 99'999, 100'000}) {
    for (const int64_t start : {1, 64, 5000, 1 << 20}) {
      int asked = 0;
      const auto found = LargestThatFits(1, start, 100'000, [&](int64_t n) -> absl::StatusOr<bool> {
        ++asked;
        return n <= edge;
      });
      ASSERT_TRUE(found.ok());
      EXPECT_LE(*found, edge);
      EXPECT_LE(edge - *found, std::max<int64_t>(0, *found / 128)) << edge << " from " << start;
      EXPECT_LE(asked, 40);
    }
  }
  EXPECT_EQ(*LargestThatFits(16, 100, 100,
                             [](int64_t n) -> absl::StatusOr<bool> {
                               EXPECT_EQ(n % 16, 0);
                               return true;
                             }),
            96);
}

}  // namespace
}  // namespace upipe::planner
