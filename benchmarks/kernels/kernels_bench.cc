// fp32 attention beside the machine's own matmul rate, one thread. A machine's rate drifts within
// seconds, so every attention call is timed between two sgemm calls of 2048^3 and only the ratio of
// rates is kept; medians and spread go to JSON. Times are processor seconds of the calling thread.
// Causal FLOPs count: 2 * heads * head_dim * tokens^2 forward, 2.5 times that backward. Exits with
// 1 when a median falls below the bound it is held to: 0.7 of sgemm forward, 0.5 backward.
#include <algorithm>
#include <cmath>
#include <ctime>
#include <fstream>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include "CLI/CLI.hpp"
#include "common/check.h"
#include "kernels/cpu/cpu_op_table.h"
#include "kernels/cpu/isa.h"
#include "kernels/host/host_parallel_for.h"
#include "nlohmann/json.hpp"

namespace upipe::kernels {
namespace {

// Runs tasks at once on the calling thread.
class InlineStream final : public Stream {
 public:
  const std::string& name() const override { return name_; }
  void Submit(Task task) override {
    ExecContext context{parallel_};
    UPIPE_CHECK_OK(task(context));
  }
  Event Record() override { return Event(); }
  void Wait(const Event&) override {}

 private:
  const std::string name_ = "bench";
  HostParallelFor parallel_{1, {}};
};

// Processor time of this thread: what other processes take does not count.
double ThreadSeconds() {
  timespec time;
  UPIPE_CHECK(clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time) == 0);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

class Bench {
 public:
  double Seconds(const OpParams& params) {
    const double start = ThreadSeconds();
    UPIPE_CHECK(ops_->WorkspaceBytes(params) == 0) << NameOf(params);
    UPIPE_CHECK_OK(ops_->Enqueue(params, {}, stream_));
    return ThreadSeconds() - start;
  }

  // GFLOP/s of one 2048^3 product.
  double MatmulRate() {
    constexpr int64_t n = 2048;
    if (matmul_.empty()) {
      matmul_.resize(3 * n * n);
      Seconds(RandomNormalParams{TensorView::Vector(matmul_.data(), DType::kFloat32, 2 * n * n), 1,
                                 1, 0, 1.0f});
    }
    MatmulParams p;
    p.a = TensorView::Matrix(matmul_.data(), DType::kFloat32, n, n);
    p.b = TensorView::Matrix(matmul_.data() + n * n, DType::kFloat32, n, n);
    p.c = TensorView::Matrix(matmul_.data() + 2 * n * n, DType::kFloat32, n, n);
    return 2e-9 * n * n * n / Seconds(p);
  }

 private:
  std::unique_ptr<OpTable> ops_ = CreateCpuOpTable(1);
  InlineStream stream_;
  std::vector<float> matmul_;
};

// One head of causal attention with its gradients.
struct Attention {
  Attention(Bench& bench, int64_t tokens, int64_t head_dim)
      : memory(8 * tokens * head_dim + 2 * tokens) {
    bench.Seconds(RandomNormalParams{
        TensorView::Vector(memory.data(), DType::kFloat32, static_cast<int64_t>(memory.size())), 2,
        1, 0, 1.0f});
    const auto tensor = [&](int64_t index) {
      return TensorView::Tensor3(memory.data() + index * tokens * head_dim, DType::kFloat32,
                                 {tokens, 1, head_dim}, head_dim, head_dim);
    };
    float* rows = memory.data() + 8 * tokens * head_dim;
    AttentionMask mask = {.document_starts = std::make_shared<const std::vector<int64_t>>(1, 0),
                          .total = tokens};
    const float scale = 1 / std::sqrt(static_cast<float>(head_dim));
    forward = {tensor(0),
               tensor(1),
               tensor(2),
               tensor(3),
               TensorView::Matrix(rows, DType::kFloat32, 1, tokens),
               {0},
               {0, tokens},
               {0, tokens},
               mask,
               scale};
    const TensorView delta = TensorView::Matrix(rows + tokens, DType::kFloat32, tokens, 1);
    backward = {forward.q, forward.k, forward.v, tensor(4),   forward.lse, delta, tensor(5),
                tensor(6), tensor(7), {0},       {0, tokens}, {0, tokens}, mask,  scale};
    bench.Seconds(forward);
    bench.Seconds(RowDotParams{backward.dout, forward.o, delta});
  }
  std::vector<float> memory;
  AttentionFwdParams forward;
  AttentionBwdParams backward;
};

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return (values[(values.size() - 1) / 2] + values[values.size() / 2]) / 2;
}

nlohmann::json Row(Bench& bench, const std::string& op, const OpParams& params, int64_t tokens,
                   int64_t head_dim, int repeats) {
  const double gflop = 2e-9 * head_dim * tokens * tokens * (op == "attention_fwd" ? 1.0 : 2.5);
  std::vector<double> rates, ratios;
  double before = bench.MatmulRate();
  for (int i = 0; i < repeats; ++i) {
    const double rate = gflop / bench.Seconds(params);
    const double after = bench.MatmulRate();
    rates.push_back(rate);
    ratios.push_back(rate / ((before + after) / 2));
    before = after;
  }
  const auto [least, most] = std::minmax_element(ratios.begin(), ratios.end());
  return {{"op", op},
          {"head_dim", head_dim},
          {"tokens", tokens},
          {"gflops_median", Median(rates)},
          {"ratio_median", Median(ratios)},
          {"ratio_min", *least},
          {"ratio_max", *most}};
}

std::string CpuModel() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (line.rfind("model name", 0) == 0) return line.substr(line.find(':') + 2);
  }
  return "unknown";
}

