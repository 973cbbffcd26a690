// One command on a bare machine with a GPU: what needs one is proven and measured in minutes.
#include <fcntl.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <iostream>
#include <set>

#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "common/parse_arguments.h"
#include "tools/gpu_check/parts.h"
#include "tools/gpu_check/report.h"

namespace upipe::gpu_check {
namespace {

struct Arguments {
  Settings settings;
  std::string output = "gpu_check.json", log = "gpu_check.log", commit = "unknown";
  std::vector<std::string> only, skip;
  double seconds = 470;
  bool dry = false;
};

void Declare(CLI::App& app, Arguments& arguments) {
  app.add_flag("--dry", arguments.dry, "List the parts with their sizes and limits, and end");
  app.add_option("--only", arguments.only, "Parts to run; all by default")->delimiter(',');
  app.add_option("--skip", arguments.skip, "Parts to leave out")->delimiter(',');
  app.add_option("--seconds", arguments.seconds, "All parts together; each has its own limit too")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--output", arguments.output, "Where the JSON goes")->capture_default_str();
  app.add_option("--log", arguments.log, "Where the output of the parts goes")
      ->capture_default_str();
  app.add_option("--commit", arguments.commit, "Written to the JSON")->capture_default_str();
  app.add_option("--backend", arguments.settings.backend, "cuda, or cpu to rehearse")
      ->check(CLI::IsMember({"cuda", "cpu"}))
      ->capture_default_str();
  app.add_flag("--small", arguments.settings.small, "Sizes that a CPU gets through in seconds");
}

// Names a part that there is not, or nothing.
std::string UnknownPart(const Arguments& arguments, const std::vector<Part>& parts) {
  std::set<std::string> known;
  for (const Part& part : parts) known.insert(part.name);
  for (const auto* list : {&arguments.only, &arguments.skip}) {
    for (const std::string& name : *list) {
      if (!known.contains(name)) {
        return "no part is named " + name + "; there are " + absl::StrJoin(known, ", ");
      }
    }
  }
  return "";
}

std::vector<Part> Chosen(const Arguments& arguments, std::vector<Part> parts) {
  const std::set<std::string> only(arguments.only.begin(), arguments.only.end());
  const std::set<std::string> skip(arguments.skip.begin(), arguments.skip.end());
  std::erase_if(parts, [&](const Part& part) {
    return skip.contains(part.name) || (!only.empty() && !only.contains(part.name));
  });
  return parts;
}

int Run(const Arguments& arguments, const std::string& command) {
  const std::vector<Part> all = AllParts(arguments.settings);
  if (const std::string unknown = UnknownPart(arguments, all); !unknown.empty()) {
    std::cerr << unknown << "\n";
    return 2;
  }
  const std::vector<Part> parts = Chosen(arguments, all);
  if (arguments.dry) {
    std::cout << Listing(parts, absl::Seconds(arguments.seconds));
    return 0;
  }
  const int log = open(arguments.log.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (log < 0) {
    std::cerr << "cannot write " << arguments.log << "; name another with --log\n";
    return 2;
  }
  const ReportHead head = {.commit = arguments.commit, .command = command, .date = absl::Now()};
  std::vector<PartResult> results;
  const auto write = [&] {
    std::ofstream file(arguments.output);
    file << ToJson(head, results).dump(2, ' ', false, nlohmann::json::error_handler_t::replace)
         << "\n";
    return static_cast<bool>(file.flush());
  };
  bool written = true;
  RunParts(parts, absl::Seconds(arguments.seconds), log, [&](const PartResult& result) {
    std::cout << ToText(result) << std::flush;
    results.push_back(result);
    written = write();
  });
  close(log);
  std::cout << Summary(results);
  if (!written) {
    std::cerr << "cannot write " << arguments.output << "; name another with --output\n";
    return 2;
  }
  return AllWell(results) ? 0 : 1;
}

}  // namespace
}  // namespace upipe::gpu_check

int main(int argc, char** argv) {
  CLI::App app{"Proves and measures on a GPU what needs one"};
  upipe::gpu_check::Arguments arguments;
  upipe::gpu_check::Declare(app, arguments);
  if (const auto code = upipe::ParseArguments(app, argc, argv)) return *code;
  return upipe::gpu_check::Run(arguments,
                               absl::StrJoin(std::vector<std::string>(argv, argv + argc), " "));
}
