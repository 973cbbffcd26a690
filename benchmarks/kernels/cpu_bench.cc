#include "benchmarks/kernels/cpu_bench.h"

#include <algorithm>
#include <cstring>
#include <ctime>
#include <iostream>

#include "benchmarks/support/bench_report.h"
#include "common/check.h"
#include "kernels/cpu/cpu_op_table.h"

namespace upipe::kernels {
namespace {

constexpr int64_t kAlignment = 256;
constexpr int64_t kMatmul = 2048;

// What other processes take does not count.
double ThreadSeconds() {
  timespec time;
  UPIPE_CHECK(clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time) == 0);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

void* Aligned(std::vector<char>& bytes) {
  return bytes.data() + (kAlignment - reinterpret_cast<uintptr_t>(bytes.data()) % kAlignment);
}

}  // namespace

void CpuBench::InlineStream::Submit(Task task) {
  ExecContext context{parallel_};
  UPIPE_CHECK_OK(task(context));
}

CpuBench::CpuBench() : ops_(CreateCpuOpTable(1)) {
  for (MatmulParams* p : {&matmul_fp32_, &matmul_bf16_}) {
    const DType dtype = p == &matmul_bf16_ ? DType::kBFloat16 : DType::kFloat32;
    p->a = Random(dtype, {kMatmul, kMatmul});
    p->b = Random(dtype, {kMatmul, kMatmul});
    p->c = Random(DType::kFloat32, {kMatmul, kMatmul});
    MatmulRate(dtype);  // warms the caches and the libraries' own buffers
  }
}

double CpuBench::Seconds(const OpParams& params) {
  const int64_t bytes = ops_->WorkspaceBytes(params);
  if (static_cast<int64_t>(workspace_.size()) < bytes + kAlignment) {
    workspace_.assign(bytes + kAlignment, 0);
  }
  const double start = ThreadSeconds();
  UPIPE_CHECK_OK(ops_->Enqueue(params, {Aligned(workspace_), bytes}, stream_));
  return ThreadSeconds() - start;
}

double CpuBench::MatmulRate(DType dtype) {
  return 2e-9 * kMatmul * kMatmul * kMatmul /
         Seconds(dtype == DType::kBFloat16 ? matmul_bf16_ : matmul_fp32_);
}

double CpuBench::MemcpyRate(double bytes) {
  const auto half = static_cast<size_t>(bytes / 2);
  if (copied_.size() < 2 * half) copied_.assign(2 * half, 1);
  const double start = ThreadSeconds();
  std::memcpy(copied_.data(), copied_.data() + half, half);
  return 1e-9 * bytes / (ThreadSeconds() - start);
}

void* CpuBench::Memory(int64_t bytes) {
  memory_.emplace_back(bytes + kAlignment);
  return Aligned(memory_.back());
}

TensorView CpuBench::Random(DType dtype, std::vector<int64_t> shape, float scale) {
  int64_t elements = 1;
  for (const int64_t n : shape) elements *= n;
  const TensorView drawn = TensorView::Vector(Memory(elements * 4), DType::kFloat32, elements);
  Seconds(RandomNormalParams{drawn, seed_++, 1, 0, scale});
  TensorView view = drawn;
  if (dtype != DType::kFloat32) {
    view = TensorView::Vector(Memory(elements * SizeOf(dtype)), dtype, elements);
    Seconds(StridedCopyParams{drawn.AsTensor3(), view.AsTensor3()});
    memory_.erase(memory_.end() - 2);
  }
  view.rank = static_cast<int>(shape.size());
  int64_t stride = 1;
  for (int dim = view.rank - 1; dim >= 0; --dim) {
    view.shape[dim] = shape[dim];
    view.stride[dim] = stride;
    stride *= shape[dim];
  }
  return view;
}

nlohmann::ordered_json RatioRow(nlohmann::ordered_json head, const std::string& unit, int repeats,
                                const std::function<double()>& measure,
                                const std::function<double()>& yardstick) {
  std::vector<double> rates, ratios;
  measure();
  double before = yardstick();
  for (int i = 0; i < repeats; ++i) {
    const double rate = measure();
    const double after = yardstick();
    rates.push_back(rate);
    ratios.push_back(rate / ((before + after) / 2));
    before = after;
  }
  const auto [least, most] = std::minmax_element(ratios.begin(), ratios.end());
  head[unit + "_median"] = bench::Median(rates);
  head["ratio_median"] = bench::Median(ratios);
  head["ratio_min"] = *least;
  head["ratio_max"] = *most;
  std::cerr << head.dump() << "\n";
  return head;
}

}  // namespace upipe::kernels
