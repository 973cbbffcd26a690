// Times single ops of the cpu backend on the calling thread, beside yardsticks of the same moment:
// the machine's matmul rate and its memcpy. A machine's rate drifts within seconds, so what is
// compared is interleaved and only ratios are kept. Times are processor seconds of this thread.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "kernels/api/op_table.h"
#include "kernels/host/host_parallel_for.h"
#include "nlohmann/json.hpp"

namespace upipe::kernels {

class CpuBench {
 public:
  CpuBench();

  // Processor seconds of one call.
  double Seconds(const OpParams& params);
  // GFLOP/s of one 2048^3 product of operands of `dtype` into fp32.
  double MatmulRate(DType dtype);
  // Bytes per nanosecond of one memcpy that reads and writes `bytes` in all.
  double MemcpyRate(double bytes);

  // Normal random numbers, times `scale`; they live as long as the bench.
  TensorView Random(DType dtype, std::vector<int64_t> shape, float scale = 1);

 private:
  // Runs tasks at once.
  class InlineStream final : public Stream {
   public:
    const std::string& name() const override { return name_; }
    void Submit(Task task) override;
    Event Record() override { return Event(); }
    void Wait(const Event&) override {}

   private:
    const std::string name_ = "bench";
    HostParallelFor parallel_{1, {}};
  };

  void* Memory(int64_t bytes);

  std::unique_ptr<OpTable> ops_;
  InlineStream stream_;
  std::deque<std::vector<char>> memory_;
  std::vector<char> workspace_, copied_;
  MatmulParams matmul_fp32_, matmul_bf16_;
  uint64_t seed_ = 1;
};

// One row of a report: rates of `measure` and their ratios to `yardstick`, interleaved `repeats`
// times. `unit` names the rate.
nlohmann::ordered_json RatioRow(nlohmann::ordered_json head, const std::string& unit, int repeats,
                                const std::function<double()>& measure,
                                const std::function<double()>& yardstick);

}  // namespace upipe::kernels
