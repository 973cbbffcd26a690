// How much of the network's time overlapped stages hide: steps of UPipe with overlap off and on and
// of Ulysses, each over memory and over links of a stated speed, as many ranks as cores, one thread
// each. Rounds go through all six, every other round backwards, and only times of one round are
// compared:
//   hidden = 1 - (on over links - on over memory) / (off over links - off over memory)
// A loss that differs between memory and links is an error: the links may not change a bit.
#include <algorithm>
#include <cmath>
#include <iostream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/strings/str_format.h"
#include "benchmarks/support/bench_report.h"
#include "benchmarks/support/delayed_transport.h"
#include "benchmarks/support/rank_gang.h"
#include "common/status.h"
#include "engine/comm/inproc/inproc_communicator.h"
#include "planner/plan.h"

namespace upipe::bench {
namespace {

using nlohmann::ordered_json;

struct Options {
  int ranks = std::clamp(static_cast<int>(std::thread::hardware_concurrency()), 2, 8);
  int64_t context = 4096;
  int64_t layers = 2;
  int64_t heads_per_rank = 1;
  std::string dtype = "fp32";
  int repeats = 5;
  double mib_per_second = 0;  // 0: chosen so that the links take `delay_share` of a step
  double delay_share = 0.33;  // of the step of UPipe without overlap
  int64_t latency_microseconds = 50;
  bool quick = false;
  std::string output;
  std::string commit = "unknown";
};

// Three programs, in the order of their rows; each runs over memory and over links.
enum Program { kUpipe, kUpipeOverlap, kUlysses, kNumPrograms };
constexpr const char* kNames[kNumPrograms] = {"upipe", "upipe, overlap", "ulysses"};

// 32 heads over 8 K/V heads, and little else: what travels is the attention's. The first stage's
// inputs and the last one's results have no attention beside them, so stages must be many.
constexpr int64_t kNumHeads = 32;

v1::JobSpec MakeSpec(const Options& options, Program program) {
  v1::JobSpec spec;
  spec.set_name("bench-overlap");
  v1::ModelSpec& model = *spec.mutable_model();
  model.set_vocab_size(2048);
  model.set_hidden_size(256);
  model.set_num_layers(options.layers);
  model.set_num_heads(kNumHeads);
  model.set_num_kv_heads(8);
  model.set_head_dim(64);
  model.set_intermediate_size(704);
  spec.mutable_data()->set_path("unused");
  v1::ParallelSpec& parallel = *spec.mutable_parallel();
  parallel.set_ranks(options.ranks);
  parallel.set_method(program == kUlysses ? v1::METHOD_ULYSSES : v1::METHOD_UPIPE);
  if (program != kUlysses) parallel.set_heads_per_stage(options.heads_per_rank * options.ranks);
  spec.mutable_memory()->set_overlap(program == kUpipeOverlap);
  v1::TrainSpec& train = *spec.mutable_train();
  train.set_context(options.context);
  train.set_steps(1000);
  train.set_eval_sequences(0);
  train.set_dtype(options.dtype == "bf16" ? v1::DTYPE_BF16 : v1::DTYPE_FP32);
  return spec;
}

int64_t BytesSent(const v1::RunPlan& plan) {
  int64_t most = 0;
  for (const v1::RankPlan& rank : plan.ranks()) {
    int64_t sent = 0;
    for (int64_t bytes : rank.bytes_sent_to_peer()) sent += bytes;
    most = std::max(most, sent);
  }
  return most;
}

// Two digits, so that it can be said.
double Rounded(double value) {
  const double unit = std::pow(10, std::floor(std::log10(value)) - 1);
  return std::round(value / unit) * unit;
}

class Measurement {
 public:
  explicit Measurement(const Options& options) : options_(options) {}

