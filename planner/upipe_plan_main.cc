// upipe-plan: a job's plan or the one sentence that refuses it; without a job file, the plan of a
// model on devices nobody has here. The coordinator runs it as a child with binary messages, so
// that no job's content can bring the coordinator down.
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <fstream>
#include <iostream>
#include <optional>
#include <thread>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "common/machine.h"
#include "common/parse_arguments.h"
#include "common/spec/job_spec.h"
#include "common/spec/yaml_spec.h"
#include "common/status.h"
#include "common/units.h"
#include "google/protobuf/util/json_util.h"
#include "planner/device_file.h"
#include "planner/explore.h"
#include "planner/moment_seconds.h"
#include "planner/plan.h"
#include "planner/plan_svg.h"
#include "planner/plan_trace.h"
#include "planner/pricing.h"
#include "planner/released_model.h"
#include "planner/render.h"
#include "planner/sweep_svg.h"
#include "planner/timeline.h"

namespace upipe::planner {
namespace {

struct Flags {
  std::string job_file;
  std::vector<std::string> overrides;
  std::string model, context, dtype, method, device, device_folder;
  int ranks = 0;
  int64_t heads_per_stage = 0;
  int ring_ranks = 0;
  std::string memory_per_rank, host_memory;
  bool without_data = false;
  bool max_context = false, min_ranks = false;
  std::string sweep, released;
  bool explain = false;
  std::string plot_file, trace_file;
  std::string format = "text";
  std::string spec_file;     // binary v1.JobSpec
  std::string output_file;   // binary v1.PlanResult
  std::string earlier_file;  // binary v1.RunPlan
};

// A job of what is left out: everything else is the planner's.
constexpr char kModelJob[] = R"(name: plan
model: {}
data: {path: none}
parallel: {method: auto, backend: cuda}
memory: {policy: auto}
train: {steps: 1, eval_sequences: 0, dtype: bf16}
)";

// The flags that stand for fields of the job, as `--set` would say it.
std::vector<std::string> OverridesOf(const Flags& flags) {
  std::vector<std::string> overrides = flags.overrides;
  const auto set = [&](const char* field, const std::string& value) {
    if (!value.empty()) overrides.push_back(absl::StrCat(field, "=", value));
  };
  const auto number = [](int64_t value) { return value == 0 ? "" : absl::StrCat(value); };
  if (!flags.model.empty()) set("model.preset", flags.model);
  set("train.context", flags.context);
  set("train.dtype", flags.dtype);
  set("parallel.ranks", number(flags.ranks));
  if (!flags.method.empty()) {
    set("parallel.method", flags.method);
    overrides.push_back("parallel.heads_per_stage=");
    overrides.push_back("parallel.ring_ranks=");
    if (flags.method == "upipe") set("parallel.heads_per_stage", "auto");
    if (flags.method == "upipe" || flags.method == "usp") set("parallel.ring_ranks", "auto");
  }
  set("parallel.heads_per_stage", number(flags.heads_per_stage));
  set("parallel.ring_ranks", number(flags.ring_ranks));
  if (!absl::StrContains(flags.device, '/')) set("parallel.device", flags.device);
  return overrides;
}

struct ContextRange {
  int64_t first = 0;
  int64_t last = 0;
};

// "context=128K..8M".
absl::StatusOr<ContextRange> ParseSweep(const std::string& given) {
  absl::string_view text = given;
  const auto wrong = [&](absl::string_view why) {
    return absl::InvalidArgumentError(
        absl::StrCat("--sweep ", given, " ", why, "; write for example context=128K..8M"));
  };
  if (!absl::ConsumePrefix(&text, "context=")) return wrong("does not name what is swept");
  const std::vector<absl::string_view> ends = absl::StrSplit(text, "..");
  if (ends.size() != 2) return wrong("is no range");
  ContextRange range;
  UPIPE_ASSIGN_OR_RETURN(range.first, ParseTokenCount(ends[0]));
  UPIPE_ASSIGN_OR_RETURN(range.last, ParseTokenCount(ends[1]));
  if (range.first < 1 || range.last < range.first) return wrong("does not ascend from 1");
  return range;
}

absl::StatusOr<v1::JobSpec> ReadSpec(const Flags& flags) {
  if (!flags.spec_file.empty()) {
    std::ifstream in(flags.spec_file, std::ios::binary);
    v1::JobSpec spec;
    if (!in || !spec.ParseFromIstream(&in)) {
      return absl::InvalidArgumentError(absl::StrCat(flags.spec_file, " does not hold a JobSpec"));
    }
    return spec;
  }
  if (!flags.job_file.empty()) return ReadJobSpecFile(flags.job_file, OverridesOf(flags));
  Flags given = flags;
  if (!flags.sweep.empty()) {
    UPIPE_ASSIGN_OR_RETURN(const ContextRange range, ParseSweep(flags.sweep));
    given.context = absl::StrCat(range.first);
  }
  // What is asked for cannot be given.
  if (flags.max_context && flags.context.empty()) given.context = "128K";
  if (flags.min_ranks && flags.ranks == 0) given.ranks = 1;
  return ParseJobSpecYaml(kModelJob, "flags", OverridesOf(given));
}

// A description given as a file, nothing where it has a name.
absl::StatusOr<std::optional<v1::DeviceFile>> ReadDevice(const Flags& flags) {
  if (!absl::StrContains(flags.device, '/')) return std::nullopt;
  UPIPE_ASSIGN_OR_RETURN(v1::DeviceFile device, ReadDeviceFile(flags.device));
  return device;
}

void ShowProgress(const std::string& line) {
  if (isatty(STDERR_FILENO) != 0) std::cerr << "upipe-plan: " << line << std::endl;
}

absl::StatusOr<PlanLimits> LimitsOf(const Flags& flags, const v1::JobSpec& spec) {
  PlanLimits limits;
  const bool cuda = spec.parallel().backend() == "cuda";
  if (flags.min_ranks && !cuda && flags.memory_per_rank.empty()) {
    return absl::InvalidArgumentError(
        "--min-gpus needs --memory-per-rank on a backend that is not cuda: ranks there share one "
        "memory, so more of them have less each");
  }
  if (!flags.memory_per_rank.empty()) {
    UPIPE_ASSIGN_OR_RETURN(limits.memory_per_rank_bytes, ParseBytes(flags.memory_per_rank));
  } else if (!cuda) {
    UPIPE_ASSIGN_OR_RETURN(const int64_t available, AvailableMemoryBytes());
    limits.memory_per_rank_bytes = available / std::max(1, spec.parallel().ranks());
  }
  if (!flags.host_memory.empty()) {
    UPIPE_ASSIGN_OR_RETURN(limits.host_memory_bytes, ParseBytes(flags.host_memory));
  }
  // People may ask about what they do not have, and a coordinator plans for its workers.
  limits.must_run = false;
  limits.check_data = !flags.without_data && (!flags.job_file.empty() || !flags.spec_file.empty());
  limits.device_folder = flags.device_folder;
  limits.num_threads = static_cast<int>(std::thread::hardware_concurrency());
  limits.progress = ShowProgress;
  return limits;
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

absl::Status WriteText(const std::string& path, const std::string& text) {
  std::ofstream out(path, std::ios::trunc);
  if ((out << text).flush()) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat("cannot write ", path));
}

absl::StatusOr<std::string> JsonOf(const google::protobuf::Message& message) {
  std::string json;
  google::protobuf::util::JsonPrintOptions options;
  options.add_whitespace = true;
  options.preserve_proto_field_names = true;
  const auto status = google::protobuf::util::MessageToJsonString(message, &json, options);
  if (!status.ok()) return absl::InternalError(status.ToString());
  return json;
}

absl::Status Released(const Flags& flags) {
  UPIPE_ASSIGN_OR_RETURN(const v1::JobSpec given, ReadSpec(flags));
  const v1::JobSpec spec = WithDefaults(given);
  UPIPE_ASSIGN_OR_RETURN(const auto from_file, ReadDevice(flags));
  ReleasedSetup setup;
  setup.code = flags.released == "upipe" ? ReleasedCode::kUpipe : ReleasedCode::kUlysses;
  setup.model = spec.model();
  setup.context = spec.train().context();
  setup.ring_ranks = std::max(1, flags.ring_ranks);
  setup.ulysses_ranks = spec.parallel().ranks() / setup.ring_ranks;
  if (from_file.has_value()) {
    setup.device = *from_file;
  } else {
    UPIPE_ASSIGN_OR_RETURN(setup.device, FindDevice(spec.parallel().device(), flags.device_folder));
  }
  if (!flags.memory_per_rank.empty()) {
    UPIPE_ASSIGN_OR_RETURN(const int64_t bytes, ParseBytes(flags.memory_per_rank));
    setup.device.mutable_memory()->set_bytes(bytes);
  }
  UPIPE_ASSIGN_OR_RETURN(const ReleasedMemory memory, ReleasedMemoryOf(setup));
  std::cout << RenderReleased(setup, memory);
  return absl::OkStatus();
}

std::string SweepPicture(const std::vector<SweepPlan>& plans, const v1::JobSpec& spec) {
  std::vector<SweepPoint> points;
  SweepLimits limits;
  for (const SweepPlan& swept : plans) {
    if (!swept.refusal.empty()) continue;
    SweepPoint& point = points.emplace_back();
    const Taken taken = TakenOf(swept.plan);
    point.label = "plan";
    point.context = swept.context;
    point.device_bytes = taken.device_bytes;
    point.host_bytes = taken.host_bytes;
    point.tokens_per_second_per_rank = swept.plan.step_time().tokens_per_second_per_rank();
    limits = {.device_bytes = swept.plan.budget().device_bytes(),
              .host_bytes = swept.plan.budget().host_bytes()};
  }
  const v1::ModelSpec& model = spec.model();
  return SweepSvg(points,
                  {.title = absl::StrCat(model.preset().empty() ? spec.name() : model.preset(),
                                         " on ", spec.parallel().ranks(), " ranks"),
                   .subtitle = "the fastest plan that fits at each context"},
                  limits);
}

absl::Status SweepContextsOf(const Flags& flags, const v1::JobSpec& spec,
                             const PlanLimits& limits) {
  UPIPE_ASSIGN_OR_RETURN(const ContextRange range, ParseSweep(flags.sweep));
  UPIPE_ASSIGN_OR_RETURN(const std::vector<SweepPlan> plans,
                         Sweep(spec, SweepContexts(range.first, range.last), limits, ShowProgress));
  const bool any = std::any_of(plans.begin(), plans.end(),
                               [](const SweepPlan& plan) { return plan.refusal.empty(); });
  if (!flags.plot_file.empty() && any) {
    UPIPE_RETURN_IF_ERROR(WriteText(flags.plot_file, SweepPicture(plans, spec)));
  }
  if (flags.format == "text") {
    std::cout << RenderSweep(plans);
    return absl::OkStatus();
  }
  std::string separator = "[";
  for (const SweepPlan& swept : plans) {
    v1::PlanResult result;
    if (swept.refusal.empty()) {
      *result.mutable_plan() = swept.plan;
    } else {
      result.mutable_refusal()->set_message(swept.refusal);
    }
    UPIPE_ASSIGN_OR_RETURN(const std::string json, JsonOf(result));
    std::cout << separator << json;
    separator = ",";
  }
  std::cout << "]\n";
  return absl::OkStatus();
}

// The plan, as text or JSON, and its pictures.
absl::Status Show(const Flags& flags, const PlanLimits& limits, const v1::RunPlan& plan) {
  UPIPE_ASSIGN_OR_RETURN(const Pricing pricing, Pricing::For(plan.spec(), limits));
  if (!flags.plot_file.empty() || !flags.trace_file.empty()) {
    const auto fullest = std::max_element(
        plan.ranks().begin(), plan.ranks().end(), [](const auto& a, const auto& b) {
          return a.memory().arena_bytes() < b.memory().arena_bytes();
        });
    UPIPE_ASSIGN_OR_RETURN(const Timeline timeline,
                           RecordTimeline(plan, fullest->rank(),
                                          {.price = PriceBy(plan, pricing.device()),
                                           .attention_kernel = pricing.attention_kernel()}));
    if (!flags.plot_file.empty())
      UPIPE_RETURN_IF_ERROR(WriteText(flags.plot_file, PlanSvg(timeline, plan)));
    if (!flags.trace_file.empty())
      UPIPE_RETURN_IF_ERROR(WriteText(flags.trace_file, PlanTrace(timeline, plan)));
  }
  if (flags.format == "json") {
    UPIPE_ASSIGN_OR_RETURN(const std::string json, JsonOf(plan));
    std::cout << json << "\n";
    return absl::OkStatus();
  }
  std::cout << RenderPlan(plan);
  if (flags.explain) std::cout << ExplainPlan(plan, pricing.device());
  return absl::OkStatus();
}

absl::Status PlanForPeople(const Flags& flags) {
  if (!flags.released.empty()) return Released(flags);
  UPIPE_ASSIGN_OR_RETURN(v1::JobSpec spec, ReadSpec(flags));
  UPIPE_ASSIGN_OR_RETURN(PlanLimits limits, LimitsOf(flags, spec));
  UPIPE_ASSIGN_OR_RETURN(const auto device, ReadDevice(flags));
  if (device.has_value()) limits.device = &*device;
  if (!flags.sweep.empty()) return SweepContextsOf(flags, spec, limits);
  if (flags.max_context) {
    UPIPE_ASSIGN_OR_RETURN(const v1::RunPlan plan, PlanLongestContext(spec, limits, ShowProgress));
    return Show(flags, limits, plan);
  }
  if (flags.min_ranks) {
    UPIPE_ASSIGN_OR_RETURN(spec, WithFewestRanks(spec, limits, ShowProgress));
  }
  UPIPE_ASSIGN_OR_RETURN(const v1::RunPlan plan, MakeRunPlan(spec, limits));
  return Show(flags, limits, plan);
}

// Once more, after a plan that fell short of what was measured: the same point of the space where
// it still fits, so that bits and checkpoints go on; else, where something was auto, another.
absl::StatusOr<v1::RunPlan> PlanOnceMore(const v1::JobSpec& spec, const v1::RunPlan& earlier,
                                         PlanLimits limits) {
  limits.measured = earlier.measured();
  limits.advise = !HasAuto(spec);
  absl::StatusOr<v1::RunPlan> same = MakeRunPlan(earlier.spec(), limits);
  if (!absl::IsResourceExhausted(same.status()) || !HasAuto(spec)) return same;
  limits.advise = true;
  return MakeRunPlan(spec, limits);
}

int PlanForCoordinator(const Flags& flags) {
  const auto plan = [&]() -> absl::StatusOr<v1::RunPlan> {
    UPIPE_ASSIGN_OR_RETURN(const v1::JobSpec spec, ReadSpec(flags));
    UPIPE_ASSIGN_OR_RETURN(const PlanLimits limits, LimitsOf(flags, spec));
    if (flags.earlier_file.empty()) return MakeRunPlan(spec, limits);
    std::ifstream in(flags.earlier_file, std::ios::binary);
    v1::RunPlan earlier;
    if (!in || !earlier.ParseFromIstream(&in)) {
      return absl::InvalidArgumentError(
          absl::StrCat(flags.earlier_file, " does not hold a RunPlan"));
    }
    return PlanOnceMore(spec, earlier, limits);
  };
  return WriteResult(plan(), flags.output_file);
}

void AddOptions(CLI::App& app, Flags& flags) {
  auto* job = app.add_option("job", flags.job_file, "job file (YAML)");
  app.add_option("--set", flags.overrides, "override a field, path=value (repeatable)")
      ->allow_extra_args(false);
  app.add_option("--model", flags.model, "plan this model (upipe presets), with or without a job");
  app.add_option("--context", flags.context, "tokens of a sequence: 128K, 5M");
  app.add_option("--ranks,--gpus", flags.ranks, "devices, one rank each")
      ->check(CLI::Range(1, 1024));
  app.add_option("--method", flags.method, "upipe, ulysses, ring, usp, fpdt or auto");
  app.add_option("--heads-per-stage", flags.heads_per_stage, "U, of method upipe");
  app.add_option("--ring-ranks", flags.ring_ranks, "R, of upipe and usp");
  app.add_option("--dtype", flags.dtype, "fp32 or bf16");
  app.add_option("--device", flags.device,
                 "device description: a name (h100-80gb, h200, cpu) or a file with a '/' in it");
  app.add_option("--device-files", flags.device_folder, "folder of more descriptions, NAME.yaml");
  app.add_option("--device-memory,--memory-per-rank", flags.memory_per_rank,
                 "bytes each rank may take, e.g. 80GiB (default: the device's; on cpu available "
                 "memory / ranks)");
  app.add_option("--host-memory", flags.host_memory,
                 "bytes of host memory per node (default: the device description's)");
  app.add_flag("--without-data", flags.without_data, "do not look for the job's data");
  auto* longest = app.add_flag("--max-context", flags.max_context, "the longest context that fits");
  auto* fewest = app.add_flag("--min-gpus,--min-ranks", flags.min_ranks,
                              "the fewest devices that fit the context");
  auto* sweep = app.add_option("--sweep", flags.sweep, "plan a range: context=128K..8M");
  auto* released = app.add_option("--released", flags.released,
                                  "memory of the released code instead: upipe or ulysses")
                       ->check(CLI::IsMember({"upipe", "ulysses"}));
  longest->excludes(sweep)->excludes(released);
  fewest->excludes(longest)->excludes(sweep)->excludes(released);
  released->excludes(sweep);
  app.add_flag("--explain", flags.explain, "every rank, the policy, the device's numbers");
  app.add_option("--plot", flags.plot_file, "write memory over one step, or the sweep, as SVG");
  app.add_option("--trace", flags.trace_file, "write the step as a trace for Perfetto");
  app.add_option("-o", flags.format, "text or json")->check(CLI::IsMember({"text", "json"}));
  auto* spec = app.add_option("--spec", flags.spec_file, "binary JobSpec instead of a job file")
                   ->excludes(job);
  app.add_option("--earlier", flags.earlier_file,
                 "binary RunPlan that fell short of what was measured, which it holds: plan once "
                 "more")
      ->needs(spec);
  app.add_option("--output", flags.output_file, "write a binary PlanResult here, refusals included")
      ->needs(spec);
}

int Main(int argc, char** argv) {
  CLI::App app{
      "Plans a training job without running it: does it fit, how long a step takes, what to "
      "change.\n"
      "Examples:\n"
      "  upipe plan deploy/samples/demo.yaml --memory-per-rank 2GiB\n"
      "  upipe plan --model llama3-8b --gpus 8 --device-memory 80GiB --host-memory 2TiB --context "
      "5M\n"
      "  upipe plan --model llama3-8b --gpus 8 --max-context\n"
      "  upipe plan --model llama3-8b --gpus 8 --sweep context=128K..8M --plot sweep.svg"};
  Flags flags;
  AddOptions(app, flags);
  if (const std::optional<int> over = ParseArguments(app, argc, argv)) return *over;
  if (flags.job_file.empty() && flags.spec_file.empty() && flags.model.empty()) {
    std::cerr << "upipe-plan: name a job file or --model; see upipe plan --help\n";
    return 2;
  }
  if (!flags.output_file.empty()) return PlanForCoordinator(flags);
  const absl::Status status = PlanForPeople(flags);
  if (status.ok()) return 0;
  std::cerr << "upipe-plan: " << status.message() << "\n";
  return absl::IsInvalidArgument(status) || absl::IsNotFound(status) ? 2 : 1;
}

}  // namespace
}  // namespace upipe::planner

int main(int argc, char** argv) { return upipe::planner::Main(argc, argv); }
