#include "worker/runtime/metrics_endpoint.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "common/metrics/names.h"
#include "common/position_page.h"
#include "common/status.h"

namespace upipe::worker {
namespace {

using Values = std::vector<std::string>;

constexpr std::array kOutcomes = {RankOutcome::kFinished, RankOutcome::kLeftOnNotice,
                                  RankOutcome::kKilled, RankOutcome::kFailed,
                                  RankOutcome::kNotStarted};

const char* NameOf(RankOutcome outcome) {
  switch (outcome) {
    case RankOutcome::kFinished:
      return "finished";
    case RankOutcome::kLeftOnNotice:
      return "left";
    case RankOutcome::kKilled:
      return "killed";
    case RankOutcome::kFailed:
      return "failed";
    case RankOutcome::kNotStarted:
      return "not_started";
  }
  return "unknown";
}

// A trainer's word: a counter takes no number that would spoil it for good.
void Add(prometheus::Counter& counter, double amount) {
  if (std::isfinite(amount) && amount > 0) counter.Increment(amount);
}

// Labels are bounded: what a trainer calls anything else has no series.
bool IsTag(const std::string& name) {
  return std::find(kTagNames.begin(), kTagNames.end(), name) != kTagNames.end();
}

// What node memory offers is for all ranks on it.
int64_t HostShare(const v1::StartRank& start) {
  const int rank = start.ref().rank();
  if (rank >= start.node_ids_size()) return 0;
  const auto& nodes = start.node_ids();
  return start.plan().budget().host_bytes() /
         std::count(nodes.begin(), nodes.end(), start.node_ids(rank));
}

}  // namespace

MetricsEndpoint::MetricsEndpoint(const Identity& identity)
    : registry_({{"worker", identity.worker}, {"node", identity.node}}) {
  series_.attempt.build.At({identity.version, identity.backend, identity.isa}).Set(1);
  for (const RankOutcome outcome : kOutcomes) series_.attempt.rank_exits.At({NameOf(outcome)});
  InitialiseCounters(identity.num_slots);
  SetWorker(false, {.free = identity.num_slots});
}

absl::StatusOr<std::unique_ptr<MetricsEndpoint>> MetricsEndpoint::Start(const std::string& listen,
                                                                        const Identity& identity) {
  std::unique_ptr<MetricsEndpoint> endpoint(new MetricsEndpoint(identity));
  UPIPE_ASSIGN_OR_RETURN(endpoint->address_, endpoint->registry_.Serve(listen));
  return endpoint;
}

void MetricsEndpoint::InitialiseCounters(int num_slots) {
  for (int index = 0; index < num_slots; ++index) {
    const std::string slot = absl::StrCat(index);
    for (const Counters& family :
         {series_.step.steps, series_.step.hidden_seconds, series_.step.data_seconds,
          series_.step.tokens, series_.step.skipped, series_.checkpoint.commits,
          series_.checkpoint.problems}) {
      family.At({slot});
    }
    for (const char* stage : kStageNames) series_.step.stage_seconds_total.At({slot, stage});
    for (const char* operation : kOperationNames) {
      for (const Counters& family : {series_.comm.seconds, series_.comm.bytes, series_.comm.calls})
        family.At({slot, operation});
    }
  }
}

void MetricsEndpoint::BeginAttempt(const v1::StartRank& start) {
  const auto held = registry_.Hold();
  const std::string name = absl::StrCat(start.slot());
  const v1::RunPlan& plan = start.plan();
  Slot& slot = slots_[start.slot()];
  slot.gauges.Clear();
  slot.layers = LayerProgress(plan);
  slot.flops_per_rank = plan.model_flops() / std::max(1, plan.ranks_size());
  slot.peak_flops = plan.peak_flops();
  const v1::Fence& fence = start.ref().fence();
  slot.gauges.Set(
      series_.attempt.info,
      {name, fence.job_id(), absl::StrCat(fence.generation()), absl::StrCat(start.ref().rank()),
       absl::StrCat(absl::Hex(plan.plan_hash(), absl::kZeroPad16))},
      1);
  slot.gauges.Set(series_.step.layers, {name}, static_cast<double>(slot.layers.layers()));
  SetPlannedMemory(slot, name, start);
}

void MetricsEndpoint::SetPlannedMemory(Slot& slot, const std::string& name,
                                       const v1::StartRank& start) {
  const MemorySeries& memory = series_.memory;
  const int rank = start.ref().rank();
  if (rank >= start.plan().ranks_size()) return;
  const v1::RankPlan& planned = start.plan().ranks(rank);
  for (const auto& [pool, usage] :
       {std::pair("device", &planned.memory()), {"host", &planned.host_memory()}}) {
    slot.gauges.Set(memory.planned_peak, {name, pool}, static_cast<double>(usage->peak_bytes()));
    for (const v1::TagBytes& tag : usage->tags()) {
      if (!IsTag(tag.tag())) continue;
      slot.gauges.Set(memory.planned_tag_peak, {name, pool, tag.tag()},
                      static_cast<double>(tag.peak_bytes()));
    }
  }
  slot.gauges.Set(memory.attention_planned, {name},
                  static_cast<double>(planned.memory().attention_peak_bytes()));
  const int64_t device = start.plan().budget().device_bytes();
  if (device > 0) slot.gauges.Set(memory.limit, {name, "device"}, static_cast<double>(device));
  const int64_t host = HostShare(start);
  if (host > 0) slot.gauges.Set(memory.limit, {name, "host"}, static_cast<double>(host));
}

void MetricsEndpoint::EndAttempt(int slot) {
  const auto held = registry_.Hold();
  slots_[slot].gauges.Clear();
}

void MetricsEndpoint::Observe(int index, const v1::StepReport& report) {
  const auto held = registry_.Hold();
  Slot& slot = slots_[index];
  const std::string name = absl::StrCat(index);
  SetMemory(slot, name, "device", report.memory());
  SetMemory(slot, name, "host", report.host_memory());
  slot.gauges.Set(series_.memory.attention_peak, {name},
                  static_cast<double>(report.memory().attention_peak_bytes()));
  SetStep(slot, name, report);
  CountStep(name, report);
}

void MetricsEndpoint::SetMemory(Slot& slot, const std::string& name, const char* pool,
                                const v1::MemoryUsage& usage) {
  const MemorySeries& memory = series_.memory;
  for (const v1::TagBytes& tag : usage.tags()) {
    if (!IsTag(tag.tag())) continue;
    const Values values = {name, pool, tag.tag()};
    slot.gauges.Set(memory.bytes, values, static_cast<double>(tag.bytes()));
    slot.gauges.Set(memory.tag_peak, values, static_cast<double>(tag.peak_bytes()));
    slot.gauges.Set(memory.tag_at_peak, values, static_cast<double>(tag.at_peak_bytes()));
  }
  slot.gauges.Set(memory.peak, {name, pool}, static_cast<double>(usage.peak_bytes()));
  slot.gauges.Set(memory.arena, {name, pool}, static_cast<double>(usage.arena_bytes()));
}

void MetricsEndpoint::SetStep(Slot& slot, const std::string& name, const v1::StepReport& report) {
  const StepSeries& step = series_.step;
  const Values values = {name};
  slot.gauges.Set(step.step, values, static_cast<double>(report.step()));
  slot.gauges.Set(step.seconds, values, report.step_seconds());
  slot.gauges.Set(step.own_seconds, values,
                  std::max(0.0, report.step_seconds() - report.comm_seconds()));
  slot.gauges.Set(step.tokens_per_second, values, report.tokens_per_second());
  slot.gauges.Set(step.loss, values, report.loss());
  if (report.has_held_out_loss())
    slot.gauges.Set(step.held_out_loss, values, report.held_out_loss());
  slot.gauges.Set(step.grad_norm, values, report.grad_norm());
  slot.gauges.Set(step.learning_rate, values, report.learning_rate());
  if (slot.peak_flops > 0 && report.step_seconds() > 0) {
    slot.gauges.Set(step.mfu, values,
                    slot.flops_per_rank / report.step_seconds() / slot.peak_flops);
  }
  std::map<std::string, double> seconds;
  for (const v1::StageSeconds& stage : report.stages()) seconds[stage.stage()] += stage.seconds();
  for (const char* stage : kStageNames)
    slot.gauges.Set(step.stage_seconds, {name, stage}, seconds[stage]);
}

// Counters never go down while the worker lives, whoever holds the slot.
void MetricsEndpoint::CountStep(const std::string& name, const v1::StepReport& report) {
  const StepSeries& step = series_.step;
  step.steps.At({name}).Increment();
  if (report.skipped()) step.skipped.At({name}).Increment();
  Add(step.tokens.At({name}), static_cast<double>(report.tokens()));
  Add(step.data_seconds.At({name}), report.data_seconds());
  Add(step.hidden_seconds.At({name}), report.hidden_seconds());
  for (const v1::StageSeconds& stage : report.stages()) {
    if (std::find(kStageNames.begin(), kStageNames.end(), stage.stage()) != kStageNames.end())
      Add(step.stage_seconds_total.At({name, stage.stage()}), stage.seconds());
  }
  for (const v1::CommUse& use : report.comm()) {
    if (std::find(kOperationNames.begin(), kOperationNames.end(), use.operation()) ==
        kOperationNames.end())
      continue;
    const Values values = {name, use.operation()};
    Add(series_.comm.seconds.At(values), use.seconds());
    Add(series_.comm.bytes.At(values), static_cast<double>(use.bytes_sent()));
    Add(series_.comm.calls.At(values), static_cast<double>(use.calls()));
  }
}

void MetricsEndpoint::SetPosition(int index, const v1::RankPosition& position,
                                  absl::Duration in_place) {
  const auto held = registry_.Hold();
  Slot& slot = slots_[index];
  const std::string name = absl::StrCat(index);
  slot.gauges.Set(series_.step.in_place, {name}, absl::ToDoubleSeconds(in_place));
  slot.gauges.Set(series_.step.layers_done, {name},
                  static_cast<double>(slot.layers.DoneAt(position)));
  for (int pass = 0; pass < kNumStepPasses; ++pass) {
    const std::string known = upipe::NameOf(static_cast<StepPass>(pass));
    slot.gauges.Set(series_.step.pass, {name, known}, known == position.pass() ? 1 : 0);
  }
}

void MetricsEndpoint::CountCheckpoint(int index, const v1::CheckpointRef& committed) {
  const auto held = registry_.Hold();
  Slot& slot = slots_[index];
  const CheckpointSeries& checkpoint = series_.checkpoint;
  const Values values = {absl::StrCat(index)};
  checkpoint.commits.At(values).Increment();
  slot.gauges.Set(checkpoint.step, values, static_cast<double>(committed.step()));
  slot.gauges.Set(checkpoint.bytes, values, static_cast<double>(committed.bytes()));
  slot.gauges.Set(checkpoint.seconds, values, committed.write_seconds());
  slot.gauges.Set(checkpoint.timestamp, values,
                  static_cast<double>(absl::ToUnixSeconds(absl::Now())));
}

void MetricsEndpoint::CountProblem(int slot) {
  series_.checkpoint.problems.At({absl::StrCat(slot)}).Increment();
}

void MetricsEndpoint::CountExit(RankOutcome outcome) {
  series_.attempt.rank_exits.At({NameOf(outcome)}).Increment();
}

void MetricsEndpoint::SetWorker(bool connected, const SlotCounts& slots) {
  const auto held = registry_.Hold();
  series_.attempt.connected.At().Set(connected ? 1 : 0);
  for (const auto& [state, count] : {std::pair("free", slots.free),
                                     {"taken", slots.taken},
                                     {"quarantined", slots.quarantined},
                                     {"sick", slots.sick}}) {
    series_.attempt.slots.At({state}).Set(count);
  }
}

}  // namespace upipe::worker
