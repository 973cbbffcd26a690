// What is written to timeline.jsonl is what is read from it.
#include "common/metrics/timeline_line.h"

#include <gmock/gmock.h>
#include <google/protobuf/util/message_differencer.h>
#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"

namespace upipe {
namespace {

v1::StepTimeline Full() {
  v1::StepTimeline timeline;
  timeline.set_rank(3);
  timeline.set_step(7);
  timeline.set_generation(2);
  timeline.set_start_unix_micros(1'700'000'000'123'456);
  timeline.set_dropped_slices(5);
  timeline.add_stages("projection");
  timeline.add_stages("attention");
  timeline.add_tags("weights");
  timeline.add_tags("attn_q");
  v1::StepTimeline::Slice& slice = *timeline.add_slices();
  slice.set_lane(v1::StepTimeline::LANE_SIDE);
  slice.set_stage_name(1);
  slice.set_pass("backward");
  slice.set_layer(31);
  slice.set_stage(7);
  slice.set_begin_nanos((int64_t{1} << 53) + 1);  // beyond what a double holds
  slice.set_end_nanos((int64_t{1} << 53) + 3);
  v1::StepTimeline::Slice& other = *timeline.add_slices();
  other.set_lane(v1::StepTimeline::LANE_GATHER);
  other.set_pass("forward");
  other.set_layer(-1);
  other.set_stage(-1);
  v1::StepTimeline::MemorySample& sample = *timeline.add_memory();
  sample.set_nanos(12);
  sample.set_tag(1);
  sample.set_host(true);
  sample.set_bytes(int64_t{1} << 40);
  return timeline;
}

// A field added to one of the messages without a number of the line would come back unset.
void ExpectAllSet(const google::protobuf::Message& message) {
  const auto* descriptor = message.GetDescriptor();
  for (int i = 0; i < descriptor->field_count(); ++i) {
    const auto* field = descriptor->field(i);
    const auto* reflection = message.GetReflection();
    EXPECT_TRUE(field->is_repeated() ? reflection->FieldSize(message, field) > 0
                                     : reflection->HasField(message, field))
        << "this test leaves " << field->full_name() << " unset";
  }
}

TEST(TimelineLine, ComesBackWhole) {
  const v1::StepTimeline timeline = Full();
  ExpectAllSet(timeline);
  ExpectAllSet(timeline.slices(0));
  ExpectAllSet(timeline.memory(0));
  const std::string text = FormatTimelineLine(timeline);
  EXPECT_THAT(text, ::testing::Not(::testing::HasSubstr("\n")));
  const absl::StatusOr<v1::StepTimeline> back = ParseTimelineLine(text);
  ASSERT_TRUE(back.ok()) << back.status();
  EXPECT_TRUE(google::protobuf::util::MessageDifferencer::Equals(*back, timeline))
      << back->DebugString();
}

TEST(TimelineLine, SlicesAndSamplesAreNumbers) {
  EXPECT_EQ(
      FormatTimelineLine(Full()),
      R"({"rank":3,"step":7,"generation":2,"start_unix_micros":1700000000123456,)"
      R"("dropped_slices":5,"stages":["projection","attention"],"passes":["backward","forward"],)"
      R"("tags":["weights","attn_q"],"slices":[[1,1,0,31,7,9007199254740993,9007199254740995],)"
      R"([5,0,1,-1,-1,0,0]],"memory":[[12,1,1,1099511627776]]})");
}

TEST(TimelineLine, WhatIsNoLineIsRefused) {
  const auto with = [](const char* members) {
    return absl::StrCat(R"({"rank":0,"step":1,"stages":["mlp"],"passes":["loss"],"tags":["mlp"],)",
                        members, "}");
  };
  EXPECT_TRUE(ParseTimelineLine(with(R"("slices":[[0,0,0,-1,-1,4,4]],"later":{})")).ok());
  for (const std::string& text : {
           std::string(""),
           std::string("[]"),
           std::string(R"({"rank":0})"),
           std::string(R"({"rank":-1,"step":1})"),
           std::string(R"({"rank":0,"step":1,"stages":[7]})"),
           with(R"("slices":[[6,0,0,-1,-1,4,5]])"),   // no such lane
           with(R"("slices":[[0,1,0,-1,-1,4,5]])"),   // no such stage
           with(R"("slices":[[0,0,-1,-1,-1,4,5]])"),  // no such pass
           with(R"("slices":[[0,0,0,-2,-1,4,5]])"),
           with(R"("slices":[[0,0,0,-1,-1,5,4]])"),
           with(R"("slices":[[0,0,0,-1,-1,4]])"),
           with(R"("slices":[[0,0,0,-1,-1,4,1e99]])"),
           with(R"("memory":[[0,1,0,4]])"),  // no such tag
           with(R"("memory":[[0,0,2,4]])"),
           with(R"("memory":[7])"),
       }) {
    EXPECT_EQ(ParseTimelineLine(text).status().code(), absl::StatusCode::kDataLoss) << text;
  }
}

}  // namespace
}  // namespace upipe
