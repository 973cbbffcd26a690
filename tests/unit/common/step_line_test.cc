// What is written to metrics.jsonl is what is read from it, and any JSON reader can read it.
#include "common/metrics/step_line.h"

#include <gmock/gmock.h>
#include <google/protobuf/util/message_differencer.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>

namespace upipe {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

void AddRange(v1::PositionLoss& range, int64_t begin, int64_t end, double loss) {
  range.set_begin(begin);
  range.set_end(end);
  range.set_loss(loss);
  range.set_tokens(end - begin);
}

// Every field set, to values that differ.
StepLine Full() {
  StepLine line = {.rank = 3, .missing_steps = 2};
  v1::StepReport& report = line.report;
  report.set_step(7);
  report.set_total_steps(60);
  report.set_loss(1.0 / 3);
  report.set_grad_norm(0.1);
  report.set_learning_rate(3e-3);
  report.set_skipped(true);
  report.set_skipped_steps_total(4);
  report.set_tokens(8192);
  report.set_step_seconds(1.25);
  report.set_tokens_per_second(6553.6);
  report.set_comm_seconds(0.25);
  report.set_data_seconds(0.5);
  report.set_held_out_loss(2.75);
  report.set_unix_millis(1'700'000'000'123);
  report.add_bytes_sent_to_peer(0);
  report.add_bytes_sent_to_peer(int64_t{1} << 40);
  AddRange(*report.add_loss_by_position(), 0, 4096, 3.5);
  AddRange(*report.add_loss_by_position(), 4096, 8192, 3.25);
  AddRange(*report.add_held_out_loss_by_position(), 0, 4096, 3);
  for (const char* name : {"attention", "mlp"}) {
    v1::StageSeconds& stage = *report.add_stages();
    stage.set_stage(name);
    stage.set_seconds(0.125 * report.stages_size());
  }
  report.set_hidden_seconds(0.0625);
  v1::CommUse& use = *report.add_comm();
  use.set_operation("all_to_all");
  use.set_bytes_sent((int64_t{1} << 53) + 1);
  use.set_seconds(0.5);
  use.set_calls(9);
  v1::MemoryUsage& memory = *report.mutable_memory();
  memory.set_current_bytes(10);
  memory.set_peak_bytes((int64_t{1} << 53) + 1);  // beyond what a double holds
  memory.set_attention_peak_bytes(20);
  memory.set_arena_bytes(30);
  memory.set_peak_moment("layer 1 \"backward\"\n");
  v1::TagBytes& tag = *memory.add_tags();
  tag.set_tag("weights");
  tag.set_bytes(1);
  tag.set_peak_bytes(3);
  tag.set_at_peak_bytes(2);
  v1::MemoryUsage& host_memory = *report.mutable_host_memory();
  host_memory = memory;
  host_memory.set_current_bytes(11);
  host_memory.set_peak_bytes(12);
  host_memory.mutable_tags(0)->set_tag("residual");
  return line;
}

// A field added to the report without a member of the line would come back unset.
TEST(StepLine, ComesBackWhole) {
  const StepLine line = Full();
  const auto* descriptor = v1::StepReport::descriptor();
  for (int i = 0; i < descriptor->field_count(); ++i) {
    const auto* field = descriptor->field(i);
    const auto* reflection = v1::StepReport::GetReflection();
    EXPECT_TRUE(field->is_repeated() ? reflection->FieldSize(line.report, field) > 0
                                     : reflection->HasField(line.report, field))
        << "this test leaves " << field->name() << " unset";
  }
  const std::string text = FormatStepLine(line);
  EXPECT_THAT(text, Not(HasSubstr("\n")));
  const absl::StatusOr<StepLine> back = ParseStepLine(text);
  ASSERT_TRUE(back.ok()) << back.status();
  EXPECT_EQ(back->rank, 3);
  EXPECT_EQ(back->missing_steps, 2);
  EXPECT_TRUE(google::protobuf::util::MessageDifferencer::Equals(back->report, line.report))
      << back->report.DebugString();
}

TEST(StepLine, ASmallReportIsAShortLine) {
  StepLine line;
  line.report.set_step(1);
  line.report.set_loss(5.5);
  line.report.mutable_memory()->add_tags()->set_tag("logits");  // never held anything
  line.report.mutable_host_memory()->add_tags()->set_tag("residual");
  EXPECT_EQ(
      FormatStepLine(line),
      R"({"rank":0,"step":1,"total_steps":0,"loss":5.5,"grad_norm":0.0,"learning_rate":0.0,)"
      R"("skipped":false,"skipped_steps_total":0,"tokens":0,"tokens_per_second":0.0,)"
      R"("step_seconds":0.0,"comm_seconds":0.0,"data_seconds":0.0,"stages":{},)"
      R"("hidden_seconds":0.0,"comm":{},"unix_millis":0,)"
      R"("sent_to_peer_bytes":[],"loss_by_position":[],"memory":{"current_bytes":0,)"
      R"("peak_bytes":0,"attention_peak_bytes":0,"arena_bytes":0,"peak_moment":"",)"
      R"("tags":{}}})");
}

TEST(StepLine, NumbersThatJsonLacksAreNull) {
  StepLine line;
  line.report.set_step(1);
  line.report.set_loss(std::nan(""));
  line.report.set_grad_norm(std::numeric_limits<double>::infinity());
  line.report.set_held_out_loss(std::nan(""));
  const std::string text = FormatStepLine(line);
  EXPECT_TRUE(nlohmann::json::parse(text).at("loss").is_null());
  const absl::StatusOr<StepLine> back = ParseStepLine(text);
  ASSERT_TRUE(back.ok()) << back.status();
  EXPECT_TRUE(std::isnan(back->report.loss()));
  EXPECT_TRUE(std::isnan(back->report.grad_norm()));
  EXPECT_TRUE(back->report.has_held_out_loss());
}

TEST(StepLine, WordsOfAnyBytesMakeALine) {
  StepLine line;
  line.report.set_step(1);
  line.report.mutable_memory()->set_peak_moment("\xff\xfe");
  EXPECT_TRUE(ParseStepLine(FormatStepLine(line)).ok());
}

TEST(StepLine, WhatIsNoLineIsRefused) {
  for (const char* text : {"",
                           "{",
                           "[]",
                           "7",
                           "{}",
                           R"({"rank":0})",
                           R"({"rank":"x","step":1})",
                           R"({"rank":0,"step":1,"loss":"low"})",
                           R"({"rank":0,"step":1.5})",
                           R"({"rank":2147483648,"step":1})",
                           R"({"rank":0,"step":9223372036854775808})",
                           R"({"rank":218446744073709551615,"step":1})",
                           R"({"rank":0,"step":1,"memory":[1]})",
                           R"({"rank":0,"step":1,"host_memory":{"tags":[7]}})",
                           R"({"rank":0,"step":1,"memory":{"tags":{"weights":7}}})",
                           R"({"rank":0,"step":1,"stages":[1]})",
                           R"({"rank":0,"step":1,"stages":{"mlp":"long"}})",
                           R"({"rank":0,"step":1,"comm":{"ring":{"calls":1.5}}})",
                           R"({"rank":0,"step":1,"comm":{"ring":3}})",
                           R"({"rank":0,"step":1,"loss_by_position":[{"begin":0}]})"}) {
    EXPECT_EQ(ParseStepLine(text).status().code(), absl::StatusCode::kDataLoss) << text;
  }
  EXPECT_TRUE(ParseStepLine(R"({"rank":0,"step":1,"later_versions":{"say":"more"}})").ok());
}

}  // namespace
}  // namespace upipe
