// Rows of ops bound by memory, beside a memcpy that moves as many bytes.
#pragma once

#include "benchmarks/kernels/cpu_bench.h"

namespace upipe::kernels {

void AppendElementwiseRows(CpuBench& bench, DType dtype, int repeats, nlohmann::ordered_json& rows);

}  // namespace upipe::kernels
