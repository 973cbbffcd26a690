#include "tools/gpu_check/findings.h"

#include <unistd.h>

#include <utility>

#include "absl/strings/str_split.h"
#include "nlohmann/json.hpp"

namespace upipe::gpu_check {

void Findings::Write(const std::string& kind, const std::string& json) {
  const std::string line = "{\"" + kind + "\": " + json + "}\n";
  size_t done = 0;
  while (done < line.size()) {
    const ssize_t count = write(fd_, line.data() + done, line.size() - done);
    if (count <= 0) return;  // nobody is left to tell
    done += static_cast<size_t>(count);
  }
}

namespace {

std::string Quoted(const std::string& text) {
  return nlohmann::json(text).dump(-1, ' ', true, nlohmann::json::error_handler_t::replace);
}

}  // namespace

void Findings::Add(const Number& number) {
  nlohmann::ordered_json json = {
      {"name", number.name}, {"value", number.value}, {"unit", number.unit}};
  if (number.aim) json["aim"] = *number.aim;
  if (number.at_most) json["at_most"] = true;
  Write("number", json.dump());
}

void Findings::Passed(const std::string& check) { Write("passed", Quoted(check)); }
void Findings::Failed(const std::string& sentence) { Write("failed", Quoted(sentence)); }
void Findings::Skipped(const std::string& sentence) { Write("skipped", Quoted(sentence)); }

void Findings::Note(const std::string& name, const std::string& text) {
  Write("note", "[" + Quoted(name) + ", " + Quoted(text) + "]");
}

void Findings::Expect(bool held, const std::string& check, const std::string& sentence) {
  if (held) {
    Passed(check);
  } else {
    Failed(check + ": " + sentence);
  }
}

namespace {

Number NumberOf(const nlohmann::json& json) {
  Number number;
  number.name = json.value("name", "");
  // NaN and infinity are null in JSON.
  number.value = json["value"].is_number() ? json["value"].get<double>() : 0.0 / 0.0;
  number.unit = json.value("unit", "");
  if (json.contains("aim")) number.aim = json["aim"].get<double>();
  number.at_most = json.value("at_most", false);
  return number;
}

}  // namespace

FindingsRead ReadFindings(const std::string& text) {
  FindingsRead read;
  for (const auto& line : absl::StrSplit(text, '\n', absl::SkipEmpty())) {
    const auto json = nlohmann::json::parse(line.begin(), line.end(), nullptr, false);
    if (json.is_discarded() || json.size() != 1) continue;
    const std::string kind = json.begin().key();
    const nlohmann::json& value = json.begin().value();
    if (kind == "number") read.numbers.push_back(NumberOf(value));
    if (kind == "passed") ++read.passed;
    if (kind == "failed") read.failures.push_back(value.get<std::string>());
    if (kind == "skipped") read.skipped.push_back(value.get<std::string>());
    if (kind == "note") {
      read.notes.emplace_back(value[0].get<std::string>(), value[1].get<std::string>());
    }
  }
  return read;
}

}  // namespace upipe::gpu_check
