#include "planner/selfcheck_report.h"

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/spec/job_spec.h"
#include "common/units.h"
#include "planner/notes.h"

namespace upipe::planner {
namespace {

constexpr size_t kGradientsShown = 5;

// Nearest to their bounds first.
std::vector<train::Compared> Tightest(std::vector<train::Compared> gradients) {
  const auto nearness = [](const train::Compared& each) {
    return each.holds() ? each.error / each.bound : std::numeric_limits<double>::infinity();
  };
  std::stable_sort(gradients.begin(), gradients.end(),
                   [&](const auto& a, const auto& b) { return nearness(a) > nearness(b); });
  gradients.resize(std::min(gradients.size(), kGradientsShown));
  return gradients;
}

// Peaks and arenas; categories are in the JSON.
bool IsTotal(const train::PlannedAndMeasured& each) {
  const std::string& what = each.what;
  return each.planned + each.measured > 0 &&
         (absl::EndsWith(what, ": peak") || absl::EndsWith(what, ": arena") ||
          absl::EndsWith(what, ": attention") || each.planned != each.measured);
}

nlohmann::json ToJson(const std::vector<train::Compared>& list, bool tensors) {
  nlohmann::json all = nlohmann::json::array();
  for (const train::Compared& each : list) {
    nlohmann::json one = {
        {"what", each.what}, {"error", each.error}, {"bound", each.bound}, {"holds", each.holds()}};
    one[tensors ? "norm" : "alone"] = each.alone;
    if (!tensors) one["job"] = each.job;
    all.push_back(std::move(one));
  }
  return all;
}

}  // namespace

std::string RenderSelfCheck(const v1::RunPlan& plan, const train::SelfCheckReport& report) {
  const v1::ParallelSpec& parallel = plan.spec().parallel();
  std::string text = absl::StrFormat(
      "selfcheck  %s: %s, %d ranks: %s\n"
      "           steps %d, sequences %d, tokens %d, documents %d; up to %s on rank 0\n\n",
      plan.spec().name(), MethodName(parallel.method()), parallel.ranks(), MeshText(parallel),
      report.steps, report.sequences, report.context, report.documents, FormatBytes(report.bytes));
  absl::StrAppend(&text,
                  absl::StrFormat("%-28s %14s %14s %10s %10s\n", "", "CP = 1",
                                  absl::StrCat("CP = ", report.context_ranks), "differ by", "may"));
  for (const train::Compared& each : report.numbers) {
    absl::StrAppend(&text,
                    absl::StrFormat("%-28s %14.9g %14.9g %10.2g %10.2g%s\n", each.what, each.alone,
                                    each.job, each.error, each.bound, each.holds() ? "" : "  <-"));
  }
  absl::StrAppend(&text, "\nof ", report.gradients.size(),
                  " gradients of step 1 the nearest to what they may differ by\n");
  for (const train::Compared& each : Tightest(report.gradients)) {
    absl::StrAppend(&text, absl::StrFormat("%-58s %10.2g %10.2g%s\n", each.what, each.error,
                                           each.bound, each.holds() ? "" : "  <-"));
  }
  absl::StrAppend(&text, "\n");
  for (const std::string& probe : report.probes) {
    absl::StrAppend(&text, "probe      other tokens ", probe, "\n");
  }
  absl::StrAppend(&text,
                  absl::StrFormat("\n%-44s %14s %14s\n", "bytes of rank 0", "planned", "measured"));
  for (const train::PlannedAndMeasured& each : report.memory) {
    if (!IsTotal(each)) continue;
    absl::StrAppend(&text,
                    absl::StrFormat("%-44s %14d %14d%s\n", each.what, each.planned, each.measured,
                                    each.planned == each.measured ? "" : "  <-"));
  }
  return absl::StrCat(text, "\n", VerdictOf(report), "\n");
}

std::string SelfCheckJson(const train::SelfCheckReport& report) {
  nlohmann::json json = {{"verdict", VerdictOf(report)},
                         {"passed", report.passed()},
                         {"shape",
                          {{"context_ranks", report.context_ranks},
                           {"context", report.context},
                           {"documents", report.documents},
                           {"sequences", report.sequences},
                           {"steps", report.steps},
                           {"bytes", report.bytes}}},
                         {"numbers", ToJson(report.numbers, /*tensors=*/false)},
                         {"gradients", ToJson(report.gradients, /*tensors=*/true)},
                         {"probes", report.probes},
                         {"memory", nlohmann::json::array()}};
  if (!report.passed()) json["failure"] = report.failure;
  for (const train::PlannedAndMeasured& each : report.memory) {
    json["memory"].push_back(
        {{"what", each.what}, {"planned", each.planned}, {"measured", each.measured}});
  }
  return json.dump(2);
}

}  // namespace upipe::planner
