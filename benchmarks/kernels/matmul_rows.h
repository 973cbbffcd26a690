// Rows of matrix products: bf16, native and converted, beside fp32 of the same moment.
#pragma once

#include "benchmarks/kernels/cpu_bench.h"

namespace upipe::kernels {

void AppendMatmulRows(CpuBench& bench, int repeats, nlohmann::ordered_json& rows);

}  // namespace upipe::kernels
