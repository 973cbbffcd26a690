#include "planner/render.h"

#include <algorithm>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/spec/job_spec.h"
#include "common/units.h"
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

}  // namespace

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
                  ")\n\n");
  AppendCategories(memory, text);
  const v1::MemoryUsage& host = fullest.host_memory();
  if (host.peak_bytes() > 0) {
    absl::StrAppend(&text, "\nhost       peak ", FormatBytes(host.peak_bytes()), " at \"",
                    host.peak_moment(), "\", pool ", FormatBytes(host.arena_bytes()), "\n\n");
    AppendCategories(host, text);
  }
  const int64_t sent = std::accumulate(fullest.bytes_sent_to_peer().begin(),
                                       fullest.bytes_sent_to_peer().end(), int64_t{0});
  absl::StrAppend(&text, "\nstep       ", absl::StrFormat("%.4g", plan.model_flops() / 1e12),
                  " TFLOP of model, ", absl::StrFormat("%.4g", fullest.step_flops() / 1e12),
                  " TFLOP executed by rank ", fullest.rank(), ", ", FormatBytes(sent),
                  " sent by it\n");
  for (const std::string& note : plan.notes()) absl::StrAppend(&text, "note       ", note, "\n");
  return text;
}

}  // namespace upipe::planner
