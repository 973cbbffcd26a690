#include "planner/notes.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "common/spec/job_spec.h"
#include "common/units.h"
#include "engine/parallel/mesh.h"

namespace upipe::planner {
namespace {

bool AnyOnHost(const v1::MemorySpec& memory) {
  return memory.attention_output() == v1::ATTENTION_OUTPUT_HOST ||
         memory.layer_inputs() == v1::PLACE_HOST || memory.hidden_stream() == v1::PLACE_HOST ||
         memory.stage_kv() == v1::PLACE_HOST || memory.optimizer() == v1::PLACE_HOST;
}

// How many sequences a step trains on and where they come from; empty for one.
std::string SequencesNote(const v1::JobSpec& spec) {
  const parallel::Mesh mesh = parallel::Mesh::From(spec.parallel());
  const int64_t accumulation = spec.train().gradient_accumulation();
  std::vector<std::string> factors;
  if (mesh.sequence_groups() > 1) {
    factors.push_back(absl::StrCat(mesh.sequence_groups(), " groups of ", mesh.context_ranks(),
                                   " context ranks (dp ", mesh.dp_ranks, " x fsdp ",
                                   mesh.fsdp_ranks, ")"));
  }
  if (accumulation > 1) factors.push_back(absl::StrCat(FormatCount(accumulation), " accumulated"));
  if (factors.empty()) return "";
  return absl::StrCat("a step is ", FormatCount(mesh.sequence_groups() * accumulation),
                      " sequences: ", absl::StrJoin(factors, " x "));
}

// Of the work of ranks, from their own dry runs; empty when they are within 1 % of the mean.
std::string BalanceNote(const v1::RunPlan& plan) {
  double sum = 0;
  const v1::RankPlan* busiest = nullptr;
  for (const v1::RankPlan& rank : plan.ranks()) {
    sum += rank.step_flops();
    if (busiest == nullptr || rank.step_flops() > busiest->step_flops()) busiest = &rank;
  }
  if (busiest == nullptr || sum == 0) return "";
  const double over = busiest->step_flops() * plan.ranks_size() / sum;
  if (over <= 1.01) return "";
  return absl::StrFormat("rank %d is busiest: it computes %.2f times the mean of all ranks",
                         busiest->rank(), over);
}

// Which promise holds of a run that is disturbed, and what it costs.
std::string PromiseNote(const v1::RunPlan& plan, const v1::DeviceFile& device) {
  const v1::JobSpec& spec = plan.spec();
  const bool asked = spec.train().deterministic();
  if (spec.parallel().backend() != "cuda") {
    return absl::StrCat(
        "bit-identical on equal instruction set, threads per rank and library "
        "versions",
        asked ? ""
              : ", also without train.deterministic: nothing here is faster "
                "for giving it up");
  }
  if (!plan.bit_identical()) {
    return "equal within the same-precision bound, not bit for bit, after a restart: cuDNN's "
           "attention backward adds in no fixed order; train.deterministic: true takes the own "
           "kernel's, which keeps the bits, needs no scratch and is slower";
  }
  std::string note = "bit-identical on equal GPU model, instruction set and library versions";
  const bool replaced =
      asked && device.attention_kernel() != "own" && spec.train().dtype() == v1::DTYPE_BF16;
  if (!replaced) return note;
  absl::StrAppend(&note, ": attention's backward is the own kernel, which needs no scratch; ",
                  device.attention_own_bf16().empty()
                      ? absl::StrCat("its rate is not known on ", device.name(),
                                     ", so the step's time is told at the rate of ",
                                     device.attention_kernel(), ", which is faster")
                      : absl::StrCat("it is timed at its rate on ", device.name()));
  return note;
}

// Of a job that is planned once more; else empty.
std::string MeasuredNote(const v1::MeasuredWorkspaces& measured) {
  if (measured.ops().empty()) return "";
  const v1::MeasuredWorkspaces::Op* worst = &measured.ops(0);
  for (const v1::MeasuredWorkspaces::Op& op : measured.ops()) {
    const auto excess = [](const v1::MeasuredWorkspaces::Op& of) {
      return of.measured_bytes() - of.counted_bytes();
    };
    if (excess(op) > excess(*worst)) worst = &op;
  }
  return absl::StrCat(
      "scratch is as a worker measured it",
      measured.libraries().empty() ? "" : absl::StrCat(" with ", measured.libraries()), ": ",
      worst->op(), " takes ", FormatBytes(worst->measured_bytes()), " where ",
      FormatBytes(worst->counted_bytes()), " were counted");
}

}  // namespace

std::string MeshText(const v1::ParallelSpec& parallel) {
  const parallel::Mesh mesh = parallel::Mesh::From(parallel);
  return absl::StrCat("C ", mesh.ulysses_ranks, " x R ", mesh.ring_ranks, " x fsdp ",
                      mesh.fsdp_ranks, " x dp ", mesh.dp_ranks);
}

std::string MaskText(const v1::JobSpec& spec) {
  std::string text = spec.model().causal() ? "causal" : "full";
  if (spec.model().has_window() && spec.model().window() < spec.train().context()) {
    absl::StrAppend(&text, " within ", FormatCount(spec.model().window()), " positions");
  }
  if (spec.data().documents() == v1::DOCUMENTS_JOIN) return text;
  absl::StrAppend(&text, ", inside each document");
  if (spec.data().documents() == v1::DOCUMENTS_RESTART) {
    absl::StrAppend(&text, ", whose positions begin at 0");
  }
  return text;
}

std::string PolicyText(const v1::MemorySpec& memory) {
  std::vector<std::string> parts;
  switch (memory.attention_output()) {
    case v1::ATTENTION_OUTPUT_DEVICE:
      parts.push_back("attention outputs kept on the device");
      break;
    case v1::ATTENTION_OUTPUT_HOST:
      parts.push_back("attention outputs kept on the host");
      break;
    default:
      parts.push_back("attention outputs computed again");
  }
  std::vector<std::string> host;
  if (memory.layer_inputs() == v1::PLACE_HOST) host.push_back("layer inputs");
  if (memory.hidden_stream() == v1::PLACE_HOST) host.push_back("hidden stream");
  if (memory.stage_kv() == v1::PLACE_HOST) host.push_back("stage K/V");
  if (memory.optimizer() == v1::PLACE_HOST) host.push_back("optimizer");
  if (!host.empty()) parts.push_back(absl::StrCat(absl::StrJoin(host, ", "), " on the host"));
  if (memory.checkpoint_stride() > 1) {
    parts.push_back(
        absl::StrCat("the input of every ", memory.checkpoint_stride(), " layers kept"));
  }
  if (memory.query_chunks() > 1) {
    parts.push_back(absl::StrCat(memory.query_chunks(), " query chunks"));
  }
  if (memory.overlap()) parts.push_back("stages overlapped");
  if (memory.ring_kv() == v1::RING_KV_KEEP) parts.push_back("K/V of the ring kept");
  return absl::StrJoin(parts, "; ");
}

std::vector<std::string> PlanNotes(const v1::RunPlan& plan, const v1::DeviceFile& device) {
  const v1::JobSpec& spec = plan.spec();
  std::vector<std::string> notes;
  const auto add = [&notes](std::string note) {
    if (!note.empty()) notes.push_back(std::move(note));
  };
  add(SequencesNote(spec));
  add(absl::StrCat("mask: ", MaskText(spec)));
  if (spec.data().documents() != v1::DOCUMENTS_JOIN) {
    add("FLOPs are of sequences that are one document; with more they are fewer, and spread over "
        "ranks as the documents lie");
  }
  add(absl::StrCat("policy: ", PolicyText(spec.memory())));
  const bool cuda = spec.parallel().backend() == "cuda";
  if (AnyOnHost(spec.memory()) && !cuda) {
    add(absl::StrCat("backend ", spec.parallel().backend(),
                     " has no memory but the host's: what waits on the host is counted apart and "
                     "saves nothing here"));
  }
  add(BalanceNote(plan));
  for (std::string& warning : JobSpecWarnings(spec)) add(std::move(warning));
  add(PromiseNote(plan, device));
  add(MeasuredNote(plan.measured()));
  return notes;
}

}  // namespace upipe::planner
