#include "planner/render.h"

#include <google/protobuf/descriptor.h>

#include <algorithm>
#include <limits>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/spec/job_spec.h"
#include "common/spec/scalar_field.h"
#include "common/units.h"
#include "engine/parallel/mesh.h"
#include "planner/notes.h"

namespace upipe::planner {
namespace {

const v1::RankPlan& FullestRank(const v1::RunPlan& plan) {
  return *std::max_element(plan.ranks().begin(), plan.ranks().end(),
                           [](const auto& a, const auto& b) {
                             return a.memory().peak_bytes() < b.memory().peak_bytes();
                           });
}

// Categories that a pool of memory held something of.
void AppendCategories(const v1::MemoryUsage& memory, std::string& text) {
  absl::StrAppend(&text,
                  absl::StrFormat("  %-14s %14s %14s\n", "category", "own peak", "at the peak"));
  for (const v1::TagBytes& tag : memory.tags()) {
    if (tag.peak_bytes() == 0) continue;
    absl::StrAppend(&text,
                    absl::StrFormat("  %-14s %14s %14s\n", tag.tag(), FormatBytes(tag.peak_bytes()),
                                    FormatBytes(tag.at_peak_bytes())));
  }
}

std::string Plural(int64_t count, absl::string_view what) {
  return absl::StrCat(count, " ", what, count == 1 ? "" : "s");
}

int64_t SumOf(const google::protobuf::RepeatedField<int64_t>& values) {
  return std::accumulate(values.begin(), values.end(), int64_t{0});
}

// "0.123 s", "12.3 s", then in words.
std::string SecondsText(double seconds) {
  if (seconds < 60) return absl::StrFormat("%.3g s", seconds);
  return absl::StrCat(FormatCount(static_cast<int64_t>(seconds + 0.5)), " s (",
                      FormatTimeSpan(absl::Seconds(seconds)), ")");
}

void AppendBudget(const v1::RunPlan& plan, std::string& text) {
  const v1::MemoryBudget& budget = plan.budget();
  if (budget.device_bytes() == 0) return;
  if (budget.device_bytes() < std::numeric_limits<int64_t>::max()) {
    absl::StrAppend(&text, "room       ", FormatBytes(budget.device_bytes()), " per rank");
    if (budget.reserved_bytes() > 0) {
      absl::StrAppend(&text, " beside ", FormatBytes(budget.reserved_bytes()),
                      " for context, communicators and fragmentation");
    }
    absl::StrAppend(&text, budget.host_bytes() > 0 ? ", " : "\n");
  }
  if (budget.host_bytes() > 0) {
    absl::StrAppend(&text, "host memory ", FormatBytes(TakenOf(plan).host_bytes), " of ",
                    FormatBytes(budget.host_bytes()), " per node\n");
  }
}

void AppendTime(const v1::RunPlan& plan, std::string& text) {
  const v1::StepTime& time = plan.step_time();
  if (time.seconds() == 0) return;
  absl::StrAppend(&text, "\ntime       ", SecondsText(time.seconds()), " a step on ", plan.device(),
                  ", ", absl::StrFormat("%.4g", time.tokens_per_second_per_rank()),
                  " tokens/s per rank");
  if (time.causal_mfu() > 0) {
    absl::StrAppend(&text, absl::StrFormat(", causal MFU %.1f %%", 100 * time.causal_mfu()));
  }
  absl::StrAppend(&text, absl::StrFormat("\n\n  %-24s %12s %8s\n", "part", "seconds", "share"));
  for (const v1::StepTime::Part& part : time.parts()) {
    if (part.seconds() <= 0) continue;
    absl::StrAppend(&text, absl::StrFormat("  %-24s %12.4g %7.1f%%\n", part.name(), part.seconds(),
                                           100 * part.seconds() / time.seconds()));
  }
  if (time.hidden_seconds() > 0) {
    absl::StrAppend(
        &text, absl::StrFormat("  %-24s %12.4g\n", "hidden beside these", time.hidden_seconds()));
  }
}

std::string SplitText(const v1::ParallelSpec& parallel) {
  const parallel::Mesh mesh = parallel::Mesh::From(parallel);
  return absl::StrCat(
      MethodName(parallel.method()), " C ", mesh.ulysses_ranks, " R ", mesh.ring_ranks,
      parallel.has_heads_per_stage() ? absl::StrCat(" U ", parallel.heads_per_stage()) : "");
}

void AppendCandidates(const v1::RunPlan& plan, std::string& text) {
  if (plan.candidates_size() == 0) return;
  absl::StrAppend(&text, "\nlooked at  ", FormatCount(plan.searched()),
                  " points of schedule x policy; the best of each split:\n\n",
                  absl::StrFormat("  %-22s %11s %11s %11s  %s\n", "split", "device", "host/node",
                                  "step", "verdict; policy"));
  for (const v1::Candidate& candidate : plan.candidates()) {
    absl::StrAppend(
        &text, absl::StrFormat(
                   "  %-22s %11s %11s %9.4g s  %s; %s\n", SplitText(candidate.parallel()),
                   FormatBytes(candidate.device_bytes()), FormatBytes(candidate.host_bytes()),
                   candidate.step_seconds(), candidate.verdict(), PolicyText(candidate.memory())));
  }
}

void AppendNumber(const char* name, const v1::DeviceFile::Number& number, std::string& text) {
  if (number.source().empty()) return;
  absl::StrAppend(&text,
                  absl::StrFormat("  %-22s %14.4g  %s\n", name, number.value(), number.source()));
}

void AppendAttention(const char* name,
                     const google::protobuf::RepeatedPtrField<v1::DeviceFile::AttentionRate>& rates,
                     std::string& text) {
  for (const v1::DeviceFile::AttentionRate& rate : rates) {
    absl::StrAppend(&text, absl::StrFormat("  %-22s %14s  forward %.4g, backward %.4g; %s\n", name,
                                           FormatTokenCount(rate.length()), rate.forward_flops(),
                                           rate.backward_flops(), rate.source()));
  }
}

void AppendDevice(const v1::DeviceFile& device, std::string& text) {
  absl::StrAppend(&text, "\ndevice     ", device.name(), ": ", device.summary(), "\n\n");
  const auto bytes = [&](const char* name, const v1::DeviceFile::Bytes& value) {
    if (value.source().empty()) return;
    absl::StrAppend(&text, absl::StrFormat("  %-22s %14s  %s\n", name, FormatBytes(value.bytes()),
                                           value.source()));
  };
  const auto matmul = [&](const char* name, const v1::DeviceFile::MatmulRate& rate) {
    if (rate.source().empty()) return;
    absl::StrAppend(&text, absl::StrFormat("  %-22s %14.4g  half of it at %.4g rows; %s\n", name,
                                           rate.flops(), rate.half_rows(), rate.source()));
  };
  bytes("memory", device.memory());
  bytes("host_memory", device.host_memory());
  bytes("context", device.context());
  bytes("communicator", device.communicator());
  AppendNumber("fragmentation", device.fragmentation(), text);
  AppendNumber("peak_flops", device.peak_flops(), text);
  matmul("matmul_bf16", device.matmul_bf16());
  matmul("matmul_fp32", device.matmul_fp32());
  AppendAttention("attention_bf16", device.attention_bf16(), text);
  AppendAttention("attention_fp32", device.attention_fp32(), text);
  AppendAttention("attention_own_bf16", device.attention_own_bf16(), text);
  AppendNumber("memory_bandwidth", device.memory_bandwidth(), text);
  AppendNumber("exchange_in_node", device.exchange_in_node(), text);
  AppendNumber("exchange_between_nodes", device.exchange_between_nodes(), text);
  AppendNumber("exchange_latency", device.exchange_latency(), text);
  AppendNumber("host_copy", device.host_copy(), text);
  AppendNumber("host_update", device.host_update(), text);
  AppendNumber("launch", device.launch(), text);
  for (const std::string& note : device.notes()) absl::StrAppend(&text, "  note: ", note, "\n");
}

}  // namespace

Taken TakenOf(const v1::RunPlan& plan) {
  Taken taken;
  int64_t node = 0;
  const int per_node = std::max(1, plan.spec().parallel().ranks_per_node());
  for (int rank = 0; rank < plan.ranks_size(); ++rank) {
    if (rank % per_node == 0) node = 0;
    node += plan.ranks(rank).host_memory().arena_bytes();
    taken.host_bytes = std::max(taken.host_bytes, node);
    taken.device_bytes = std::max(taken.device_bytes, plan.ranks(rank).memory().arena_bytes());
  }
  return taken;
}

std::string RenderPlan(const v1::RunPlan& plan) {
  const v1::JobSpec& spec = plan.spec();
  const v1::RankPlan& fullest = FullestRank(plan);
  const v1::MemoryUsage& memory = fullest.memory();
  std::string text = absl::StrCat(
      "job        ", spec.name(), ": ", FormatCount(plan.num_parameters()), " parameters, context ",
      FormatTokenCount(spec.train().context()), ", ", spec.train().steps(), " steps\n",
      "method     ", MethodName(spec.parallel().method()), ", ",
      Plural(spec.parallel().ranks(), "rank"), ": ", MeshText(spec.parallel()), "\n", "schedule   ",
      Plural(plan.schedule().stages_size(), "stage"), " of ",
      Plural(plan.schedule().heads_per_rank(), "query head"), " per rank, ",
      Plural(plan.schedule().query_chunks(), "query chunk"), ", ",
      FormatCount(plan.tokens_per_rank()), " tokens per rank\n");
  absl::StrAppend(&text, "memory     rank ", fullest.rank(), " is fullest: peak ",
                  FormatBytes(memory.peak_bytes()), " at \"", memory.peak_moment(), "\", arena ",
                  FormatBytes(memory.arena_bytes()), ", attention ",
                  FormatBytes(memory.attention_peak_bytes()), " (kernel: ", plan.attention_kernel(),
                  ")\n");
  AppendBudget(plan, text);
  absl::StrAppend(&text, "\n");
  AppendCategories(memory, text);
  const v1::MemoryUsage& host = fullest.host_memory();
  if (host.peak_bytes() > 0) {
    absl::StrAppend(&text, "\nhost       peak ", FormatBytes(host.peak_bytes()), " at \"",
                    host.peak_moment(), "\", pool ", FormatBytes(host.arena_bytes()), "\n\n");
    AppendCategories(host, text);
  }
  AppendTime(plan, text);
  absl::StrAppend(&text, "\nstep       ", absl::StrFormat("%.4g", plan.model_flops() / 1e12),
                  " TFLOP of model, ", absl::StrFormat("%.4g", fullest.step_flops() / 1e12),
                  " TFLOP executed by rank ", fullest.rank(), ", ",
                  FormatBytes(SumOf(fullest.bytes_sent_to_peer())), " sent by it");
  if (fullest.bytes_to_host() > 0) {
    absl::StrAppend(&text, ", ", FormatBytes(fullest.bytes_to_host()), " to host memory and ",
                    FormatBytes(fullest.bytes_from_host()), " back");
  }
  absl::StrAppend(&text, "\n");
  AppendCandidates(plan, text);
  for (const std::string& note : plan.notes()) absl::StrAppend(&text, "note       ", note, "\n");
  return text;
}

std::string ExplainPlan(const v1::RunPlan& plan, const v1::DeviceFile& device) {
  const v1::MemorySpec& memory = plan.spec().memory();
  std::string text = "\npolicy\n\n";
  for (int i = 0; i < memory.GetDescriptor()->field_count(); ++i) {
    const google::protobuf::FieldDescriptor& field = *memory.GetDescriptor()->field(i);
    if (field.name() == "policy") continue;
    absl::StrAppend(&text,
                    absl::StrFormat("  %-22s %s\n", field.name(), ScalarFieldText(memory, field)));
  }
  absl::StrAppend(&text, "\nranks\n\n",
                  absl::StrFormat("  %4s %11s %11s %11s %11s %11s %12s\n", "rank", "live peak",
                                  "arena", "attention", "host pool", "sent", "TFLOP"));
  for (const v1::RankPlan& rank : plan.ranks()) {
    absl::StrAppend(&text, absl::StrFormat("  %4d %11s %11s %11s %11s %11s %12.4g\n", rank.rank(),
                                           FormatBytes(rank.memory().peak_bytes()),
                                           FormatBytes(rank.memory().arena_bytes()),
                                           FormatBytes(rank.memory().attention_peak_bytes()),
                                           FormatBytes(rank.host_memory().arena_bytes()),
                                           FormatBytes(SumOf(rank.bytes_sent_to_peer())),
                                           rank.step_flops() / 1e12));
  }
  AppendDevice(device, text);
  return text;
}

std::string RenderSweep(const std::vector<SweepPlan>& points) {
  std::string text = absl::StrFormat("%9s %11s %11s %11s %14s  %s\n", "context", "device",
                                     "host pool", "step", "tokens/s/rank", "split; policy");
  for (const SweepPlan& point : points) {
    if (!point.refusal.empty()) {
      absl::StrAppend(&text,
                      absl::StrFormat("%9s %s\n", FormatTokenCount(point.context), point.refusal));
      continue;
    }
    const Taken taken = TakenOf(point.plan);
    absl::StrAppend(
        &text, absl::StrFormat("%9s %11s %11s %9.4g s %14.4g  %s; %s\n",
                               FormatTokenCount(point.context), FormatBytes(taken.device_bytes),
                               FormatBytes(taken.host_bytes), point.plan.step_time().seconds(),
                               point.plan.step_time().tokens_per_second_per_rank(),
                               SplitText(point.plan.spec().parallel()),
                               PolicyText(point.plan.spec().memory())));
  }
  return text;
}

}  // namespace upipe::planner