  absl::Status Run() {
    for (int p = 0; p < kNumPrograms; ++p) {
      UPIPE_ASSIGN_OR_RETURN(
          plans_[p],
          planner::MakeRunPlan(MakeSpec(options_, static_cast<Program>(p)), {.check_data = false}));
      UPIPE_ASSIGN_OR_RETURN(gangs_[p][0],
                             RankGang::Create(plans_[p], comm::InprocGroup::Create(
                                                             options_.ranks, comm::CommOptions())));
      UPIPE_RETURN_IF_ERROR(gangs_[p][0]->Step().status());  // touches pages
    }
    UPIPE_RETURN_IF_ERROR(ChooseSpeed());
    for (int p = 0; p < kNumPrograms; ++p) {
      UPIPE_ASSIGN_OR_RETURN(gangs_[p][1],
                             RankGang::Create(plans_[p], CreateDelayedGroup(options_.ranks, speed_,
                                                                            comm::CommOptions())));
      UPIPE_RETURN_IF_ERROR(gangs_[p][1]->Step().status());
    }
    // Both gangs of a program have taken as many steps, so that their losses must be equal.
    UPIPE_RETURN_IF_ERROR(gangs_[kUpipe][1]->Step().status());
    for (int round = 0; round < options_.repeats; ++round) UPIPE_RETURN_IF_ERROR(Round(round));
    return absl::OkStatus();
  }

  ordered_json Report() const {
    ordered_json rows = ordered_json::array();
    for (int p = 0; p < kNumPrograms; ++p) {
      const v1::RankPlan& rank = plans_[p].ranks(0);
      rows.push_back({{"program", kNames[p]},
                      {"stages", plans_[p].schedule().stages_size()},
                      {"seconds_over_memory", Spread(seconds_[p][0])},
                      {"seconds_over_links", Spread(seconds_[p][1])},
                      {"cpu_seconds_over_memory", Spread(cpu_seconds_[p][0])},
                      {"cpu_seconds_over_links", Spread(cpu_seconds_[p][1])},
                      {"bytes_sent_per_rank", BytesSent(plans_[p])},
                      {"attention_peak_bytes", rank.memory().attention_peak_bytes()},
                      {"arena_bytes", rank.memory().arena_bytes()}});
    }
    std::vector<double> exposed, hidden, of_ulysses;
    for (int i = 0; i < options_.repeats; ++i) {
      const double delay = seconds_[kUpipe][1][i] - seconds_[kUpipe][0][i];
      const double left = seconds_[kUpipeOverlap][1][i] - seconds_[kUpipeOverlap][0][i];
      exposed.push_back(delay / seconds_[kUpipe][1][i]);
      hidden.push_back(1 - left / delay);
      of_ulysses.push_back(seconds_[kUpipeOverlap][1][i] / seconds_[kUlysses][1][i]);
    }
    return {{"link_mib_per_second", speed_.bytes_per_second / (1 << 20)},
            {"link_latency_microseconds", options_.latency_microseconds},
            {"rows", std::move(rows)},
            {"exposed_share_without_overlap", Spread(exposed)},
            {"hidden_share", Spread(hidden)},
            {"overlap_of_ulysses_time", Spread(of_ulysses)}};
  }

 private:
  absl::Status ChooseSpeed() {
    UPIPE_ASSIGN_OR_RETURN(const GangStep step, gangs_[kUpipe][0]->Step());
    const double link_seconds =
        step.wall_seconds * options_.delay_share / (1 - options_.delay_share);
    const double mib = options_.mib_per_second > 0
                           ? options_.mib_per_second
                           : Rounded(BytesSent(plans_[kUpipe]) / link_seconds / (1 << 20));
    speed_ = {.bytes_per_second = mib * (1 << 20),
              .latency = absl::Microseconds(options_.latency_microseconds)};
    return absl::OkStatus();
  }

  absl::Status Round(int round) {
    double losses[kNumPrograms][2];
    for (int i = 0; i < 2 * kNumPrograms; ++i) {
      const int at = round % 2 == 0 ? i : 2 * kNumPrograms - 1 - i;
      const int program = at / 2, links = at % 2;
      UPIPE_ASSIGN_OR_RETURN(const GangStep step, gangs_[program][links]->Step());
      seconds_[program][links].push_back(step.wall_seconds);
      cpu_seconds_[program][links].push_back(step.cpu_seconds);
      losses[program][links] = step.loss;
      std::cerr << absl::StrFormat("round %d: %-14s over %-6s %.3f s\n", round + 1, kNames[program],
                                   links ? "links" : "memory", step.wall_seconds);
    }
    for (int p = 0; p < kNumPrograms; ++p) {
      if (losses[p][0] == losses[p][1]) continue;
      return absl::InternalError(absl::StrFormat("%s: loss %.17g over memory and %.17g over links",
                                                 kNames[p], losses[p][0], losses[p][1]));
    }
    return absl::OkStatus();
  }

