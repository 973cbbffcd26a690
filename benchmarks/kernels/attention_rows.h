// Rows of causal attention beside the matmul rate of the same storage type.
#pragma once

#include <cstdint>

#include "benchmarks/kernels/cpu_bench.h"

namespace upipe::kernels {

// Appends attention_fwd and attention_bwd of one head and, up to 4096 tokens, of 8 heads side by
// side in each row. Causal FLOPs count: 2 * heads * head_dim * tokens^2 forward, 2.5 times that
// backward.
void AppendAttentionRows(CpuBench& bench, DType dtype, int64_t tokens, int64_t head_dim,
                         int repeats, nlohmann::ordered_json& rows);

}  // namespace upipe::kernels
