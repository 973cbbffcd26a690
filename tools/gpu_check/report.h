// What the check tells people and files: a short table, and JSON in the form of
// benchmarks/results.
#pragma once

#include <string>
#include <vector>

#include "nlohmann/json.hpp"
#include "tools/gpu_check/run_parts.h"

namespace upipe::gpu_check {

struct ReportHead {
  std::string commit;
  std::string command;
  absl::Time date;
};

// The machine is what the parts' notes say of it.
nlohmann::ordered_json ToJson(const ReportHead& head, const std::vector<PartResult>& results);

// Of one part: a line, its numbers with their aims, its failures and what it skipped.
std::string ToText(const PartResult& result);
// The last line: how many parts passed, and what did not run.
std::string Summary(const std::vector<PartResult>& results);
// What would run, with sizes and time limits, `limit` that of all together.
std::string Listing(const std::vector<Part>& parts, absl::Duration limit);

// True when every part passed or said why it cannot run here, and something was checked or
// measured.
bool AllWell(const std::vector<PartResult>& results);

}  // namespace upipe::gpu_check