  const Options& options_;
  v1::RunPlan plans_[kNumPrograms];
  LinkSpeed speed_;
  std::unique_ptr<RankGang> gangs_[kNumPrograms][2];  // over memory, over links
  std::vector<double> seconds_[kNumPrograms][2];      // [rounds]
  std::vector<double> cpu_seconds_[kNumPrograms][2];  // of all ranks
};

void Print(const ordered_json& report) {
  const auto median = [](const ordered_json& spread) { return spread["median"].get<double>(); };
  std::cerr << absl::StrFormat("links of %.3g MiB/s\n",
                               report["link_mib_per_second"].get<double>());
  for (const ordered_json& row : report["rows"]) {
    std::cerr << absl::StrFormat(
        "%-14s %.3f s over memory, %.3f s over links\n", row["program"].get<std::string>(),
        median(row["seconds_over_memory"]), median(row["seconds_over_links"]));
  }
  std::cerr << absl::StrFormat(
      "the links take %.0f %% of a step without overlap; overlap hides %.0f %% of that (%.0f to "
      "%.0f); its step takes %.2f of Ulysses's time\n",
      100 * median(report["exposed_share_without_overlap"]), 100 * median(report["hidden_share"]),
      100 * report["hidden_share"]["min"].get<double>(),
      100 * report["hidden_share"]["max"].get<double>(), median(report["overlap_of_ulysses_time"]));
}

int Main(int argc, char** argv) {
  Options options;
  CLI::App app("How much of the network's time UPipe with overlapped stages hides");
  app.add_flag("--quick", options.quick, "1024 tokens, 2 rounds: seconds");
  app.add_option("--output", options.output, "JSON file; standard output when absent");
  app.add_option("--commit", options.commit, "Commit recorded in the JSON");
  app.add_option("--ranks", options.ranks, "Ranks; when absent, as many as cores, of 2 to 8")
      ->check(CLI::Range(2, 8));
  app.add_option("--context", options.context, "Tokens of a sequence")->check(CLI::PositiveNumber);
  app.add_option("--layers", options.layers, "Blocks of the model")->check(CLI::Range(1, 64));
  app.add_option("--heads-per-rank", options.heads_per_rank,
                 "u of UPipe, of 32 heads over all ranks")
      ->check(CLI::Range(int64_t{1}, kNumHeads));
  app.add_option("--dtype", options.dtype, "fp32 or bf16")->check(CLI::IsMember({"fp32", "bf16"}));
  app.add_option("--repeats", options.repeats, "Rounds")->check(CLI::Range(1, 1000));
  app.add_option("--mib-per-second", options.mib_per_second,
                 "Speed of the links; when absent, so that they take --delay-share of a step")
      ->check(CLI::PositiveNumber);
  app.add_option("--delay-share", options.delay_share, "Of UPipe's step without overlap")
      ->check(CLI::Range(0.01, 0.9));
  app.add_option("--latency-microseconds", options.latency_microseconds, "Of the links")
      ->check(CLI::Range(0, 1000000));
  CLI11_PARSE(app, argc, argv);
  if (options.quick) {
    options.context = 1024;
    options.repeats = 2;
  }
  ordered_json report = ReportHead(options.commit, argc, argv);
  report["ranks"] = options.ranks;
  report["context"] = options.context;
  report["layers"] = options.layers;
  report["dtype"] = options.dtype;
  Measurement measurement(options);
  if (const absl::Status status = measurement.Run(); !status.ok()) {
    std::cerr << "upipe_bench_overlap: " << status.message() << "\n";
    return 1;
  }
  report.update(measurement.Report());
  Print(report);
  return WriteReport(report, options.output) ? 0 : 1;
}

}  // namespace
}  // namespace upipe::bench

int main(int argc, char** argv) { return upipe::bench::Main(argc, argv); }
