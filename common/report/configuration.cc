#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "common/chart/svg.h"
#include "common/report/page_parts.h"
#include "common/report/sections.h"
#include "common/spec/job_spec.h"
#include "common/spec/yaml_spec.h"
#include "common/units.h"

namespace upipe::report {
namespace {

std::string ModelText(const v1::ModelSpec& model) {
  return absl::StrCat(model.num_layers(), " layers, d = ", model.hidden_size(), ", ",
                      model.num_heads(), " heads, ", model.num_kv_heads(),
                      " K/V heads, D = ", model.head_dim(), ", F = ", model.intermediate_size(),
                      ", vocabulary ", model.vocab_size());
}

std::string OptimizerText(const v1::OptimizerSpec& optimizer) {
  return absl::StrCat("AdamW, peak learning rate ", optimizer.learning_rate(), ", ",
                      optimizer.warmup_steps(), " steps of warm-up, cosine, clip ",
                      optimizer.clip_norm());
}

std::string StepTimeText(const v1::StepTime& time, const std::string& device) {
  if (time.seconds() <= 0) return "";
  std::string text = absl::StrCat(Seconds(time.seconds()), " a step by the rates of ", device);
  for (const v1::StepTime::Part& part : time.parts()) {
    absl::StrAppend(&text, ", ", part.name(), " ", Seconds(part.seconds()));
  }
  return text;
}

std::string PlanTable(const v1::RunPlan& plan) {
  const v1::JobSpec& spec = plan.spec();
  const v1::HeadChunkSchedule& schedule = plan.schedule();
  return RenderTable({
      {"model", absl::StrCat(ModelText(spec.model()), "; ", FormatCount(plan.num_parameters()),
                             " parameters")},
      {"sequences", absl::StrCat(FormatTokenCount(plan.padded_context()), " tokens, ",
                                 FormatCount(plan.tokens_per_rank()), " per rank")},
      {"parallel",
       absl::StrCat(plan.ranks_size(), " ranks, ", MethodTitle(spec.parallel().method()), ": ",
                    schedule.ulysses_ranks(), " Ulysses x ", schedule.ring_ranks(), " ring")},
      {"schedule", absl::StrCat(schedule.stages_size(), " stages, ", schedule.heads_per_rank(),
                                " query heads per rank and stage, ", schedule.query_chunks(),
                                " query chunks, hash ", absl::Hex(plan.schedule_hash()))},
      {"optimizer", OptimizerText(spec.optimizer())},
      {"kernel", plan.attention_kernel()},
      {"step", absl::StrFormat("%.3g TFLOP of model (causal), without recomputation",
                               plan.model_flops() / 1e12)},
      {"planned time", StepTimeText(plan.step_time(), plan.device())},
      {"limit of a rank",
       plan.budget().device_bytes() > 0 ? FormatBytes(plan.budget().device_bytes()) : ""},
      {"notes", absl::StrJoin(plan.notes(), "; ")},
  });
}

}  // namespace

std::string ConfigurationSection(const JobRecord& record) {
  const v1::Job& job = record.job;
  std::string content;
  if (job.has_plan()) absl::StrAppend(&content, "<h3>Plan</h3>", PlanTable(job.plan()));
  absl::StrAppend(&content, "<h3>Job file</h3><pre>", chart::Escape(JobSpecToYaml(job.spec())),
                  "</pre>\n");
  if (!record.versions.empty()) {
    absl::StrAppend(&content, "<h3>Versions</h3>", RenderTable(record.versions));
  }
  return RenderCard({"configuration", "Configuration",
                     job.has_plan() ? "What was asked for, and what the planner made of it."
                                    : "What was asked for. There is no plan.",
                     content, true});
}

}  // namespace upipe::report
