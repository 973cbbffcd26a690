// upipe-plan: a job's plan or the one sentence that refuses it. People give it a YAML file; the
// coordinator runs it as a child with binary messages, so that no job's content can bring the
// coordinator down.
#include <CLI/CLI.hpp>
#include <fstream>
#include <iostream>
#include <sstream>

#include "absl/strings/str_cat.h"
#include "common/machine.h"
#include "common/parse_arguments.h"
#include "common/spec/yaml_spec.h"
#include "common/status.h"
#include "common/units.h"
#include "google/protobuf/util/json_util.h"
#include "planner/plan.h"
#include "planner/render.h"

namespace upipe::planner {
namespace {

struct Flags {
  std::string job_file;
  std::vector<std::string> overrides;
  std::string memory_per_rank;
  std::string format = "text";
  std::string spec_file;    // binary v1.JobSpec
  std::string output_file;  // binary v1.PlanResult
};

absl::StatusOr<v1::JobSpec> ReadSpec(const Flags& flags) {
  if (flags.spec_file.empty()) return ReadJobSpecFile(flags.job_file, flags.overrides);
  std::ifstream in(flags.spec_file, std::ios::binary);
  v1::JobSpec spec;
  if (!in || !spec.ParseFromIstream(&in)) {
    return absl::InvalidArgumentError(absl::StrCat(flags.spec_file, " does not hold a JobSpec"));
  }
  return spec;
}

absl::StatusOr<v1::RunPlan> Plan(const Flags& flags) {
  UPIPE_ASSIGN_OR_RETURN(const v1::JobSpec spec, ReadSpec(flags));
  PlanLimits limits;
  if (flags.memory_per_rank.empty()) {
    UPIPE_ASSIGN_OR_RETURN(const int64_t available, AvailableMemoryBytes());
    limits.memory_per_rank_bytes = available / std::max(1, spec.parallel().ranks());
  } else {
    UPIPE_ASSIGN_OR_RETURN(limits.memory_per_rank_bytes, ParseBytes(flags.memory_per_rank));
  }
  return MakeRunPlan(spec, limits);
}

int WriteResult(const absl::StatusOr<v1::RunPlan>& plan, const std::string& path) {
  v1::PlanResult result;
  if (plan.ok()) {
    *result.mutable_plan() = *plan;
  } else {
    result.mutable_refusal()->set_code(static_cast<int>(plan.status().code()));
    result.mutable_refusal()->set_message(std::string(plan.status().message()));
  }
  std::ofstream out(path, std::ios::binary | std::ios::trunc);
  if (!result.SerializeToOstream(&out) || !out.flush()) {
    std::cerr << "upipe-plan: cannot write " << path << "\n";
    return 1;
  }
  return 0;
}

int Main(int argc, char** argv) {
  CLI::App app{
      "Plans a training job without running it: exact bytes by category, FLOPs and traffic.\n"
      "Example: upipe plan deploy/samples/demo.yaml --memory-per-rank 2GiB"};
  Flags flags;
  auto* job = app.add_option("job", flags.job_file, "job file (YAML)");
  app.add_option("--set", flags.overrides, "override a field, path=value (repeatable)")
      ->allow_extra_args(false);
  app.add_option("--memory-per-rank", flags.memory_per_rank,
                 "bytes each rank may take, e.g. 2GiB (default: available memory / ranks)");
  app.add_option("-o", flags.format, "text or json")->check(CLI::IsMember({"text", "json"}));
  auto* spec = app.add_option("--spec", flags.spec_file, "binary JobSpec instead of a job file")
                   ->excludes(job);
  app.add_option("--output", flags.output_file, "write a binary PlanResult here, refusals included")
      ->needs(spec);
  if (const std::optional<int> over = ParseArguments(app, argc, argv)) return *over;
  if (flags.job_file.empty() && flags.spec_file.empty()) {
    std::cerr << "upipe-plan: name a job file; see upipe plan --help\n";
    return 2;
  }
  const absl::StatusOr<v1::RunPlan> plan = Plan(flags);
  if (!flags.output_file.empty()) return WriteResult(plan, flags.output_file);
  if (!plan.ok()) {
    std::cerr << "upipe-plan: " << plan.status().message() << "\n";
    return absl::IsInvalidArgument(plan.status()) ? 2 : 1;
  }
  if (flags.format == "text") {
    std::cout << RenderPlan(*plan);
    return 0;
  }
  std::string json;
  google::protobuf::util::JsonPrintOptions options;
  options.add_whitespace = true;
  options.preserve_proto_field_names = true;
  if (!google::protobuf::util::MessageToJsonString(*plan, &json, options).ok()) return 1;
  std::cout << json << "\n";
  return 0;
}

}  // namespace
}  // namespace upipe::planner

int main(int argc, char** argv) { return upipe::planner::Main(argc, argv); }
