// upipe-calibrate: measures the node it runs on and writes a device description, which plans are
// timed by. Progress and the table go to stderr, so that the description may go to stdout.
#include <CLI/CLI.hpp>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <optional>
#include <string>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/parse_arguments.h"
#include "common/status.h"
#include "planner/calibrate/calibrate.h"
#include "planner/device_file.h"

namespace upipe::planner {
namespace {

constexpr char kDefaultName[] = "cpu";

// Where a file is written before it is renamed to its place.
std::string Partial(const std::string& path) { return path + ".partial"; }

// InvalidArgument when no file can be written there.
absl::Status CheckWritable(const std::string& path) {
  std::error_code error;
  if (std::filesystem::is_directory(path, error)) {
    return absl::InvalidArgumentError(absl::StrCat("--output ", path, " is a folder"));
  }
  if (!std::ofstream(Partial(path))) {
    return absl::InvalidArgumentError(
        absl::StrCat("cannot write --output ", path, "; give a place that can be written"));
  }
  std::filesystem::remove(Partial(path), error);
  return absl::OkStatus();
}

absl::Status WriteFile(const std::string& path, const std::string& text) {
  std::ofstream file(Partial(path));
  file << text;
  file.close();
  std::error_code error;
  if (file) std::filesystem::rename(Partial(path), path, error);
  if (file && !error) return absl::OkStatus();
  std::filesystem::remove(Partial(path), error);
  return absl::UnavailableError(absl::StrCat("measured, but cannot write ", path));
}

absl::Status Run(CalibrateOptions options, const std::string& output) {
  if (options.name.empty()) {
    options.name = output.empty() ? kDefaultName : std::filesystem::path(output).stem().string();
  }
  if (!output.empty()) UPIPE_RETURN_IF_ERROR(CheckWritable(output));
  UPIPE_ASSIGN_OR_RETURN(const v1::DeviceFile device, Calibrate(options));
  std::cerr << "\n" << RenderDevice(device);
  if (output.empty()) {
    std::cout << DeviceFileToYaml(device);
    return absl::OkStatus();
  }
  UPIPE_RETURN_IF_ERROR(WriteFile(output, DeviceFileToYaml(device)));
  std::cerr << "\nwritten to " << output << "\n";
  return absl::OkStatus();
}

int Main(int argc, char** argv) {
  CLI::App app{
      "Measures this node's CPUs and writes a device description that plans are timed by.\n"
      "Example: upipe calibrate --ranks 2 --output devices/cpu.yaml"};
  CalibrateOptions options = {.name = "", .version = UPIPE_VERSION};
  options.say = [](const std::string& line) { std::cerr << line << std::endl; };
  std::string output;
  app.add_option("--ranks", options.ranks,
                 "ranks that compute at once, 1 to 64 (default 1): they share the node");
  app.add_option("--threads-per-rank", options.threads_per_rank,
                 "compute threads of each, 1 to 64 (default 1)");
  app.add_option("--output", output, "file to write (default: to stdout)");
  app.add_option("--name", options.name,
                 "of the device (default: the output file's name without .yaml, else cpu)");
  app.add_flag("--quick", options.quick, "under 10 s instead of a minute: rougher numbers");
  app.add_flag("--busy", options.busy,
               "the node does other work: count processor time where that tells the same");
  if (const std::optional<int> over = ParseArguments(app, argc, argv)) return *over;
  const absl::Status status = Run(std::move(options), output);
  if (status.ok()) return 0;
  std::cerr << "upipe-calibrate: " << status.message() << "\n";
  return absl::IsInvalidArgument(status) ? 2 : 1;
}

}  // namespace
}  // namespace upipe::planner

int main(int argc, char** argv) { return upipe::planner::Main(argc, argv); }
