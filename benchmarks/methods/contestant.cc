#include "benchmarks/methods/contestant.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "benchmarks/support/bench_report.h"
#include "common/status.h"
#include "engine/comm/inproc/inproc_communicator.h"
#include "engine/train/rank_run.h"
#include "planner/plan.h"

namespace upipe::bench {
namespace {

using kernels::MemoryStats;
using nlohmann::ordered_json;

absl::Status CheckPeak(const char* what, int rank, const MemoryStats& measured,
                       const v1::MemoryUsage& planned) {
  if (measured.peak_total_bytes == planned.peak_bytes()) return absl::OkStatus();
  return absl::InternalError(absl::StrCat("rank ", rank, " held ", measured.peak_total_bytes,
                                          " bytes of ", what, " memory at most and its plan says ",
                                          planned.peak_bytes()));
}

// Bytes by tag at the moment of the peak; tags without any are left out.
ordered_json MemoryRow(const v1::MemoryUsage& memory) {
  ordered_json tags = ordered_json::object();
  for (const v1::TagBytes& tag : memory.tags()) {
    if (tag.at_peak_bytes() > 0) tags[tag.tag()] = tag.at_peak_bytes();
  }
  return {{"peak_bytes", memory.peak_bytes()},
          {"attention_peak_bytes", memory.attention_peak_bytes()},
          {"arena_bytes", memory.arena_bytes()},
          {"peak_moment", memory.peak_moment()},
          {"at_peak_bytes", tags}};
}

const v1::RankPlan& FullestRank(const v1::RunPlan& plan) {
  return *std::max_element(plan.ranks().begin(), plan.ranks().end(),
                           [](const v1::RankPlan& a, const v1::RankPlan& b) {
                             return a.memory().peak_bytes() < b.memory().peak_bytes();
                           });
}

}  // namespace

Contestant::Contestant(const MethodCase& method, v1::RunPlan plan)
    : method_(method), plan_(std::move(plan)) {}

absl::StatusOr<std::unique_ptr<Contestant>> Contestant::Create(const MethodCase& method,
                                                               const MethodJob& job) {
  UPIPE_ASSIGN_OR_RETURN(v1::RunPlan plan,
                         planner::MakeRunPlan(method.Spec(job), {.check_data = false}));
  std::unique_ptr<Contestant> made(new Contestant(method, std::move(plan)));
  UPIPE_ASSIGN_OR_RETURN(
      made->gang_,
      RankGang::Create(made->plan_,
                       comm::InprocGroup::Create(
                           job.ranks, {.deadline = train::CollectiveDeadline(made->plan_)})));
  UPIPE_ASSIGN_OR_RETURN(const GangStep first, made->gang_->Step());
  made->first_loss_ = first.loss;
  return made;
}

absl::Status Contestant::Step() {
  UPIPE_ASSIGN_OR_RETURN(GangStep step, gang_->Step());
  steps_.push_back(std::move(step));
  return absl::OkStatus();
}

std::vector<double> Contestant::cpu_seconds() const {
  std::vector<double> seconds;
  for (const GangStep& step : steps_) seconds.push_back(step.cpu_seconds);
  return seconds;
}

std::vector<double> Contestant::wall_seconds() const {
  std::vector<double> seconds;
  for (const GangStep& step : steps_) seconds.push_back(step.wall_seconds);
  return seconds;
}

absl::Status Contestant::CheckMemory() const {
  for (const v1::RankPlan& rank : plan_.ranks()) {
    UPIPE_RETURN_IF_ERROR(
        CheckPeak("device", rank.rank(), gang_->memory(rank.rank()), rank.memory()));
    UPIPE_RETURN_IF_ERROR(
        CheckPeak("host", rank.rank(), gang_->host_memory(rank.rank()), rank.host_memory()));
  }
  return absl::OkStatus();
}

// Of the step with the middle processor time, longest op first.
ordered_json Contestant::OpRows() const {
  std::vector<const GangStep*> sorted;
  for (const GangStep& step : steps_) sorted.push_back(&step);
  std::sort(sorted.begin(), sorted.end(),
            [](const GangStep* a, const GangStep* b) { return a->cpu_seconds < b->cpu_seconds; });
  const GangStep& middle = *sorted[(sorted.size() - 1) / 2];
  std::map<std::string, OpTime> by_op;
  for (const auto& [key, time] : middle.ops) by_op[key.op].Add(time);
  std::vector<std::pair<std::string, OpTime>> ops(by_op.begin(), by_op.end());
  std::stable_sort(ops.begin(), ops.end(), [](const auto& a, const auto& b) {
    return a.second.seconds > b.second.seconds;
  });
  ordered_json rows = ordered_json::array();
  double in_ops = 0;
  for (const auto& [op, time] : ops) {
    in_ops += time.seconds;
    rows.push_back({{"op", op},
                    {"calls", time.calls},
                    {"cpu_seconds", time.seconds},
                    {"tflop", 1e-12 * time.cost.flops},
                    {"gbytes", 1e-9 * (time.cost.bytes_read + time.cost.bytes_written)}});
  }
  // Threads that communicate and those that drive the ranks.
  rows.push_back({{"op", "outside streams"}, {"cpu_seconds", middle.cpu_seconds - in_ops}});
  return rows;
}

absl::StatusOr<ordered_json> Contestant::Row() const {
  double flops = 0;
  int64_t sent = 0, to_host = 0, from_host = 0;
  for (const v1::RankPlan& rank : plan_.ranks()) {
    flops += rank.step_flops();
    for (const int64_t bytes : rank.bytes_sent_to_peer()) sent += bytes;
    UPIPE_ASSIGN_OR_RETURN(const planner::RankDryRun dry, planner::DryRunRank(plan_, rank.rank()));
    to_host += dry.rank.bytes_to_host();
    from_host += dry.rank.bytes_from_host();
  }
  const v1::RankPlan& fullest = FullestRank(plan_);
  const auto tokens = static_cast<double>(plan_.spec().train().context());
  const double seconds = Median(cpu_seconds());
  return ordered_json{{"method", method_.name},
                      {"ranks", plan_.ranks_size()},
                      {"context", plan_.spec().train().context()},
                      {"stages", plan_.schedule().stages_size()},
                      {"step_seconds", Spread(wall_seconds())},
                      {"tokens_per_second", tokens / Median(wall_seconds())},
                      {"cpu_seconds", Spread(cpu_seconds())},
                      {"executed_tflop", 1e-12 * flops},
                      {"cpu_seconds_per_tflop", 1e12 * seconds / flops},
                      {"bytes_sent", sent},
                      {"bytes_to_host", to_host},
                      {"bytes_from_host", from_host},
                      {"first_loss", first_loss_},
                      {"device_memory", MemoryRow(fullest.memory())},
                      {"host_memory", MemoryRow(fullest.host_memory())},
                      {"ops", OpRows()}};
}

absl::Status CheckLosses(const std::vector<std::unique_ptr<Contestant>>& contestants, bool bf16) {
  const double bound = bf16 ? 1.0 / 512 : 1e-3;
  const Contestant& first = *contestants.front();
  for (const auto& other : contestants) {
    const double difference = std::abs(other->first_loss() / first.first_loss() - 1);
    if (difference <= bound) continue;
    return absl::InternalError(absl::StrCat(
        "the loss of the first step is ", first.first_loss(), " with ", first.method().name,
        " and ", other->first_loss(), " with ", other->method().name, ": ", difference,
        " relative, where ", bound, " is allowed"));
  }
  return absl::OkStatus();
}

}  // namespace upipe::bench
