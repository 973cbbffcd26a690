#include "client/render.h"

#include <google/protobuf/util/json_util.h>

#include <algorithm>
#include <csignal>
#include <cstring>
#include <map>
#include <optional>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "common/check.h"
#include "common/spec/job_spec.h"
#include "common/spec/yaml_spec.h"
#include "common/units.h"

namespace upipe::client {
namespace {

using Rows = std::vector<std::vector<std::string>>;

// JOB_STATE_RUNNING -> "RUNNING".
template <typename Enum>
std::string WithoutPrefix(const std::string& name, Enum, absl::string_view prefix) {
  return absl::StartsWith(name, prefix) ? name.substr(prefix.size()) : name;
}

std::string NameOf(v1::RankState state) {
  return WithoutPrefix(v1::RankState_Name(state), state, "RANK_STATE_");
}

std::string NameOf(v1::CauseKind kind) {
  return WithoutPrefix(v1::CauseKind_Name(kind), kind, "CAUSE_KIND_");
}

std::string NameOf(v1::NodeState state) {
  return WithoutPrefix(v1::NodeState_Name(state), state, "NODE_STATE_");
}

std::string NameOf(v1::StopIntent intent) {
  return WithoutPrefix(v1::StopIntent_Name(intent), intent, "STOP_INTENT_");
}

std::string NameOf(v1::SlotState state) {
  return WithoutPrefix(v1::SlotState_Name(state), state, "SLOT_STATE_");
}

// "1 of 3" against a budget.
std::string BudgetText(int used, int budget) { return absl::StrCat(used, " of ", budget); }

// What became of a job over its attempts: held, back-off, restarts, checkpoints.
void AppendCourse(const v1::Job& job, absl::Time now, std::string& out) {
  if (job.held()) absl::StrAppend(&out, "Held: `upipe release ", job.id(), "` lets it start\n");
  const absl::Duration pause = absl::FromUnixMillis(job.retry_at_unix_millis()) - now;
  if (job.state() == v1::JOB_STATE_QUEUED && pause > absl::ZeroDuration()) {
    absl::StrAppend(&out, "Starts again: not before ", TimeText(job.retry_at_unix_millis()),
                    ", in ", FormatTimeSpan(pause), "\n");
  }
  if (const std::string restarts = RestartsText(job); !restarts.empty()) {
    const v1::RestartSpec budgets = WithDefaults(job.spec()).restarts();
    absl::StrAppend(
        &out, "Restarts: generation ", job.generation(), ", ", restarts, "; infrastructure ",
        BudgetText(job.restarts().infrastructure(), budgets.infrastructure()), ", application ",
        BudgetText(job.restarts().application(), budgets.application()), ", without progress ",
        BudgetText(job.restarts().no_progress(), budgets.no_progress()), " in a row\n");
  }
  if (job.has_last_commit()) {
    absl::StrAppend(&out, "Last checkpoint: ", CheckpointText(job.last_commit()), "\n");
  }
  if (job.has_resume()) {
    absl::StrAppend(&out, "Went on from: ", CheckpointText(job.resume()), "\n");
  }
}

// "SIGNAL, rank 2 on w1: ended by SIGKILL, .."; the operator's own doing needs no kind.
std::string AttemptWhy(const v1::Cause& cause) {
  std::string text;
  if (cause.kind() != v1::CAUSE_KIND_UNSPECIFIED && cause.kind() != v1::CAUSE_KIND_USER) {
    text = NameOf(cause.kind());
    if (cause.has_rank()) absl::StrAppend(&text, ", rank ", cause.rank());
    if (!cause.node().empty()) absl::StrAppend(&text, " on ", cause.node());
    absl::StrAppend(&text, ": ");
  }
  return absl::StrCat(text, cause.message());
}

// How earlier attempts ended.
void AppendAttempts(const v1::Job& job, std::string& out) {
  if (job.attempts_size() == 0) return;
  Rows rows = {{"GENERATION", "PLACED", "LASTED", "ENDED BY", "LAST STEP", "RANKS GONE", "WHY"}};
  for (const v1::AttemptSummary& attempt : job.attempts()) {
    const int presumed = attempt.ranks_presumed_gone();
    rows.push_back({absl::StrCat(attempt.generation()), TimeText(attempt.placed_unix_millis()),
                    FormatTimeSpan(absl::Milliseconds(attempt.ended_unix_millis() -
                                                      attempt.placed_unix_millis())),
                    NameOf(attempt.intent()), absl::StrCat(attempt.last_step()),
                    absl::StrCat(attempt.ranks_proven_gone(), " proven",
                                 presumed == 0 ? "" : absl::StrCat(", ", presumed, " presumed")),
                    AttemptWhy(attempt.cause())});
  }
  absl::StrAppend(&out, "\nEarlier attempts\n", RenderTable(rows));
  const v1::AttemptSummary& newest = *job.attempts().rbegin();
  if (!newest.cause().evidence().empty()) {
    absl::StrAppend(&out, "Evidence of generation ", newest.generation(), ": ",
                    Printable(newest.cause().evidence()), "\n");
  }
}

// Seconds of the last step that were a rank's own: not spent waiting for peers or moving bytes.
std::string OwnTimeText(const v1::StepReport& report) {
  if (report.step() == 0) return "-";
  return FormatTimeSpan(absl::Seconds(report.step_seconds() - report.comm_seconds()));
}

// From start to end, or to `now` while it runs.
std::string RunTime(const v1::Job& job, absl::Time now) {
  if (job.started_unix_millis() == 0) return "-";
  const absl::Time end =
      job.ended_unix_millis() == 0 ? now : absl::FromUnixMillis(job.ended_unix_millis());
  return FormatTimeSpan(end - absl::FromUnixMillis(job.started_unix_millis()));
}

// "signal 9 (SIGKILL)", "exit code 1", or "-".
template <typename Ended>
std::string ExitText(const Ended& ended) {
  if (ended.has_signal()) {
    const char* name = sigabbrev_np(ended.signal());
    return absl::StrCat("signal ", ended.signal(),
                        name == nullptr ? "" : absl::StrCat(" (SIG", name, ")"));
  }
  return ended.has_exit_code() ? absl::StrCat("exit code ", ended.exit_code()) : "-";
}

std::string StepText(const v1::StepReport& report) {
  return report.total_steps() == 0 ? "-" : absl::StrCat(report.step(), "/", report.total_steps());
}

// Of a job that has not reported since it was queued again: the step it goes on from.
std::string JobStepText(const v1::Job& job) {
  if (job.has_last_report() || !job.has_last_commit()) return StepText(job.last_report());
  return absl::StrCat(job.last_commit().step(), "/", job.spec().train().steps());
}

std::string LossText(double loss) { return absl::StrFormat("%.4f", loss); }

void AppendProgress(const v1::Job& job, std::string& out) {
  if (!job.has_last_report()) return;
  const v1::StepReport& report = job.last_report();
  absl::StrAppend(&out, "Progress: step ", StepText(report), ", loss ", LossText(report.loss()),
                  " nats");
  if (report.has_held_out_loss())
    absl::StrAppend(&out, ", held-out ", LossText(report.held_out_loss()));
  absl::StrAppend(&out, ", gradient norm ", absl::SixDigits(report.grad_norm()), ", ",
                  FormatCount(static_cast<int64_t>(report.tokens_per_second())), " tokens/s");
  if (report.skipped_steps_total() > 0) {
    absl::StrAppend(&out, ", ", report.skipped_steps_total(), " updates skipped");
  }
  absl::StrAppend(&out, "\n");
}

const v1::RankPlan* PlanOfRank(const v1::Job& job, int rank) {
  for (const v1::RankPlan& plan : job.plan().ranks()) {
    if (plan.rank() == rank) return &plan;
  }
  return nullptr;
}

void AppendRanks(const v1::Job& job, std::string& out) {
  if (job.ranks_size() == 0) return;
  Rows rows = {{"RANK", "NODE", "SLOT", "STATE", "EXIT", "STEP", "OWN TIME/STEP", "PLANNED PEAK",
                "MEASURED PEAK"}};
  for (const v1::RankStatus& rank : job.ranks()) {
    const v1::RankPlan* plan = PlanOfRank(job, rank.rank());
    rows.push_back(
        {absl::StrCat(rank.rank()), rank.node(), absl::StrCat(rank.slot()), NameOf(rank.state()),
         ExitText(rank), StepText(rank.last_report()), OwnTimeText(rank.last_report()),
         plan == nullptr ? "-" : FormatBytes(plan->memory().peak_bytes()),
         rank.last_report().has_memory() ? FormatBytes(rank.last_report().memory().peak_bytes())
                                         : "-"});
  }
  absl::StrAppend(&out, "\nRanks\n", RenderTable(rows));
}

void AppendPlan(const v1::RunPlan& plan, std::string& out) {
  absl::StrAppend(
      &out, "\nPlan\n  ", ParallelSummary(plan.spec()), "; stages: ", plan.schedule().stages_size(),
      ", heads per rank and stage: ", plan.schedule().heads_per_rank(), "\n  ",
      FormatCount(plan.num_parameters()), " parameters, ", FormatTokenCount(plan.padded_context()),
      " tokens per sequence, ", FormatCount(plan.tokens_per_rank()), " per rank, ",
      absl::StrFormat("%.4g", plan.model_flops() / 1e12), " TFLOP of model per step\n");
  if (!plan.attention_kernel().empty()) {
    absl::StrAppend(&out, "  attention kernel: ", plan.attention_kernel(), "\n");
  }
  for (const std::string& note : plan.notes()) absl::StrAppend(&out, "  note: ", note, "\n");
}

// The largest over the ranks, by tag and in total.
struct PeakBytes {
  std::vector<std::pair<std::string, int64_t>> tags;  // in the order they come
  int64_t live = 0, attention = 0, arena = 0;

