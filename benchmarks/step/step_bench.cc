// One rank's training step beside the machine's own matmul rate, measured in the same run: every
// step is timed between four products of 2048^3 before and four after, in the step's dtype and on
// the step's own threads, and only ratios are compared. HFU counts the FLOPs that are executed (the
// plan's dry run, what is recomputed included), causal MFU those of the model. Beside them the time
// of every op: what explains a figure that falls short.
#include <algorithm>
#include <iostream>
#include <map>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "benchmarks/step/timed_device.h"
#include "benchmarks/support/bench_report.h"
#include "common/status.h"
#include "common/units.h"
#include "engine/comm/inproc/inproc_communicator.h"
#include "engine/rank_context.h"
#include "engine/train/rank_run.h"
#include "engine/train/step.h"
#include "kernels/cpu/isa.h"
#include "planner/plan.h"

namespace upipe::bench {
namespace {

using nlohmann::ordered_json;

struct Options {
  std::vector<int> threads = {1, 2};
  std::vector<int64_t> contexts = {4096, 8192, 16384, 32768};
  std::vector<std::string> dtypes = {"fp32", "bf16"};
  int64_t layers = 2;
  int64_t heads_per_stage = 4;
  int repeats = 3;
  bool quick = false;
  bool processor_time = false;
  bool shapes = false;
  std::string output;
  std::string commit = "unknown";
};

// What is measured in one row.
struct Setup {
  int threads;
  int64_t context;
  std::string dtype;
};

v1::JobSpec MakeSpec(const Options& options, const Setup& setup) {
  v1::JobSpec spec;
  spec.set_name("bench-step");
  v1::ModelSpec& model = *spec.mutable_model();
  model.set_vocab_size(2048);
  model.set_hidden_size(512);
  model.set_num_layers(options.layers);
  model.set_num_heads(8);
  model.set_num_kv_heads(2);
  model.set_head_dim(64);
  model.set_intermediate_size(1408);
  spec.mutable_data()->set_path("unused");
  v1::ParallelSpec& parallel = *spec.mutable_parallel();
  parallel.set_ranks(1);
  parallel.set_method(v1::METHOD_UPIPE);
  parallel.set_heads_per_stage(options.heads_per_stage);
  parallel.set_threads_per_rank(setup.threads);
  v1::TrainSpec& train = *spec.mutable_train();
  train.set_context(setup.context);
  train.set_steps(1000);
  train.set_eval_sequences(0);
  train.set_dtype(setup.dtype == "bf16" ? v1::DTYPE_BF16 : v1::DTYPE_FP32);
  return spec;
}

// Products of 2048^3 on the rank's own device.
class MatmulRate {
 public:
  MatmulRate(kernels::Device& device, kernels::DType dtype, Clock clock)
      : device_(device), stream_(device.CreateStream("matmul")), clock_(clock) {
    constexpr int64_t bytes = kSize * kSize * sizeof(float);
    for (std::vector<char>* matrix : {&a_, &b_, &c_}) matrix->resize(bytes);
    params_.a = kernels::TensorView::Matrix(a_.data(), dtype, kSize, kSize);
    params_.b = kernels::TensorView::Matrix(b_.data(), dtype, kSize, kSize);
    params_.c = kernels::TensorView::Matrix(c_.data(), dtype, kSize, kSize);
    workspace_.resize(device.ops().WorkspaceBytes(params_));
  }

  // FLOP/s.
  absl::StatusOr<double> Measure() {
    if (!filled_) UPIPE_RETURN_IF_ERROR(Fill());
    double start = 0, end = 0;
    stream_->Submit([&](kernels::ExecContext&) {
      start = Seconds(clock_);
      return absl::OkStatus();
    });
    for (int i = 0; i < kProducts; ++i) {
      UPIPE_RETURN_IF_ERROR(device_.ops().Enqueue(
          params_, {workspace_.data(), static_cast<int64_t>(workspace_.size())}, *stream_));
    }
    stream_->Submit([&](kernels::ExecContext&) {
      end = Seconds(clock_);
      return absl::OkStatus();
    });
    UPIPE_RETURN_IF_ERROR(stream_->Synchronize());
    return 2.0 * kProducts * kSize * kSize * kSize / (end - start);
  }