std::string UtcNow() {
  const std::time_t now = std::time(nullptr);
  char text[32];
  std::strftime(text, sizeof(text), "%Y-%m-%dT%H:%M:%SZ", std::gmtime(&now));
  return text;
}

struct Options {
  bool quick = false;
  std::string output;
  std::string commit = "unknown";
  std::vector<int64_t> head_dims = {64, 128};
  std::vector<int64_t> tokens = {4096, 8192, 16384, 32768};
  int repeats = 7;
};

nlohmann::json Measure(const Options& options, const std::string& command) {
  Bench bench;
  nlohmann::json report = {{"machine", CpuModel()},
                           {"commit", options.commit},
                           {"command", command},
                           {"date", UtcNow()},
                           {"isa", DispatchedIsa()},
                           {"matmul_core", MatmulCore()},
                           {"rows", nlohmann::json::array()}};
  std::vector<double> matmul;
  bench.MatmulRate();  // warms the caches and OpenBLAS's own buffers
  for (int i = 0; i < options.repeats; ++i) matmul.push_back(bench.MatmulRate());
  const auto [least, most] = std::minmax_element(matmul.begin(), matmul.end());
  const double median = Median(matmul);
  report["rows"].push_back({{"op", "sgemm"},
                            {"head_dim", nullptr},
                            {"tokens", 2048},
                            {"gflops_median", median},
                            {"ratio_median", 1.0},
                            {"ratio_min", *least / median},
                            {"ratio_max", *most / median}});
  for (const int64_t head_dim : options.head_dims) {
    for (const int64_t tokens : options.tokens) {
      Attention attention(bench, tokens, head_dim);
      // Long calls average over the drift by themselves.
      const int repeats =
          std::max(3, static_cast<int>(options.repeats * std::min(1.0, 16384.0 / tokens)));
      for (const auto& [op, params] :
           {std::pair<const char*, OpParams>{"attention_fwd", attention.forward},
            std::pair<const char*, OpParams>{"attention_bwd", attention.backward}}) {
        report["rows"].push_back(Row(bench, op, params, tokens, head_dim, repeats));
        std::cerr << report["rows"].back().dump() << "\n";
      }
    }
  }
  return report;
}

// 0 when every median is at or above its bound; says which is not.
int HeldToBounds(const nlohmann::ordered_json& report) {
  int outcome = 0;
  for (const auto& row : report["rows"]) {
    const std::string op = row["op"];
    const double bound = op == "attention_fwd" ? 0.7 : op == "attention_bwd" ? 0.5 : 0.0;
    if (row["ratio_median"].get<double>() >= bound) continue;
    std::cerr << op << " at head_dim " << row["head_dim"] << ", " << row["tokens"]
              << " tokens: " << row["ratio_median"] << " of sgemm, held to " << bound << "\n";
    outcome = 1;
  }
  return outcome;
}

int Main(int argc, char** argv) {
  Options options;
  CLI::App app("Attention of the cpu backend beside the machine's sgemm rate, one thread");
  app.add_flag("--quick", options.quick, "Up to 8192 tokens, 3 repeats: tens of seconds");
  app.add_option("--output", options.output, "JSON file; standard output when absent");
  app.add_option("--commit", options.commit, "Commit recorded in the JSON");
  app.add_option("--head-dim", options.head_dims, "Head sizes");
  app.add_option("--tokens", options.tokens, "Sequence lengths");
  app.add_option("--repeats", options.repeats, "Interleaved repeats of each row")
      ->check(CLI::Range(1, 1000));
  CLI11_PARSE(app, argc, argv);
  if (options.quick) {
    options.tokens = {4096, 8192};
    options.repeats = 3;
  }
  std::string command;
  for (int i = 0; i < argc; ++i) command += (i > 0 ? " " : "") + std::string(argv[i]);
  const auto report = Measure(options, command);
  const std::string text = report.dump(2) + "\n";
  if (options.output.empty()) {
    std::cout << text;
    return HeldToBounds(report);
  }
  std::ofstream file(options.output);
  file << text;
  file.close();
  if (!file) {
    std::cerr << "cannot write " << options.output << "\n";
    return 1;
  }
  return HeldToBounds(report);
}

}  // namespace
}  // namespace upipe::kernels

int main(int argc, char** argv) { return upipe::kernels::Main(argc, argv); }
