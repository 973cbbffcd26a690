#include "client/report.h"

#include <nlohmann/json.hpp>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "client/render.h"
#include "common/errors/rpc_error.h"

namespace upipe::client {
namespace {

std::string OneLine(const nlohmann::ordered_json& json) {
  return json.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
}

// Keeps the lines of `text`, makes each printable.
std::string PrintableLines(absl::string_view text) {
  std::string out;
  for (const absl::string_view line : absl::StrSplit(text, '\n')) {
    absl::StrAppend(&out, Printable(line), "\n");
  }
  return out;
}

void Say(Console& console, const char* kind, absl::string_view prefix, absl::string_view text) {
  if (console.json) {
    console.err << OneLine({{kind, std::string(text)}}) << std::flush;
  } else {
    console.err << prefix << PrintableLines(text) << std::flush;
  }
}

}  // namespace

std::string ErrorJson(const absl::Status& error) {
  const google::rpc::ErrorInfo info = ErrorInfoOf(error);
  nlohmann::ordered_json json = {{"code", absl::StatusCodeToString(error.code())},
                                 {"reason", info.reason()},
                                 {"domain", info.domain()},
                                 {"message", std::string(error.message())},
                                 {"metadata", nlohmann::json::object()},
                                 {"field_violations", nlohmann::json::array()}};
  for (const auto& [key, value] : info.metadata()) json["metadata"][key] = value;
  for (const FieldViolation& violation : FieldViolationsOf(error)) {
    json["field_violations"].push_back(
        {{"field", violation.field}, {"description", violation.description}});
  }
  return OneLine({{"error", json}});
}

std::string ErrorText(const absl::Status& error) {
  // Each line begins with file and line, as compilers write them.
  if (HasReason(error, Reason::kJobFileInvalid)) return PrintableLines(error.message());
  const std::vector<FieldViolation> violations = FieldViolationsOf(error);
  if (violations.empty()) return absl::StrCat("upipe: ", PrintableLines(error.message()));
  std::string text = "upipe: the coordinator does not accept the request\n";
  for (const FieldViolation& violation : violations) {
    absl::StrAppend(&text, "  ", Printable(violation.field), ": ", Printable(violation.description),
                    "\n");
  }
  return text;
}

int Report(Console& console, const absl::Status& error) {
  console.err << (console.json ? ErrorJson(error) : ErrorText(error)) << std::flush;
  const bool wrong = absl::IsInvalidArgument(error) || absl::IsNotFound(error);
  return wrong ? kExitWrongRequest : kExitFailed;
}

void Warn(Console& console, absl::string_view text) { Say(console, "warning", "warning: ", text); }
void Note(Console& console, absl::string_view text) { Say(console, "note", "", text); }

}  // namespace upipe::client
