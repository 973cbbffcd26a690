// Measured steps as trace events: slices nest, counters are the timeline's, times ascend, whoever
// wrote the timeline.
#include "common/trace/step_trace.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "tests/support/report/sample_record.h"

namespace upipe::trace {
namespace {

using Json = nlohmann::json;
using ::testing::ElementsAre;
using upipe::testing::SampleTimeline;

// In nanoseconds, as whole numbers.
int64_t Nanos(const Json& microseconds) { return std::llround(microseconds.get<double>() * 1e3); }

// Every event of `kind` in order.
std::vector<Json> Events(const std::string& trace, const std::string& kind) {
  std::vector<Json> events;
  const Json parsed = Json::parse(trace);
  for (const Json& event : parsed.at("traceEvents")) {
    if (event.at("ph") == kind) events.push_back(event);
  }
  return events;
}

// Slices of one thread lie beside each other or inside each other, and what encloses comes first.
// Returns each slice's way from the outermost: "step 7/forward/layer 0/stage 1/attention".
std::vector<std::string> ExpectNested(const std::string& trace) {
  struct Open {
    std::string path;
    int64_t end;
  };
  std::map<std::tuple<int, int>, std::vector<Open>> threads;
  std::vector<std::string> paths;
  int64_t before = 0;
  for (const Json& event : Events(trace, "X")) {
    const int64_t begin = Nanos(event.at("ts")), end = begin + Nanos(event.at("dur"));
    EXPECT_GE(begin, before) << event;
    before = begin;
    std::vector<Open>& open = threads[{event.at("pid"), event.at("tid")}];
    while (!open.empty() && open.back().end <= begin) open.pop_back();
    EXPECT_TRUE(open.empty() || end <= open.back().end) << event;
    const std::string name = event.at("name");
    open.push_back({open.empty() ? name : open.back().path + "/" + name, end});
    paths.push_back(open.back().path);
  }
  return paths;
}

TEST(StepTrace, SlicesOfAThreadLieInsideEachOther) {
  const std::string trace = StepTrace("demo", {SampleTimeline(0, 7, 3), SampleTimeline(1, 7, 3)});
  const std::vector<std::string> paths = ExpectNested(trace);
  const std::set<std::string> all(paths.begin(), paths.end());
  for (const char* path :
       {"step 7", "step 7/forward", "step 7/forward/layer 0", "step 7/forward/layer 0/stage 1",
        "step 7/forward/layer 0/stage 1/attention", "step 7/backward/layer 2/mlp",
        "step 7/forward/loss"}) {
    EXPECT_TRUE(all.contains(path)) << path;
  }
  std::set<std::tuple<int, std::string>> threads;
  for (const Json& event : Events(trace, "M")) {
    if (event.at("name") != "thread_name") continue;
    threads.emplace(event.at("pid"), event.at("args").at("name"));
  }
  for (const int process : {1, 2}) {
    for (const char* lane : {"compute", "side", "weights"}) {
      EXPECT_TRUE(threads.contains({process, lane})) << lane;
    }
  }
}

// As many slices of work as the timeline has, each with its times.
TEST(StepTrace, EverySliceIsThere) {
  const v1::StepTimeline timeline = SampleTimeline(0, 7, 2);
  std::multiset<std::tuple<int, int64_t, int64_t, std::string>> expected, drawn;
  for (const auto& slice : timeline.slices()) {
    expected.emplace(2001 + slice.lane(), slice.begin_nanos(), slice.end_nanos(),
                     timeline.stages(slice.stage_name()));
  }
  const std::set<std::string> stages(timeline.stages().begin(), timeline.stages().end());
  for (const Json& event : Events(StepTrace("demo", {timeline}), "X")) {
    if (!stages.contains(event.at("name"))) continue;
    const int64_t begin = Nanos(event.at("ts"));
    drawn.emplace(event.at("tid"), begin, begin + Nanos(event.at("dur")), event.at("name"));
  }
  EXPECT_EQ(drawn, expected);
}

// Perfetto would call such a thread the main one, and show it before the others.
TEST(StepTrace, NoThreadHasItsProcessesNumber) {
  std::vector<v1::StepTimeline> steps;
  for (int rank = 0; rank < 1024; rank += 341) steps.push_back(SampleTimeline(rank, 7, 1));
  for (int rank = 1; rank < 8; ++rank) steps.push_back(SampleTimeline(rank, 7, 1));
  const std::string trace = StepTrace("demo", steps);
  for (const Json& event : Events(trace, "X")) EXPECT_NE(event.at("tid"), event.at("pid"));
  for (const Json& event : Events(trace, "M")) EXPECT_NE(event.at("tid"), event.at("pid"));
}

// Played back, the counters hold at every moment what the timeline says.
TEST(StepTrace, CountersAreTheTimelines) {
  v1::StepTimeline timeline = SampleTimeline(3, 7, 2);
  timeline.mutable_memory(4)->set_host(true);
  std::map<std::tuple<std::string, int64_t>, std::map<std::string, int64_t>> expected, drawn;
  for (const auto& sample : timeline.memory()) {
    expected[{sample.host() ? "host memory" : "device memory", sample.nanos()}]
            [timeline.tags(sample.tag())] = sample.bytes();
  }
  int64_t before = 0;
  for (const Json& event : Events(StepTrace("demo", {timeline}), "C")) {
    EXPECT_EQ(event.at("pid"), 4);
    EXPECT_GE(Nanos(event.at("ts")), before);
    before = Nanos(event.at("ts"));
    for (const auto& [tag, bytes] : event.at("args").items()) {
      drawn[{event.at("name"), before}][tag] = bytes;
    }
  }
  EXPECT_EQ(drawn, expected);
}

TEST(StepTrace, RanksLieWhereTheirClocksSay) {
  v1::StepTimeline first = SampleTimeline(0, 7, 1), second = SampleTimeline(1, 7, 1);
  first.set_start_unix_micros(1'785'000'000'000'250);
  second.set_start_unix_micros(1'785'000'000'000'000);
  std::map<int, int64_t> begins;
  for (const Json& event : Events(StepTrace("demo", {first, second}), "X")) {
    begins.try_emplace(event.at("pid"), Nanos(event.at("ts")));
  }
  EXPECT_EQ(begins.at(2), 0);
  EXPECT_EQ(begins.at(1), 250'000);
}

TEST(StepTrace, WhatCannotBeIsLeftOut) {
  v1::StepTimeline timeline;
  timeline.set_step(1);
  timeline.add_stages("attention <\xff>");
  const auto add = [&](int lane, int stage, int64_t begin, int64_t end) {
    auto& slice = *timeline.add_slices();
    slice.set_lane(static_cast<v1::StepTimeline::Lane>(lane));
    slice.set_stage_name(stage);
    slice.set_begin_nanos(begin);
    slice.set_end_nanos(end);
    slice.set_layer(-1);
    slice.set_stage(-1);
  };
  add(0, 0, 0, 10);
  add(0, 0, 5, 15);   // inside the one before
  add(0, 9, 20, 30);  // no such name
  add(0, 0, 40, 30);  // ends before it begins
  add(17, 0, 0, 10);  // a stream of a later version
  timeline.add_memory()->set_tag(3);
  const std::string trace = StepTrace("demo", {timeline});
  const std::vector<std::string> paths = ExpectNested(trace);
  EXPECT_EQ(paths.size(), 6u);  // step, pass and work on two streams
  EXPECT_THAT(Events(trace, "C"), ElementsAre());
  EXPECT_NO_THROW(Json::parse(StepTrace("demo", {})));
}

}  // namespace
}  // namespace upipe::trace
