#include "common/metrics/step_line.h"

#include <limits>

#include "absl/strings/str_cat.h"
#include "common/metrics/json_members.h"

namespace upipe {
namespace {

Json PositionsJson(const google::protobuf::RepeatedPtrField<v1::PositionLoss>& positions) {
  Json list = Json::array();
  for (const v1::PositionLoss& range : positions) {
    list.push_back({{"begin", range.begin()},
                    {"end", range.end()},
                    {"loss", range.loss()},
                    {"tokens", range.tokens()}});
  }
  return list;
}

Json MemoryJson(const v1::MemoryUsage& memory) {
  Json tags = Json::object();
  for (const v1::TagBytes& tag : memory.tags()) {
    if (tag.peak_bytes() == 0) continue;
    tags[tag.tag()] = {{"bytes", tag.bytes()},
                       {"peak_bytes", tag.peak_bytes()},
                       {"at_peak_bytes", tag.at_peak_bytes()}};
  }
  return {{"current_bytes", memory.current_bytes()},
          {"peak_bytes", memory.peak_bytes()},
          {"attention_peak_bytes", memory.attention_peak_bytes()},
          {"arena_bytes", memory.arena_bytes()},
          {"peak_moment", memory.peak_moment()},
          {"tags", std::move(tags)}};
}

// Members of the wrong kind make nlohmann throw, and these functions; ParseStepLine catches.

void ReadPositions(const Json& object, const char* name,
                   google::protobuf::RepeatedPtrField<v1::PositionLoss>* positions) {
  if (!object.contains(name)) return;
  for (const Json& range : object.at(name)) {
    v1::PositionLoss& position = *positions->Add();
    position.set_begin(Integer(range.at("begin")));
    position.set_end(Integer(range.at("end")));
    position.set_loss(NumberOf(range, "loss"));
    position.set_tokens(Integer(range.at("tokens")));
  }
}

void ReadMemory(const Json& object, v1::MemoryUsage& memory) {
  memory.set_current_bytes(IntegerOf(object, "current_bytes"));
  memory.set_peak_bytes(IntegerOf(object, "peak_bytes"));
  memory.set_attention_peak_bytes(IntegerOf(object, "attention_peak_bytes"));
  memory.set_arena_bytes(IntegerOf(object, "arena_bytes"));
  memory.set_peak_moment(object.value("peak_moment", std::string()));
  if (!object.contains("tags")) return;
  for (const auto& [name, bytes] : object.at("tags").items()) {
    v1::TagBytes& tag = *memory.add_tags();
    tag.set_tag(name);
    tag.set_bytes(IntegerOf(bytes, "bytes"));
    tag.set_peak_bytes(IntegerOf(bytes, "peak_bytes"));
    tag.set_at_peak_bytes(IntegerOf(bytes, "at_peak_bytes"));
  }
}

Json StagesJson(const v1::StepReport& report) {
  Json stages = Json::object();
  for (const v1::StageSeconds& stage : report.stages()) stages[stage.stage()] = stage.seconds();
  return stages;
}

Json CommJson(const v1::StepReport& report) {
  Json comm = Json::object();
  for (const v1::CommUse& use : report.comm()) {
    comm[use.operation()] = {
        {"sent_bytes", use.bytes_sent()}, {"seconds", use.seconds()}, {"calls", use.calls()}};
  }
  return comm;
}

void ReadStages(const Json& object, v1::StepReport& report) {
  if (!object.contains("stages")) return;
  for (const auto& [name, seconds] : Object(object.at("stages")).items()) {
    v1::StageSeconds& stage = *report.add_stages();
    stage.set_stage(name);
    stage.set_seconds(Number(seconds));
  }
}

void ReadComm(const Json& object, v1::StepReport& report) {
  if (!object.contains("comm")) return;
  for (const auto& [name, use] : Object(object.at("comm")).items()) {
    v1::CommUse& comm = *report.add_comm();
    comm.set_operation(name);
    comm.set_bytes_sent(IntegerOf(use, "sent_bytes"));
    comm.set_seconds(NumberOf(use, "seconds"));
    comm.set_calls(IntegerOf(use, "calls"));
  }
}

StepLine Read(const Json& object) {
  StepLine line;
  line.rank = static_cast<int>(Integer(object.at("rank"), std::numeric_limits<int>::max()));
  line.missing_steps = IntegerOf(object, "missing_steps");
  v1::StepReport& report = line.report;
  report.set_step(Integer(object.at("step")));
  report.set_total_steps(IntegerOf(object, "total_steps"));
  report.set_loss(NumberOf(object, "loss"));
  if (object.contains("held_out_loss")) report.set_held_out_loss(NumberOf(object, "held_out_loss"));
  report.set_grad_norm(NumberOf(object, "grad_norm"));
  report.set_learning_rate(NumberOf(object, "learning_rate"));
  report.set_skipped(object.value("skipped", false));
  report.set_skipped_steps_total(IntegerOf(object, "skipped_steps_total"));
  report.set_tokens(IntegerOf(object, "tokens"));
  report.set_tokens_per_second(NumberOf(object, "tokens_per_second"));
  report.set_step_seconds(NumberOf(object, "step_seconds"));
  report.set_comm_seconds(NumberOf(object, "comm_seconds"));
  report.set_data_seconds(NumberOf(object, "data_seconds"));
  report.set_unix_millis(IntegerOf(object, "unix_millis"));
  if (object.contains("sent_to_peer_bytes")) {
    for (const Json& bytes : object.at("sent_to_peer_bytes"))
      report.add_bytes_sent_to_peer(Integer(bytes));
  }
  ReadStages(object, report);
  report.set_hidden_seconds(NumberOf(object, "hidden_seconds"));
  ReadComm(object, report);
  ReadPositions(object, "loss_by_position", report.mutable_loss_by_position());
  ReadPositions(object, "held_out_loss_by_position", report.mutable_held_out_loss_by_position());
  if (object.contains("memory")) ReadMemory(object.at("memory"), *report.mutable_memory());
  if (object.contains("host_memory")) {
    ReadMemory(object.at("host_memory"), *report.mutable_host_memory());
  }
  return line;
}

}  // namespace

std::string FormatStepLine(const StepLine& line) {
  const v1::StepReport& report = line.report;
  Json object = {{"rank", line.rank}, {"step", report.step()}};
  if (line.missing_steps > 0) object["missing_steps"] = line.missing_steps;
  object["total_steps"] = report.total_steps();
  object["loss"] = report.loss();
  if (report.has_held_out_loss()) object["held_out_loss"] = report.held_out_loss();
  object["grad_norm"] = report.grad_norm();
  object["learning_rate"] = report.learning_rate();
  object["skipped"] = report.skipped();
  object["skipped_steps_total"] = report.skipped_steps_total();
  object["tokens"] = report.tokens();
  object["tokens_per_second"] = report.tokens_per_second();
  object["step_seconds"] = report.step_seconds();
  object["comm_seconds"] = report.comm_seconds();
  object["data_seconds"] = report.data_seconds();
  object["stages"] = StagesJson(report);
  object["hidden_seconds"] = report.hidden_seconds();
  object["comm"] = CommJson(report);
  object["unix_millis"] = report.unix_millis();
  object["sent_to_peer_bytes"] = report.bytes_sent_to_peer();
  object["loss_by_position"] = PositionsJson(report.loss_by_position());
  if (report.has_held_out_loss()) {
    object["held_out_loss_by_position"] = PositionsJson(report.held_out_loss_by_position());
  }
  object["memory"] = MemoryJson(report.memory());
  if (report.host_memory().peak_bytes() > 0) {
    object["host_memory"] = MemoryJson(report.host_memory());
  }
  return object.dump(-1, ' ', false, Json::error_handler_t::replace);
}

absl::StatusOr<StepLine> ParseStepLine(absl::string_view text) {
  try {
    return Read(Json::parse(text.begin(), text.end()));
  } catch (const std::exception& error) {
    return absl::DataLossError(absl::StrCat("no line of metrics.jsonl: ", error.what()));
  }
}

}  // namespace upipe
