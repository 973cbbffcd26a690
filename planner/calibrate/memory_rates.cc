#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/status.h"
#include "planner/calibrate/rates.h"

namespace upipe::planner {
namespace {

using kernels::DType;
using kernels::OpParams;
using kernels::TensorView;

constexpr int64_t kHeads = 8;
constexpr int64_t kHeadDim = 128;
constexpr int64_t kIntermediate = 2816;
constexpr int64_t kCopyBytes = int64_t{16} << 20;
constexpr int64_t kUpdated = int64_t{4} << 20;

// Elementwise ops of a block on tensors larger than a core's caches.
std::vector<OpParams> ElementwiseOps(TeamRank& rank, DType dtype, int64_t tokens) {
  const auto hidden = [&] { return rank.Random(dtype, {tokens, kHeads * kHeadDim}); };
  const auto heads = [&] { return rank.Random(dtype, {tokens, kHeads, kHeadDim}); };
  const auto wide = [&] { return rank.Random(dtype, {tokens, kIntermediate}); };
  const TensorView weight = rank.Random(dtype, {kHeads * kHeadDim});
  const TensorView x = hidden();
  const TensorView y = hidden();
  const TensorView q = heads();
  const TensorView rotated = heads();
  // None works on what another, or a call before it, has made of its inputs.
  return {
      kernels::RmsNormFwdParams{
          .x = x, .weight = weight, .y = y, .residual = hidden(), .sum = hidden()},
      kernels::RmsNormBwdParams{.x = x,
                                .weight = weight,
                                .dy = y,
                                .dx = hidden(),
                                .dweight = rank.Random(DType::kFloat32, {kHeads * kHeadDim}),
                                .accumulate = false},
      kernels::RopeParams{.src = q,
                          .dst = rotated,
                          .positions = rank.Filled(DType::kInt64, {tokens}, 7),
                          .config = {}},
      kernels::StridedCopyParams{.src = q, .dst = rotated},
      kernels::SwiGluFwdParams{.gate = wide(), .up = wide(), .out = wide()},
  };
}

double BytesOf(const std::vector<OpParams>& ops) {
  double bytes = 0;
  for (const OpParams& params : ops) {
    const kernels::OpCost cost = kernels::Cost(params);
    bytes += cost.bytes_read + cost.bytes_written;
  }
  return bytes;
}

// One way of `kCopyBytes` between a rank's device and its host memory.
Probe CopyProbe(RankTeam& team, bool to_host) {
  std::vector<TensorView> on_device, on_host;
  for (int i = 0; i < team.size(); ++i) {
    const int64_t elements = kCopyBytes / static_cast<int64_t>(sizeof(float));
    on_device.push_back(team.rank(i).Filled(DType::kFloat32, {elements}, 1));
    on_host.push_back(team.rank(i).FilledOnHost(DType::kFloat32, elements, 1));
  }
  return {.enqueue =
              [on_device, on_host, to_host](TeamRank& rank) {
                engine::RankContext& context = rank.context();
                kernels::Stream& stream = *context.streams().copy;
                void* device = on_device[context.rank()].data;
                void* host = on_host[context.rank()].data;
                if (to_host) {
                  context.device().CopyToHost(host, device, kCopyBytes, stream);
                } else {
                  context.device().CopyFromHost(device, host, kCopyBytes, stream);
                }
                return absl::OkStatus();
              },
          .stream = &engine::RankStreams::copy};
}

Probe UpdateProbe(RankTeam& team) {
  std::vector<kernels::AdamWParams> updates;
  for (int i = 0; i < team.size(); ++i) {
    TeamRank& rank = team.rank(i);
    const auto vector = [&] { return rank.FilledOnHost(DType::kFloat32, kUpdated, 0.01); };
    updates.push_back({.param = vector(),
                       .grad = vector(),
                       .m = vector(),
                       .v = vector(),
                       .scale = rank.FilledOnHost(DType::kFloat32, 1, 1),
                       .skip = rank.FilledOnHost(DType::kInt32, 1, 0),
                       .lr = 1e-4f,
                       .weight_decay = 0.1f});
  }
  return {.enqueue =
              [updates](TeamRank& rank) {
                return rank.context().RunOnHost(updates[rank.context().rank()]);
              },
          .stream = &engine::RankStreams::host};
}

void SetNumber(v1::DeviceFile::Number& number, double value, std::string source) {
  number.set_value(FourDigits(value));
  number.set_source(std::move(source));
}

}  // namespace

absl::StatusOr<double> MeasureElementwise(RankTeam& team, const RateOptions& options,
                                          v1::DeviceFile& device) {
  options.say("memory: elementwise ops, and what each op costs however small");
  const int64_t tokens = options.quick ? 1024 : 4096;
  double bytes = 0;
  std::vector<Probe> probes;
  for (const DType dtype : {DType::kBFloat16, DType::kFloat32}) {
    probes.push_back(OpProbe(team, [&](TeamRank& rank) {
      std::vector<OpParams> ops = ElementwiseOps(rank, dtype, tokens);
      if (rank.context().rank() == 0) bytes += BytesOf(ops);
      return ops;
    }));
  }
  probes.push_back(OpProbe(team, [&](TeamRank& rank) -> std::vector<OpParams> {
    const TensorView small = rank.Random(DType::kFloat32, {1, 16});
    return {kernels::SwiGluFwdParams{.gate = small, .up = small, .out = small}};
  }));
  UPIPE_ASSIGN_OR_RETURN(const std::vector<Timing> timings,
                         TimeInterleaved(team, probes,
                                         {.seconds = options.quick ? 0.6 : 5,
                                          .sample_seconds = options.quick ? 0.003 : 0.01,
                                          .busy = options.busy}));
  const double rate = bytes / (timings[0].seconds + timings[1].seconds);
  SetNumber(*device.mutable_memory_bandwidth(), rate,
            MeasuredSource(options,
                           absl::StrCat("norms, rotation, copy and SwiGLU of a block over ", tokens,
                                        " tokens, in bf16 and in fp32 together"),
                           timings[0].rounds));
  SetNumber(*device.mutable_launch(), timings[2].seconds,
            MeasuredSource(options, "ops of 16 elements, enqueued and run one after the other",
                           timings[2].rounds));
  options.say(absl::StrFormat("memory: %.2f GB/s; an op costs %.2f us at least", rate * 1e-9,
                              timings[2].seconds * 1e6));
  for (int i = 0; i < team.size(); ++i) team.rank(i).Clear();
  return WorstSpread(timings);
}

absl::StatusOr<double> MeasureHost(RankTeam& team, const RateOptions& options,
                                   v1::DeviceFile& device) {
  options.say("host memory: copies both ways, AdamW");
  const std::vector<Probe> probes = {CopyProbe(team, true), CopyProbe(team, false),
                                     UpdateProbe(team)};
  UPIPE_ASSIGN_OR_RETURN(const std::vector<Timing> timings,
                         TimeInterleaved(team, probes,
                                         {.seconds = options.quick ? 0.4 : 3,
                                          .sample_seconds = options.quick ? 0.003 : 0.01,
                                          .busy = options.busy}));
  const double copy = 2.0 * kCopyBytes / (timings[0].seconds + timings[1].seconds);
  const double update = kUpdated / timings[2].seconds;
  SetNumber(*device.mutable_host_copy(), copy,
            MeasuredSource(
                options, absl::StrCat("copies of ", kCopyBytes >> 20, " MiB to the host and back"),
                timings[0].rounds));
  SetNumber(*device.mutable_host_update(), update,
            MeasuredSource(options, absl::StrCat("AdamW of ", kUpdated, " parameters"),
                           timings[2].rounds));
  options.say(absl::StrFormat("host memory: %.2f GB/s copied, %.1f M parameters/s updated",
                              copy * 1e-9, update * 1e-6));
  for (int i = 0; i < team.size(); ++i) team.rank(i).Clear();
  return WorstSpread(timings);
}

}  // namespace upipe::planner