 private:
  static constexpr int64_t kSize = 2048;
  static constexpr int kProducts = 4;

  // Normal numbers, by way of c: only fp32 is drawn.
  absl::Status Fill() {
    const auto numbers =
        kernels::TensorView::Matrix(c_.data(), kernels::DType::kFloat32, kSize, kSize);
    UPIPE_RETURN_IF_ERROR(device_.ops().Enqueue(
        kernels::RandomNormalParams{
            .dst = kernels::TensorView::Vector(c_.data(), numbers.dtype, kSize * kSize),
            .stddev = 1},
        {}, *stream_));
    for (const kernels::TensorView& matrix : {params_.a, params_.b}) {
      UPIPE_RETURN_IF_ERROR(device_.ops().Enqueue(
          kernels::StridedCopyParams{.src = numbers.AsTensor3(), .dst = matrix.AsTensor3()}, {},
          *stream_));
    }
    filled_ = true;
    return absl::OkStatus();
  }

  kernels::Device& device_;
  const std::unique_ptr<kernels::Stream> stream_;
  const Clock clock_;
  std::vector<char> a_, b_, c_, workspace_;
  kernels::MatmulParams params_;
  bool filled_ = false;
};

// Bytes as tokens, each followed by its neighbour as label; what they say does not matter here.
struct Sequence {
  explicit Sequence(int64_t context) : tokens(context), labels(context), positions(context) {
    uint64_t state = 1;
    for (int32_t& token : tokens) {
      state = state * 6364136223846793005u + 1442695040888963407u;
      token = static_cast<int32_t>(state >> 56);
    }
    std::rotate_copy(tokens.begin(), tokens.begin() + 1, tokens.end(), labels.begin());
    std::iota(positions.begin(), positions.end(), 0);
  }
  train::HostTokens host() const {
    return {.tokens = tokens.data(), .labels = labels.data(), .positions = positions.data()};
  }
  std::vector<int32_t> tokens, labels;
  std::vector<int64_t> positions;
};

// From here on what a first step does once is under a hundredth of it.
constexpr int64_t kLongContext = 32768;

using Times = std::map<OpKey, OpTime>;

// One measured step.
struct Sample {
  double seconds = 0;
  double matmul_rate = 0;  // FLOP/s, of the products before and after
  Times times;
};

absl::StatusOr<std::vector<Sample>> MeasureSteps(const v1::RunPlan& plan, int repeats,
                                                 Clock clock) {
  UPIPE_ASSIGN_OR_RETURN(const auto bare, train::CreateRankDevice(plan, 0));
  TimedDevice device(*bare, clock);
  const auto comms = comm::InprocGroup::Create(1, {});
  const auto streams = engine::RankStreams::Create(device, 0);
  const kernels::DType storage = model::StorageTypeOf(plan.spec().train());
  const engine::RankContext context({.device = device,
                                     .streams = streams,
                                     .comm = *comms[0],
                                     .storage = storage,
                                     .mesh = parallel::Mesh::From(plan.spec().parallel())});
  UPIPE_ASSIGN_OR_RETURN(const auto step, train::TrainStep::Create(context, plan));
  MatmulRate matmul(*bare, storage, clock);
  const Sequence sequence(plan.padded_context());
  const std::vector<train::HostTokens> host = {sequence.host()};
  const int64_t tokens = plan.spec().train().context();
  if (tokens < kLongContext) UPIPE_RETURN_IF_ERROR(step->Run(1, host).status());  // touches pages
  // Long steps average over a machine's drift by themselves.
  repeats = std::max<int64_t>(1, repeats * std::min<int64_t>(kLongContext / 4, tokens) / tokens);
  std::vector<Sample> samples;
  UPIPE_RETURN_IF_ERROR(matmul.Measure().status());
  UPIPE_ASSIGN_OR_RETURN(double before, matmul.Measure());
  for (int i = 0; i < repeats; ++i) {
    device.profile().Take();
    const double start = Seconds(Clock::kWall);
    UPIPE_RETURN_IF_ERROR(step->Run(2 + i, host).status());
    Sample sample{.seconds = Seconds(Clock::kWall) - start, .times = device.profile().Take()};
    UPIPE_ASSIGN_OR_RETURN(const double after, matmul.Measure());
    if (clock == Clock::kProcessor) {
      sample.seconds = 0;
      for (const auto& [key, time] : sample.times) sample.seconds += time.seconds;
    }
    sample.matmul_rate = (before + after) / 2;
    before = after;
    samples.push_back(std::move(sample));
  }
  return samples;
}

// "compute" of "compute0": there is one rank.
std::string StreamOf(const OpKey& key) {
  return key.stream.substr(0, key.stream.find_first_of("0123456789"));
}

ordered_json OpRow(const OpKey& key, const OpTime& time, const Sample& sample) {
  ordered_json row = {{"stream", StreamOf(key)}, {"op", key.op}};
  if (!key.shape.empty()) row["shape"] = key.shape;
  row["calls"] = time.calls;
  row["seconds"] = time.seconds;
  row["share"] = time.seconds / sample.seconds;
  row["gflops"] = 1e-9 * time.cost.flops / time.seconds;
  row["of_matmul_rate"] = time.cost.flops / time.seconds / sample.matmul_rate;
  row["gbytes_per_second"] = 1e-9 * (time.cost.bytes_read + time.cost.bytes_written) / time.seconds;
  return row;
}

// The sample's rows, longest first: one per op, or one per shape of those that have one.
ordered_json OpRows(const Sample& sample, bool by_shape) {
  Times merged;
  for (const auto& [key, time] : sample.times) {
    if (by_shape && key.shape.empty()) continue;
    merged[{key.stream, key.op, by_shape ? key.shape : ""}].Add(time);
  }
  std::vector<std::pair<OpKey, OpTime>> sorted(merged.begin(), merged.end());
  std::stable_sort(sorted.begin(), sorted.end(), [](const auto& a, const auto& b) {
    return a.second.seconds > b.second.seconds;
  });
  ordered_json rows = ordered_json::array();
  for (const auto& [key, time] : sorted) rows.push_back(OpRow(key, time, sample));
  return rows;
}

void PrintOps(const ordered_json& rows) {
  for (const ordered_json& row : rows) {
    std::cerr << absl::StrFormat(
        "    %-8s %-20s %-26s %6d calls %9.4f s %6.1f %%  %7.1f GFLOP/s (%4.2f)  %6.1f GB/s\n",
        row["stream"].get<std::string>(), row["op"].get<std::string>(),
        row.value("shape", std::string()), row["calls"].get<int64_t>(),
        row["seconds"].get<double>(), 100 * row["share"].get<double>(), row["gflops"].get<double>(),
        row["of_matmul_rate"].get<double>(), row["gbytes_per_second"].get<double>());
  }
}

absl::StatusOr<ordered_json> MeasureRow(const Options& options, const Setup& setup) {
  UPIPE_ASSIGN_OR_RETURN(const v1::RunPlan plan,
                         planner::MakeRunPlan(MakeSpec(options, setup), {.check_data = false}));
  const Clock clock = options.processor_time ? Clock::kProcessor : Clock::kWall;
  UPIPE_ASSIGN_OR_RETURN(std::vector<Sample> samples, MeasureSteps(plan, options.repeats, clock));
  const double executed = plan.ranks(0).step_flops();
  std::vector<double> seconds, rates, hfu, mfu;
  for (const Sample& sample : samples) {
    seconds.push_back(sample.seconds);
    rates.push_back(1e-9 * sample.matmul_rate);
    hfu.push_back(executed / sample.seconds / sample.matmul_rate);
    mfu.push_back(plan.model_flops() / sample.seconds / sample.matmul_rate);
  }
  std::sort(samples.begin(), samples.end(),
            [](const Sample& a, const Sample& b) { return a.seconds < b.seconds; });
  const Sample& middle = samples[(samples.size() - 1) / 2];
  double in_ops = 0;
  for (const auto& [key, time] : middle.times) {
    if (StreamOf(key) == "compute") in_ops += time.seconds;
  }
  ordered_json row = {{"threads", setup.threads},
                      {"context", setup.context},
                      {"dtype", setup.dtype},
                      {"step_seconds", Spread(seconds)},
                      {"tokens_per_second", static_cast<double>(setup.context) / Median(seconds)},
                      {"executed_tflop", 1e-12 * executed},
                      {"model_tflop", 1e-12 * plan.model_flops()},
                      {"matmul_gflops", Spread(rates)},
                      {"hfu", Spread(hfu)},
                      {"causal_mfu", Spread(mfu)},
                      {"arena_bytes", plan.ranks(0).memory().arena_bytes()},
                      {"outside_ops_share", 1 - in_ops / middle.seconds},
                      {"ops", OpRows(middle, /*by_shape=*/false)},
                      {"matmuls", OpRows(middle, /*by_shape=*/true)}};
  std::cerr << absl::StrFormat(
      "%d threads, %s tokens, %s: %.3f s a step (%.3f to %.3f), %.0f tokens/s, matmul %.1f "
      "GFLOP/s, HFU %.3f, causal MFU %.3f\n",
      setup.threads, FormatTokenCount(setup.context), setup.dtype, Median(seconds),
      row["step_seconds"]["min"].get<double>(), row["step_seconds"]["max"].get<double>(),
      row["tokens_per_second"].get<double>(), Median(rates), Median(hfu), Median(mfu));
  PrintOps(row["ops"]);
  if (options.shapes) PrintOps(row["matmuls"]);
  return row;
}

absl::Status Measure(const Options& options, ordered_json& report) {
  report["isa"] = kernels::DispatchedIsa();
  report["matmul_core"] = kernels::MatmulCore();
  report["clock"] = options.processor_time ? "processor" : "wall";
  const v1::JobSpec spec = MakeSpec(options, {1, 1, "fp32"});
  report["model"] = {{"hidden_size", spec.model().hidden_size()},
                     {"num_layers", spec.model().num_layers()},
                     {"num_heads", spec.model().num_heads()},
                     {"num_kv_heads", spec.model().num_kv_heads()},
                     {"head_dim", spec.model().head_dim()},
                     {"intermediate_size", spec.model().intermediate_size()},
                     {"vocab_size", spec.model().vocab_size()},
                     {"heads_per_stage", spec.parallel().heads_per_stage()}};
  report["rows"] = ordered_json::array();
  for (const int64_t context : options.contexts) {
    for (const int threads : options.threads) {
      for (const std::string& dtype : options.dtypes) {
        UPIPE_ASSIGN_OR_RETURN(ordered_json row, MeasureRow(options, {threads, context, dtype}));
        report["rows"].push_back(std::move(row));
      }
    }
  }
  return absl::OkStatus();
}

int Main(int argc, char** argv) {
  Options options;
  CLI::App app("One rank's training step beside the machine's own matmul rate, op by op");
  app.add_flag("--quick", options.quick, "4096 tokens, 2 repeats: tens of seconds");
  app.add_flag("--processor-time", options.processor_time,
               "Times of the stream's thread alone, for a busy machine; waiting is not counted");
  app.add_flag("--shapes", options.shapes, "Print matmuls by shape too (JSON always has them)");
  app.add_option("--output", options.output, "JSON file; standard output when absent");
  app.add_option("--commit", options.commit, "Commit recorded in the JSON");
  app.add_option("--threads", options.threads, "Threads of the rank")->check(CLI::Range(1, 64));
  app.add_option("--contexts", options.contexts, "Sequence lengths")->check(CLI::PositiveNumber);
  app.add_option("--dtypes", options.dtypes, "fp32, bf16")->check(CLI::IsMember({"fp32", "bf16"}));
  app.add_option("--layers", options.layers, "Blocks of the model")->check(CLI::Range(1, 64));
  app.add_option("--heads-per-stage", options.heads_per_stage, "U, of 8 heads")
      ->check(CLI::Range(1, 8));
  app.add_option("--repeats", options.repeats,
                 "Measured steps of each row; fewer above 8192 tokens")
      ->check(CLI::Range(1, 1000));
  CLI11_PARSE(app, argc, argv);
  if (options.quick) {
    options.contexts = {4096};
    options.repeats = 2;
  }
  ordered_json report = ReportHead(options.commit, argc, argv);
  const absl::Status status = Measure(options, report);
  if (!status.ok()) {
    std::cerr << "upipe_bench_step: " << status.message() << "\n";
    return 1;
  }
  return WriteReport(report, options.output) ? 0 : 1;
}

}  // namespace
}  // namespace upipe::bench

int main(int argc, char** argv) { return upipe::bench::Main(argc, argv); }
