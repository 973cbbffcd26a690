// What the benchmarks share: where and when a run was made, medians with their spread, and writing
// the JSON that benchmarks/results/ keeps.
#pragma once

#include <string>
#include <vector>

#include "nlohmann/json.hpp"

namespace upipe::bench {

// Values must not be empty. The middle one, or the mean of the two in the middle.
double Median(std::vector<double> values);

// {"median": .., "min": .., "max": .., "samples": n}.
nlohmann::ordered_json Spread(const std::vector<double>& values);

// The head of every report: machine, number of processors, commit, command line and UTC date.
nlohmann::ordered_json ReportHead(const std::string& commit, int argc, char** argv);

// To `path`, or to standard output when it is empty. False, with a sentence on standard error, when
// it could not be written.
bool WriteReport(const nlohmann::ordered_json& report, const std::string& path);

}  // namespace upipe::bench