  int64_t& Of(const std::string& tag) {
    for (auto& [name, bytes] : tags) {
      if (name == tag) return bytes;
    }
    return tags.emplace_back(tag, 0).second;
  }

  void Take(const v1::MemoryUsage& usage) {
    for (const v1::TagBytes& tag : usage.tags()) {
      int64_t& peak = Of(tag.tag());
      peak = std::max(peak, tag.peak_bytes());
    }
    live = std::max(live, usage.peak_bytes());
    attention = std::max(attention, usage.attention_peak_bytes());
    arena = std::max(arena, usage.arena_bytes());
  }
};

// One of the two pools, planned beside measured.
void AppendPool(const std::string& title, PeakBytes planned, PeakBytes measured, bool any_measured,
                std::string& out) {
  const auto row = [&](const std::string& name, int64_t plan,
                       int64_t real) -> std::vector<std::string> {
    return {name, FormatBytes(plan), any_measured ? FormatBytes(real) : "-",
            !any_measured  ? ""
            : plan == real ? "equal"
                           : absl::StrCat(FormatCount(real - plan), " B off")};
  };
  Rows rows = {{title, "PLANNED PEAK", "MEASURED PEAK", ""}};
  for (const auto& [tag, bytes] : measured.tags) planned.Of(tag);
  for (const auto& [tag, bytes] : planned.tags) {
    const int64_t real = measured.Of(tag);
    if (bytes != 0 || real != 0) rows.push_back(row(tag, bytes, real));
  }
  rows.push_back(row("intermediate attention, together", planned.attention, measured.attention));
  rows.push_back(row("all, live", planned.live, measured.live));
  rows.push_back(row("arena", planned.arena, measured.arena));
  absl::StrAppend(&out, "\n", RenderTable(rows));
}

void AppendMemory(const v1::Job& job, std::string& out) {
  PeakBytes planned, measured, host_planned, host_measured;
  for (const v1::RankPlan& rank : job.plan().ranks()) {
    planned.Take(rank.memory());
    host_planned.Take(rank.host_memory());
  }
  bool any_measured = false;
  for (const v1::RankStatus& rank : job.ranks()) {
    any_measured |= rank.last_report().has_memory();
    measured.Take(rank.last_report().memory());
    host_measured.Take(rank.last_report().host_memory());
  }
  AppendPool("MEMORY PER RANK (largest)", planned, measured, any_measured, out);
  if (host_planned.live == 0 && host_measured.live == 0) return;
  AppendPool("HOST MEMORY PER RANK (largest)", host_planned, host_measured, any_measured, out);
}

void AppendEvents(const v1::Job& job, std::string& out) {
  if (job.events_size() == 0) return;
  Rows rows = {{"TIME", "GENERATION", "EVENT", "MESSAGE"}};
  for (const v1::JobEvent& event : job.events()) {
    rows.push_back({TimeText(event.unix_millis()), absl::StrCat(event.generation()), event.kind(),
                    event.message()});
  }
  absl::StrAppend(&out, "\nEvents\n", RenderTable(rows));
}

std::string Indented(absl::string_view text, int indent) {
  const std::string space(static_cast<size_t>(indent), ' ');
  std::string out;
  while (!text.empty()) {
    const size_t end = std::min(text.find('\n'), text.size());
    absl::StrAppend(&out, space, text.substr(0, end), "\n");
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return out;
}

std::string ToJson(const google::protobuf::Message& message,
                   google::protobuf::util::JsonPrintOptions options) {
  options.preserve_proto_field_names = true;
  std::string json;
  const auto status = google::protobuf::util::MessageToJsonString(message, &json, options);
  UPIPE_CHECK(status.ok()) << status.ToString();
  return json;
}

}  // namespace

std::string TimeText(int64_t unix_millis) {
  if (unix_millis == 0) return "-";
  return absl::FormatTime("%Y-%m-%d %H:%M:%S", absl::FromUnixMillis(unix_millis),
                          absl::LocalTimeZone());
}

std::string CheckpointText(const v1::CheckpointRef& checkpoint) {
  return absl::StrCat("step ", checkpoint.step(), " of generation ", checkpoint.generation(), ", ",
                      FormatBytes(checkpoint.bytes()));
}

std::string RestartsText(const v1::Job& job) {
  const int64_t restarts = job.restarts().infrastructure() + job.restarts().application();
  if (restarts == 0) return "";
  if (restarts == 1) return "restarted once";
  return restarts == 2 ? "restarted twice" : absl::StrCat("restarted ", restarts, " times");
}

std::string NodeStateText(const v1::Node& node) {
  return absl::StrCat(NameOf(node.state()), node.cordoned() ? ", cordoned" : "",
                      node.leaving() ? ", leaving" : "");
}

std::string SlotsText(const v1::Node& node) {
  std::map<std::string, int> counts;
  for (const v1::Slot& slot : node.slots()) ++counts[NameOf(slot.state())];
  std::string text;
  for (const auto& [state, count] : counts)
    absl::StrAppend(&text, text.empty() ? "" : ", ", count, " ", state);
  return text.empty() ? "none" : text;
}

std::string ShownState(const v1::Job& job) {
  if (!job.shown_state().empty()) return job.shown_state();
  return WithoutPrefix(v1::JobState_Name(job.state()), job.state(), "JOB_STATE_");
}

bool IsTerminal(v1::JobState state) {
  return state == v1::JOB_STATE_SUCCEEDED || state == v1::JOB_STATE_FAILED ||
         state == v1::JOB_STATE_CANCELLED;
}

std::string EndLine(const v1::Job& job) {
  std::string line = absl::StrCat(job.id(), " ", ShownState(job));
  if (job.started_unix_millis() != 0) {
    absl::StrAppend(
        &line, " after ",
        FormatTimeSpan(absl::Milliseconds(job.ended_unix_millis() - job.started_unix_millis())));
  }
  return line;
}

std::string ParallelSummary(const v1::JobSpec& spec) {
  std::string text = absl::StrCat(spec.model().num_heads(), " heads on ", spec.parallel().ranks(),
                                  " ranks, ", MethodName(spec.parallel().method()));
  if (spec.parallel().has_heads_per_stage()) {
    absl::StrAppend(&text, ", U = ", spec.parallel().heads_per_stage());
  }
  const v1::ParallelSpec parallel = WithParallelDefaults(spec.parallel());
  const std::optional<ContextRanks> ranks = ContextRanksOf(parallel);
  if (!ranks.has_value() || ranks->ulysses == parallel.ranks()) return text;
  std::vector<std::string> axes = {absl::StrCat(ranks->ulysses, " Ulysses")};
  if (ranks->ring > 1) axes.push_back(absl::StrCat(ranks->ring, " ring"));
  if (parallel.fsdp_ranks() > 1) axes.push_back(absl::StrCat(parallel.fsdp_ranks(), " fsdp"));
  if (parallel.dp_ranks() > 1) axes.push_back(absl::StrCat(parallel.dp_ranks(), " dp"));
  absl::StrAppend(&text, ", ", absl::StrJoin(axes, " x "));
  return text;
}

std::string Printable(absl::string_view text) {
  std::string out(text);
  for (char& c : out) {
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) c = ' ';
  }
  return out;
}

std::string RenderTable(const Rows& given) {
  Rows rows = given;
  std::vector<size_t> widths;
  for (auto& row : rows) {
    for (std::string& cell : row) cell = Printable(cell);
  }
  for (const auto& row : rows) {
    widths.resize(std::max(widths.size(), row.size()));
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  std::string out;
  for (const auto& row : rows) {
    std::string line;
    for (size_t i = 0; i < row.size(); ++i) {
      line += row[i];
      if (i + 1 < row.size()) line.append(widths[i] - row[i].size() + 2, ' ');
    }
    line.erase(line.find_last_not_of(' ') + 1);
    absl::StrAppend(&out, line, "\n");
  }
  return out;
}

std::string RenderJobs(const std::vector<v1::Job>& jobs, absl::Time now) {
  if (jobs.empty()) return "No jobs.\n";
  Rows rows = {{"JOB", "STATE", "PRIORITY", "RANKS", "RESTARTS", "STEP", "LOSS", "SUBMITTED",
                "RAN FOR", "WHY"}};
  for (const v1::Job& job : jobs) {
    const bool waits = job.state() == v1::JOB_STATE_QUEUED && !job.reason().empty();
    const std::string& why = job.has_cause() && !waits ? job.cause().message() : job.reason();
    rows.push_back({job.id(), ShownState(job), absl::StrCat(job.spec().priority()),
                    absl::StrCat(job.spec().parallel().ranks()),
                    absl::StrCat(job.restarts().infrastructure() + job.restarts().application()),
                    JobStepText(job),
                    job.has_last_report() ? LossText(job.last_report().loss()) : "-",
                    TimeText(job.submitted_unix_millis()), RunTime(job, now), why});
  }
  return RenderTable(rows);
}

std::string RenderCause(const v1::Cause& cause, int indent) {
  std::string text;
  absl::StrAppend(&text, cause.message().empty() ? NameOf(cause.kind()) : cause.message(), "\n");
  if (cause.has_rank()) {
    absl::StrAppend(&text, "first failing rank: ", cause.rank(), cause.node().empty() ? "" : " on ",
                    cause.node(), ", ", ExitText(cause), "\n");
  }
  if (cause.kind() != v1::CAUSE_KIND_UNSPECIFIED)
    absl::StrAppend(&text, "kind: ", NameOf(cause.kind()), "\n");
  if (!cause.evidence().empty()) absl::StrAppend(&text, "evidence: ", cause.evidence(), "\n");
  if (cause.log_tail_size() > 0) absl::StrAppend(&text, "last log lines:\n");
  for (const std::string& line : cause.log_tail())
    absl::StrAppend(&text, "  ", Printable(line), "\n");
  return Indented(text, indent);
}

std::string RenderJob(const v1::Job& job, absl::Time now) {
  std::string out =
      absl::StrCat("Job ", job.id(), ": ", ShownState(job), "\n",
                   "Submitted: ", TimeText(job.submitted_unix_millis()),
                   "  started: ", TimeText(job.started_unix_millis()),
                   "  ended: ", TimeText(job.ended_unix_millis()), "  ran for: ", RunTime(job, now),
                   "  generation: ", job.generation(), "\n");
  if (!job.reason().empty()) absl::StrAppend(&out, "Waits: ", job.reason(), "\n");
  if (job.has_cause()) absl::StrAppend(&out, "Cause:\n", RenderCause(job.cause(), 2));
  AppendCourse(job, now, out);
  AppendProgress(job, out);
  AppendRanks(job, out);
  AppendAttempts(job, out);
  if (job.has_plan()) {
    AppendPlan(job.plan(), out);
    AppendMemory(job, out);
  }
  AppendEvents(job, out);
  absl::StrAppend(&out, "\nSpec\n", Indented(JobSpecToYaml(job.spec()), 2));
  return out;
}

std::string RenderWhy(const v1::WhyResponse& why) {
  std::string text = absl::StrCat(why.job().id(), "  ", ShownState(why.job()));
  if (why.position() > 0) absl::StrAppend(&text, "  position ", why.position(), " in the queue");
  absl::StrAppend(&text, "\n");
  if (why.message().empty()) return text;
  return absl::StrCat(text, "  ", Printable(why.message()), "\n");
}

// One row for each device, and a line for each sick one.
void AppendDevices(const v1::Node& node, Rows& rows, std::string& sick) {
  for (const v1::Slot& slot : node.slots()) {
    if (!slot.has_device()) continue;
    const v1::SlotDevice& device = slot.device();
    rows.push_back({node.worker(), absl::StrCat(slot.index()), device.name(),
                    FormatBytes(device.memory_bytes()), absl::StrCat(device.nvlinks()),
                    device.ecc() ? absl::StrCat(device.uncorrectable_errors(), " errors") : "off",
                    device.last_xid() == 0 ? "none" : absl::StrCat(device.last_xid()),
                    device.uuid()});
    if (!device.sick().empty()) {
      absl::StrAppend(&sick, "Slot ", slot.index(), " of ", Printable(node.worker()),
                      " takes no new ranks: ", Printable(device.sick()), "\n");
    }
  }
}

std::string RenderNodes(const v1::ListNodesResponse& nodes) {
  if (nodes.nodes_size() == 0) return "No worker has said hello yet.\n";
  Rows rows = {{"WORKER", "NODE", "STATE", "SLOTS", "MEMORY/RANK", "CONTAINMENT", "ISA", "BACKEND",
                "METRICS", "SILENT", "VERSION"}};
  Rows busy = {{"WORKER", "SLOT", "STATE", "JOB", "GENERATION", "RANK"}};
  Rows devices = {{"WORKER", "SLOT", "DEVICE", "MEMORY", "NVLINKS", "ECC", "XID", "UUID"}};
  std::string insecure, cordoned;
  for (const v1::Node& node : nodes.nodes()) {
    rows.push_back({node.worker(), node.node_id(), NodeStateText(node), SlotsText(node),
                    FormatBytes(node.memory_per_rank_bytes()), node.containment(), node.isa(),
                    node.backend(), node.metrics_address(),
                    FormatTimeSpan(absl::Seconds(node.silent_seconds())), node.version()});
    for (const v1::Slot& slot : node.slots()) {
      if (slot.job_id().empty()) continue;
      busy.push_back({node.worker(), absl::StrCat(slot.index()), NameOf(slot.state()),
                      slot.job_id(), absl::StrCat(slot.generation()), absl::StrCat(slot.rank())});
    }
    AppendDevices(node, devices, cordoned);
    if (node.cordoned() && !node.cordon_reason().empty()) {
      absl::StrAppend(&cordoned, Printable(node.worker()),
                      " is cordoned: ", Printable(node.cordon_reason()), "\n");
    }
    if (node.insecure_listen())
      absl::StrAppend(&insecure, "Warning: worker ", node.worker(),
                      " listens without encryption beyond loopback.\n");
  }
  if (nodes.coordinator_insecure_listen()) {
    absl::StrAppend(&insecure,
                    "Warning: the coordinator listens without encryption beyond loopback.\n");
  }
  std::string coordinator;
  if (!nodes.coordinator_version().empty()) {
    coordinator = absl::StrCat("\nCoordinator: version ", Printable(nodes.coordinator_version()),
                               ", epoch ", nodes.coordinator_epoch(), ", metrics at ",
                               Printable(nodes.coordinator_metrics_address()), "\n");
  }
  return absl::StrCat(
      RenderTable(rows), busy.size() > 1 ? absl::StrCat("\n", RenderTable(busy)) : "",
      devices.size() > 1 ? absl::StrCat("\n", RenderTable(devices)) : "", coordinator,
      cordoned.empty() ? "" : "\n", cordoned, insecure.empty() ? "" : "\n", insecure);
}

std::string RenderJson(const google::protobuf::Message& message) {
  google::protobuf::util::JsonPrintOptions options;
  options.add_whitespace = true;
  options.always_print_primitive_fields = true;
  return ToJson(message, options);
}

std::string RenderJsonLine(const google::protobuf::Message& message) {
  return ToJson(message, {}) + "\n";
}
}  // namespace upipe::client
