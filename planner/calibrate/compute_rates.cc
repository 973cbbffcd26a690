#include <cmath>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/check.h"
#include "common/status.h"
#include "common/units.h"
#include "planner/calibrate/rates.h"

namespace upipe::planner {
namespace {

using kernels::DType;
using kernels::OpParams;
using kernels::TensorView;

constexpr DType kStorageTypes[] = {DType::kBFloat16, DType::kFloat32};
constexpr int64_t kHeadDim = 128;

// A projection as the engine calls it: [rows, width] by a weight stored [width, width].
std::vector<OpParams> Projection(TeamRank& rank, DType dtype, int64_t rows, int64_t width) {
  return {kernels::MatmulParams{.a = rank.Random(dtype, {rows, width}),
                                .b = rank.Random(dtype, {width, width}, 0.02f),
                                .c = rank.Random(dtype, {rows, width}),
                                .transpose_b = true}};
}

struct AttentionCall {
  std::vector<OpParams> forward;
  std::vector<OpParams> backward;
};

// Causal attention of one head over a whole sequence, and its backward pass.
AttentionCall CausalHead(TeamRank& rank, DType dtype, int64_t tokens) {
  const auto tensor = [&](DType type) { return rank.Random(type, {tokens, 1, kHeadDim}); };
  kernels::AttentionFwdParams forward = {
      .q = tensor(dtype),
      .k = tensor(dtype),
      .v = tensor(dtype),
      .o = tensor(dtype),
      .lse = rank.Random(DType::kFloat32, {1, tokens}),
      .kv_slot = {0},
      .queries = {0, tokens},
      .keys = {0, tokens},
      .mask = {.document_starts = std::make_shared<const std::vector<int64_t>>(1, 0),
               .total = tokens},
      .scale = 1 / std::sqrt(static_cast<float>(kHeadDim))};
  kernels::AttentionBwdParams backward = {.q = forward.q,
                                          .k = forward.k,
                                          .v = forward.v,
                                          .dout = tensor(dtype),
                                          .lse = forward.lse,
                                          .delta = rank.Random(DType::kFloat32, {tokens, 1}),
                                          .dq = tensor(DType::kFloat32),
                                          .dk = tensor(DType::kFloat32),
                                          .dv = tensor(DType::kFloat32),
                                          .kv_slot = {0},
                                          .grad_slot = {0},
                                          .queries = forward.queries,
                                          .keys = forward.keys,
                                          .mask = forward.mask,
                                          .scale = forward.scale};
  // The backward pass starts from this call's own log-sum-exp and delta.
  UPIPE_CHECK_OK(rank.context().Run(forward));
  UPIPE_CHECK_OK(
      rank.context().Run(kernels::RowDotParams{backward.dout, forward.o, backward.delta}));
  UPIPE_CHECK_OK(rank.context().stream().Synchronize());
  return {.forward = {std::move(forward)}, .backward = {std::move(backward)}};
}

}  // namespace

absl::StatusOr<double> MeasureMatmul(RankTeam& team, const RateOptions& options,
                                     v1::DeviceFile& device) {
  const int64_t width = options.quick ? 1024 : 2048;
  const std::vector<double> rows = options.quick ? std::vector<double>{32, 128, 512, 1024}
                                                 : std::vector<double>{32, 128, 512, 2048};
  options.say("matmul: products of several numbers of rows");
  std::vector<Probe> probes;
  for (const DType dtype : kStorageTypes) {
    for (const double count : rows) {
      probes.push_back(OpProbe(team, [&](TeamRank& rank) {
        return Projection(rank, dtype, static_cast<int64_t>(count), width);
      }));
    }
  }
  UPIPE_ASSIGN_OR_RETURN(const std::vector<Timing> timings,
                         TimeInterleaved(team, probes,
                                         {.seconds = options.quick ? 0.8 : 8,
                                          .sample_seconds = options.quick ? 0.003 : 0.01,
                                          .busy = options.busy}));
  for (size_t type = 0; type < std::size(kStorageTypes); ++type) {
    const bool is_bf16 = kStorageTypes[type] == DType::kBFloat16;
    std::vector<double> seconds;
    for (size_t i = 0; i < rows.size(); ++i) {
      seconds.push_back(timings[type * rows.size() + i].seconds);
    }
    const MatmulFit fit = FitMatmul(rows, seconds, 2.0 * static_cast<double>(width * width));
    v1::DeviceFile::MatmulRate& rate =
        is_bf16 ? *device.mutable_matmul_bf16() : *device.mutable_matmul_fp32();
    rate.set_flops(FourDigits(fit.flops));
    rate.set_half_rows(FourDigits(fit.half_rows));
    rate.set_source(
        MeasuredSource(options,
                       absl::StrCat("products of ", rows.front(), " to ", rows.back(), " rows by ",
                                    width, " x ", width, ", a line through their times"),
                       timings.front().rounds));
    options.say(absl::StrFormat("matmul %s: %.1f GFLOP/s, half of it at %.0f rows",
                                NameOf(kStorageTypes[type]), fit.flops * 1e-9, fit.half_rows));
  }
  for (int i = 0; i < team.size(); ++i) team.rank(i).Clear();
  return WorstSpread(timings);
}

absl::StatusOr<double> MeasureAttention(RankTeam& team, const RateOptions& options,
                                        v1::DeviceFile& device) {
  const std::vector<int64_t> lengths = options.quick ? std::vector<int64_t>{1024, 2048}
                                                     : std::vector<int64_t>{1024, 2048, 4096, 8192};
  options.say(absl::StrCat("attention: one head of ", kHeadDim, " dims, ",
                           FormatTokenCount(lengths.front()), " to ",
                           FormatTokenCount(lengths.back()), " tokens"));
  std::vector<Probe> probes;
  for (const DType dtype : kStorageTypes) {
    for (const int64_t length : lengths) {
      std::vector<AttentionCall> calls;
      for (int i = 0; i < team.size(); ++i) {
        calls.push_back(CausalHead(team.rank(i), dtype, length));
      }
      probes.push_back(
          OpProbe(team, [&](TeamRank& rank) { return calls[rank.context().rank()].forward; }));
      probes.push_back(
          OpProbe(team, [&](TeamRank& rank) { return calls[rank.context().rank()].backward; }));
    }
  }
  UPIPE_ASSIGN_OR_RETURN(const std::vector<Timing> timings,
                         TimeInterleaved(team, probes,
                                         {.seconds = options.quick ? 1.5 : 22,
                                          .sample_seconds = options.quick ? 0.003 : 0.02,
                                          .busy = options.busy}));
  size_t next = 0;
  for (const DType dtype : kStorageTypes) {
    auto& rates = dtype == DType::kBFloat16 ? *device.mutable_attention_bf16()
                                            : *device.mutable_attention_fp32();
    for (const int64_t length : lengths) {
      const double flops = 2.0 * kHeadDim * static_cast<double>(length * length);
      v1::DeviceFile::AttentionRate& rate = *rates.Add();
      rate.set_length(length);
      rate.set_forward_flops(FourDigits(flops / timings[next].seconds));
      rate.set_backward_flops(FourDigits(2.5 * flops / timings[next + 1].seconds));
      rate.set_source(MeasuredSource(options, absl::StrCat("one head of ", kHeadDim, " dims"),
                                     timings[next].rounds));
      options.say(absl::StrFormat("attention %s at %s: %.1f GFLOP/s forward, %.1f backward",
                                  NameOf(dtype), FormatTokenCount(length),
                                  rate.forward_flops() * 1e-9, rate.backward_flops() * 1e-9));
      next += 2;
    }
  }
  for (int i = 0; i < team.size(); ++i) team.rank(i).Clear();
  return WorstSpread(timings);
}

}  // namespace upipe::planner
