#include "tools/gpu_check/report.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "common/machine.h"

namespace upipe::gpu_check {
namespace {

double Seconds(absl::Duration duration) {
  return std::round(absl::ToDoubleSeconds(duration) * 100) / 100;
}

nlohmann::ordered_json ToJson(const Number& number) {
  nlohmann::ordered_json json = {
      {"name", number.name}, {"value", number.value}, {"unit", number.unit}};
  if (number.aim) {
    json[number.at_most ? "aim_at_most" : "aim_at_least"] = *number.aim;
    json["aim_met"] = number.Meets();
  }
  return json;
}

std::string LowerCase(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(), [](char c) { return std::tolower(c); });
  return text;
}

nlohmann::ordered_json ToJson(const PartResult& result) {
  nlohmann::ordered_json json = {{"part", result.name},
                                 {"what", result.what},
                                 {"outcome", LowerCase(NameOf(result.outcome))},
                                 {"seconds", Seconds(result.taken)},
                                 {"seconds_limit", Seconds(result.limit)},
                                 {"checks_passed", result.found.passed}};
  json["numbers"] = nlohmann::ordered_json::array();
  for (const Number& number : result.found.numbers) json["numbers"].push_back(ToJson(number));
  json["failures"] = result.found.failures;
  json["skipped"] = result.found.skipped;
  return json;
}

// Four figures that count.
std::string Readable(double value) {
  if (value == 0 || !std::isfinite(value)) return absl::StrCat(value);
  const double size = std::abs(value);
  if (size >= 1e7 || size < 1e-3) return absl::StrFormat("%.3e", value);
  if (size >= 100) return absl::StrFormat("%.0f", value);
  return absl::StrFormat("%.4g", value);
}

constexpr size_t kMostLines = 8;  // of failures, of what was skipped

void AppendLines(const std::vector<std::string>& lines, const char* mark, std::string& text) {
  for (size_t i = 0; i < lines.size() && i < kMostLines; ++i) {
    absl::StrAppend(&text, "    ", mark, " ", lines[i], "\n");
  }
  if (lines.size() > kMostLines) {
    absl::StrAppend(&text, "    ", mark, " and ", lines.size() - kMostLines,
                    " more, all in the JSON\n");
  }
}

}  // namespace

nlohmann::ordered_json ToJson(const ReportHead& head, const std::vector<PartResult>& results) {
  nlohmann::ordered_json json;
  json["processor"] = CpuModel();
  json["commit"] = head.commit;
  json["command"] = head.command;
  json["date"] = absl::FormatTime("%Y-%m-%dT%H:%M:%SZ", head.date, absl::UTCTimeZone());
  nlohmann::ordered_json& machine = json["machine"] = nlohmann::ordered_json::object();
  absl::Duration taken;
  for (const PartResult& result : results) {
    for (const auto& [name, text] : result.found.notes) machine[name] = text;
    taken += result.taken;
  }
  json["seconds"] = Seconds(taken);
  json["all_well"] = AllWell(results);
  json["parts"] = nlohmann::ordered_json::array();
  for (const PartResult& result : results) json["parts"].push_back(ToJson(result));
  return json;
}

std::string ToText(const PartResult& result) {
  std::string text =
      absl::StrFormat("%-16s %-8s %6.1f s of %3.0f", result.name, NameOf(result.outcome),
                      Seconds(result.taken), Seconds(result.limit));
  if (result.found.passed > 0) absl::StrAppend(&text, ", ", result.found.passed, " checks");
  absl::StrAppend(&text, "   ", result.what, "\n");
  for (const auto& [name, note] : result.found.notes) {
    absl::StrAppend(&text, absl::StrFormat("    %-52s %s\n", name, note));
  }
  for (const Number& number : result.found.numbers) {
    absl::StrAppend(&text, absl::StrFormat("    %-52s %10s %s", number.name, Readable(number.value),
                                           number.unit));
    if (number.aim) {
      absl::StrAppend(&text, "  (aim: ", number.at_most ? "at most " : "", Readable(*number.aim),
                      number.Meets() ? ")" : ", missed)");
    }
    absl::StrAppend(&text, "\n");
  }
  AppendLines(result.found.failures, "FAILED:", text);
  AppendLines(result.found.skipped, "skipped:", text);
  return text;
}

std::string Summary(const std::vector<PartResult>& results) {
  std::vector<std::string> failed, unfinished, skipped;
  int passed = 0, missed = 0;
  for (const PartResult& result : results) {
    if (result.outcome == Outcome::kPassed) ++passed;
    if (result.outcome == Outcome::kFailed) failed.push_back(result.name);
    if (result.outcome == Outcome::kStopped) unfinished.push_back(result.name);
    if (result.outcome == Outcome::kSkipped) skipped.push_back(result.name);
    for (const Number& number : result.found.numbers) missed += number.Meets() ? 0 : 1;
  }
  std::string text = absl::StrCat(passed, " of ", results.size(), " parts passed");
  const auto list = [&](const char* what, const std::vector<std::string>& names) {
    if (!names.empty()) absl::StrAppend(&text, "; ", what, ": ", absl::StrJoin(names, ", "));
  };
  list("failed", failed);
  list("stopped at their time limit", unfinished);
  list("skipped", skipped);
  if (missed > 0) absl::StrAppend(&text, "; ", missed, " numbers miss their aim");
  return text + "\n";
}

std::string Listing(const std::vector<Part>& parts, absl::Duration limit) {
  std::string text;
  absl::Duration budgets;
  for (const Part& part : parts) {
    budgets += part.budget;
    absl::StrAppend(
        &text, absl::StrFormat("%-18s %3.0f s   %s\n", part.name, Seconds(part.budget), part.what));
    for (const std::string& line : part.cases) absl::StrAppend(&text, "    ", line, "\n");
  }
  absl::StrAppend(&text, parts.size(), " parts, ", Seconds(budgets), " s of at most ",
                  Seconds(limit), " s\n");
  return text;
}

bool AllWell(const std::vector<PartResult>& results) {
  const auto fine = [](const PartResult& result) {
    return result.outcome == Outcome::kPassed || result.outcome == Outcome::kSkipped;
  };
  const auto found_something = [](const PartResult& result) {
    return result.found.passed > 0 || !result.found.numbers.empty();
  };
  return std::all_of(results.begin(), results.end(), fine) &&
         std::any_of(results.begin(), results.end(), found_something);
}

}  // namespace upipe::gpu_check
