// How fast: products and attention in TFLOP/s, the rest as a share of what a plain copy reaches.
#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "tools/gpu_check/parts.h"
#include "tools/gpu_check/sized_calls.h"

namespace upipe::gpu_check {
namespace {

// Of one H200.
constexpr double kForwardAim = 650, kBackwardAim = 550, kMlpAim = 600, kCopyShareAim = 0.75;
constexpr int64_t kAimTokens = 32 * 1024;

// Sizes that a CPU gets through reach nothing.
std::optional<double> Aim(const Settings& settings, bool meant, double aim) {
  return meant && !settings.small ? std::optional(aim) : std::nullopt;
}

int64_t ArenaOf(const Settings& settings, int64_t gibi) {
  return settings.small ? int64_t{64} << 20 : gibi << 30;
}

std::vector<std::string> NamesOf(const std::vector<CallSpec>& specs) {
  std::vector<std::string> names;
  for (const CallSpec& spec : specs) names.push_back(spec.name);
  return names;
}

// Measures every call with `measure(spec, call)`; one that fails is a failure of the part and ends
// nothing, unless the device is gone.
template <typename Measure>
absl::Status ForEachCall(const std::vector<CallSpec>& specs, CheckDevice& device,
                         Findings& findings, const Measure& measure) {
  for (const CallSpec& spec : specs) {
    absl::StatusOr<SizedCall> call = spec.make(device);
    const absl::Status status = call.ok() ? measure(spec, *call) : call.status();
    if (!status.ok()) {
      findings.Failed(absl::StrCat(spec.name, ": ", status.message()));
    }
    UPIPE_RETURN_IF_ERROR(device.Clear());
  }
  return absl::OkStatus();
}

absl::Status MeasureElementwise(const Settings& settings, Findings& findings) {
  UPIPE_ASSIGN_OR_RETURN(const auto device, CheckDevice::Create(settings, ArenaOf(settings, 16)));
  const int64_t bytes = settings.small ? 1 << 20 : int64_t{1} << 31;
  UPIPE_ASSIGN_OR_RETURN(const auto src, device->Tensor(kernels::DType::kBFloat16, {bytes / 2}));
  UPIPE_ASSIGN_OR_RETURN(const auto dst, device->Tensor(kernels::DType::kBFloat16, {bytes / 2}));
  UPIPE_RETURN_IF_ERROR(device->FillNormal(src, 1));
  UPIPE_ASSIGN_OR_RETURN(const double copy, device->CopySeconds(dst.data, src.data, bytes));
  UPIPE_RETURN_IF_ERROR(device->Clear());
  const double bandwidth = 2 * static_cast<double>(bytes) / copy;
  findings.Add({"plain copy, read and write", bandwidth / 1e9, "GB/s", {}});
  return ForEachCall(
      ElementwiseCalls(settings.small), *device, findings,
      [&](const CallSpec& spec, const SizedCall& call) -> absl::Status {
        UPIPE_ASSIGN_OR_RETURN(const double seconds, device->Seconds(device->own(), call.params));
        const kernels::OpCost cost = kernels::Cost(call.params);
        const double rate = (cost.bytes_read + cost.bytes_written) / seconds;
        findings.Add(
            {spec.name, rate / bandwidth, "of copy bandwidth", Aim(settings, true, kCopyShareAim)});
        return absl::OkStatus();
      });
}

absl::Status MeasureMatmul(const Settings& settings, Findings& findings) {
  UPIPE_ASSIGN_OR_RETURN(const auto device, CheckDevice::Create(settings, ArenaOf(settings, 8)));
  return ForEachCall(
      MatmulCalls(settings.small), *device, findings,
      [&](const CallSpec& spec, const SizedCall& call) -> absl::Status {
        UPIPE_ASSIGN_OR_RETURN(const double seconds, device->Seconds(device->own(), call.params));
        findings.Add({spec.name, kernels::Cost(call.params).flops / seconds / 1e12, "TFLOP/s",
                      Aim(settings, spec.name.starts_with("MLP"), kMlpAim)});
        return absl::OkStatus();
      });
}

absl::Status MeasureAttentionOf(const Settings& settings, const AttentionSize& size,
                                CheckDevice& device, Findings& findings) {
  UPIPE_ASSIGN_OR_RETURN(
      const AttentionCalls calls,
      MakeAttention({.queries = {0, size.tokens}, .keys = {0, size.tokens}, .heads = size.heads},
                    device));
  for (const NamedOps& ops : device.all_ops()) {
    const auto measure = [&](const char* direction, const kernels::OpParams& params,
                             double aim) -> absl::Status {
      UPIPE_ASSIGN_OR_RETURN(const double seconds, device.Seconds(ops, params));
      const bool aimed = size.tokens >= kAimTokens && ops.name == "cuDNN";
      findings.Add({absl::StrCat(ops.name, " ", direction, ", ", ToString(size)),
                    kernels::Cost(params).flops / seconds / 1e12, "TFLOP/s",
                    Aim(settings, aimed, aim)});
      return absl::OkStatus();
    };
    UPIPE_RETURN_IF_ERROR(measure("forward", calls.forward, kForwardAim));
    UPIPE_RETURN_IF_ERROR(device.Run(device.own(), calls.delta));
    UPIPE_RETURN_IF_ERROR(measure("backward", calls.backward, kBackwardAim));
  }
  return absl::OkStatus();
}

absl::Status MeasureAttention(const Settings& settings, Findings& findings) {
  UPIPE_ASSIGN_OR_RETURN(const auto device, CheckDevice::Create(settings, ArenaOf(settings, 24)));
  if (!device->library()) {
    findings.Skipped(absl::StrCat("attention by cuDNN: ", device->no_library()));
  }
  for (const AttentionSize& size : AttentionSizes(settings.small)) {
    const absl::Status status = MeasureAttentionOf(settings, size, *device, findings);
    if (!status.ok()) findings.Failed(absl::StrCat(ToString(size), ": ", status.message()));
    UPIPE_RETURN_IF_ERROR(device->Clear());
  }
  return absl::OkStatus();
}

}  // namespace

Part ElementwisePart(const Settings& settings) {
  return {.name = "elementwise",
          .what = "ops that memory bounds, as a share of a plain copy",
          .budget = absl::Seconds(20),
          .cases = NamesOf(ElementwiseCalls(settings.small)),
          .run = [settings](Findings& f) { return MeasureElementwise(settings, f); }};
}

Part MatmulPart(const Settings& settings) {
  return {.name = "matmul",
          .what = "products in bf16 with fp32 sums",
          .budget = absl::Seconds(20),
          .cases = NamesOf(MatmulCalls(settings.small)),
          .run = [settings](Findings& f) { return MeasureMatmul(settings, f); }};
}

Part AttentionRatesPart(const Settings& settings) {
  Part part = {.name = "attention_rates",
               .what = "causal attention, head_dim 128, forward and backward",
               .budget = absl::Seconds(45),
               .cases = {},
               .run = [settings](Findings& f) { return MeasureAttention(settings, f); }};
  for (const AttentionSize& size : AttentionSizes(settings.small)) {
    part.cases.push_back(ToString(size));
  }
  return part;
}

}  // namespace upipe::gpu_check
