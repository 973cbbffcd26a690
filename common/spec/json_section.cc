#include "common/spec/json_section.h"

#include <cmath>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "common/spec/scalar_field.h"

namespace upipe {
namespace {

using nlohmann::json;

constexpr int kMaxDepth = 8;
constexpr int64_t kMaxJsonSize = int64_t{1} << 40;

// `text`, which is UTF-8, without control characters and shortened.
std::string Shown(absl::string_view text) {
  if (text.size() <= 80) return absl::Utf8SafeCEscape(text);
  return absl::StrCat(absl::CHexEscape(text.substr(0, 60)), "...");
}

// Watches a parse for what nlohmann::json takes silently.
class ParseWatch {
 public:
  explicit ParseWatch(std::vector<Violation>& violations) : violations_(violations) {}

  bool operator()(int depth, json::parse_event_t event, json& parsed) {
    if (event == json::parse_event_t::object_start) {
      keys_.emplace_back();
    } else if (event == json::parse_event_t::object_end) {
      keys_.pop_back();
    } else if (event == json::parse_event_t::key) {
      const auto& key = parsed.get_ref<const std::string&>();
      if (!keys_.back().insert(key).second) violations_.push_back({Shown(key), "is given twice"});
    }
    if (depth > kMaxDepth && !too_deep_) {
      too_deep_ = true;
      violations_.push_back({"", absl::StrCat("is nested deeper than ", kMaxDepth, " levels")});
    }
    return true;
  }

 private:
  std::vector<Violation>& violations_;
  std::vector<std::set<std::string>> keys_;  // of the objects that are open
  bool too_deep_ = false;
};

// Without "[json.exception.parse_error.101] " and bytes of the input.
std::string ReasonOf(const json::exception& error) {
  absl::string_view what = error.what();
  const size_t end = what.find("] ");
  if (end != absl::string_view::npos) what.remove_prefix(end + 2);
  return absl::CHexEscape(what.substr(0, 160));
}

bool IsExpertKey(absl::string_view key) {
  return absl::StrContains(key, "expert") || absl::StartsWith(key, "moe_") ||
         absl::StartsWith(key, "router_") || key == "decoder_sparse_step" ||
         key == "mlp_only_layers" || key == "norm_topk_prob";
}

}  // namespace

bool ParseJsonObject(absl::string_view text, json& root, std::vector<Violation>& violations) {
  const size_t before = violations.size();
  ParseWatch watch(violations);
  try {
    root = json::parse(text.begin(), text.end(),
                       [&](int depth, json::parse_event_t event, json& parsed) {
                         return watch(depth, event, parsed);
                       });
  } catch (const json::exception& error) {
    violations.push_back({"", absl::StrCat("is no JSON: ", ReasonOf(error))});
  }
  if (violations.size() == before && !root.is_object()) {
    violations.push_back({"", "is no JSON object of keys and values"});
  }
  return violations.size() == before;
}

std::string ShownJson(const json& value) {
  if (value.is_string()) return absl::StrCat("'", Shown(value.get_ref<const std::string&>()), "'");
  if (value.is_structured()) return value.is_object() ? "an object" : "a list";
  return value.dump();
}

const json* JsonSection::Find(const char* key) {
  known_.insert(key);
  const auto found = object_.find(key);
  return found == object_.end() || found->is_null() ? nullptr : &*found;
}

bool JsonSection::IsNull(const char* key) const {
  const auto found = object_.find(key);
  return found != object_.end() && found->is_null();
}

int64_t JsonSection::Size(const char* key, int64_t absent) {
  const json* value = Find(key);
  if (value == nullptr) return absent;
  if (value->is_number_integer()) {
    const auto size = value->get<int64_t>();  // negative from 2^63 on
    if (size >= 1 && size <= kMaxJsonSize) return size;
  }
  Fail(key, absl::StrCat(ShownJson(*value), " is no whole number from 1 to 2^40"));
  return absent;
}

double JsonSection::Positive(const char* key, double absent) {
  const json* value = Find(key);
  if (value == nullptr) return absent;
  if (value->is_number()) {
    const auto number = value->get<double>();
    if (std::isfinite(number) && number > 0) return number;
  }
  Fail(key, absl::StrCat(ShownJson(*value), " is no number above 0"));
  return absent;
}

bool JsonSection::Flag(const char* key, bool absent) {
  const json* value = Find(key);
  if (value == nullptr) return absent;
  if (value->is_boolean()) return value->get<bool>();
  Fail(key, absl::StrCat(ShownJson(*value), " is not true or false"));
  return absent;
}

std::string JsonSection::Text(const char* key, absl::string_view absent) {
  const json* value = Find(key);
  if (value == nullptr) return std::string(absent);
  if (value->is_string()) return value->get<std::string>();
  Fail(key, absl::StrCat(ShownJson(*value), " is no text"));
  return std::string(absent);
}

void JsonSection::MustBe(const char* key, const json& value, absl::string_view why) {
  const json* found = Find(key);
  if (found == nullptr || *found == value) return;
  Fail(key, absl::StrCat("is ", ShownJson(*found), ": ", why));
}

void JsonSection::Fail(absl::string_view key, std::string message) {
  violations_.push_back(
      {path_.empty() ? std::string(key) : absl::StrCat(path_, ".", key), std::move(message)});
}

void JsonSection::Ignore(const std::vector<absl::string_view>& keys) {
  for (const absl::string_view key : keys) known_.emplace(key);
}

void JsonSection::RefuseTheRest() {
  const std::vector<std::string> names(known_.begin(), known_.end());
  for (const auto& [key, value] : object_.items()) {
    if (known_.contains(key) || value.is_null()) continue;
    if (IsExpertKey(key)) {
      Fail(Shown(key), "is part of a mixture of experts, which this version does not compute");
      continue;
    }
    const std::string nearest = NearestName(key, names);
    Fail(Shown(key),
         absl::StrCat("is not known: it may change the mathematics; remove it if it ", "does not",
                      absl::StartsWith(nearest, "; did you") ? nearest : ""));
  }
}

}  // namespace upipe
