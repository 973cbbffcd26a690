#include "benchmarks/kernels/attention_rows.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

namespace upipe::kernels {
namespace {

// Causal attention of heads that lie side by side in each token's row, with its gradients.
struct Attention {
  Attention(CpuBench& bench, DType dtype, int64_t tokens, int64_t heads, int64_t head_dim) {
    const auto tensor = [&](DType type) { return bench.Random(type, {tokens, heads, head_dim}); };
    const AttentionMask mask = {
        .document_starts = std::make_shared<const std::vector<int64_t>>(1, 0), .total = tokens};
    forward = {.q = tensor(dtype),
               .k = tensor(dtype),
               .v = tensor(dtype),
               .o = tensor(dtype),
               .lse = bench.Random(DType::kFloat32, {heads, tokens}),
               .kv_slot = std::vector<int32_t>(heads),
               .queries = {0, tokens},
               .keys = {0, tokens},
               .mask = mask,
               .scale = 1 / std::sqrt(static_cast<float>(head_dim))};
    std::iota(forward.kv_slot.begin(), forward.kv_slot.end(), 0);
    backward = {.q = forward.q,
                .k = forward.k,
                .v = forward.v,
                .dout = tensor(dtype),
                .lse = forward.lse,
                .delta = bench.Random(DType::kFloat32, {tokens, heads}),
                .dq = tensor(DType::kFloat32),
                .dk = tensor(DType::kFloat32),
                .dv = tensor(DType::kFloat32),
                .kv_slot = forward.kv_slot,
                .grad_slot = forward.kv_slot,
                .queries = forward.queries,
                .keys = forward.keys,
                .mask = mask,
                .scale = forward.scale};
    bench.Seconds(forward);
    bench.Seconds(RowDotParams{backward.dout, forward.o, backward.delta});
  }
  AttentionFwdParams forward;
  AttentionBwdParams backward;
};

constexpr int64_t kManyHeads = 8;
constexpr int64_t kManyHeadsTokens = 4096;  // longer calls would take minutes

void AppendRows(CpuBench& bench, DType dtype, int64_t tokens, int64_t heads, int64_t head_dim,
                int repeats, nlohmann::ordered_json& rows) {
  const Attention attention(bench, dtype, tokens, heads, head_dim);
  const double gflop = 2e-9 * heads * head_dim * tokens * tokens;
  // Long calls average over the drift by themselves.
  repeats = std::max(3, static_cast<int>(repeats * std::min(1.0, 16384.0 / tokens)));
  const auto append = [&](const char* op, const OpParams& params, double flops) {
    rows.push_back(RatioRow(
        {{"op", op},
         {"dtype", NameOf(dtype)},
         {"heads", heads},
         {"head_dim", head_dim},
         {"tokens", tokens},
         {"yardstick", std::string("matmul ") + NameOf(dtype)}},
        "gflops", repeats, [&] { return flops / bench.Seconds(params); },
        [&] { return bench.MatmulRate(dtype); }));
  };
  append("attention_fwd", attention.forward, gflop);
  append("attention_bwd", attention.backward, 2.5 * gflop);
}

}  // namespace

void AppendAttentionRows(CpuBench& bench, DType dtype, int64_t tokens, int64_t head_dim,
                         int repeats, nlohmann::ordered_json& rows) {
  AppendRows(bench, dtype, tokens, 1, head_dim, repeats, rows);
  if (tokens <= kManyHeadsTokens) {
    AppendRows(bench, dtype, tokens, kManyHeads, head_dim, repeats, rows);
  }
}

}  // namespace upipe::kernels
