#include "planner/step_time.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <string>

#include "absl/strings/str_cat.h"
#include "common/status.h"

namespace upipe::planner {
namespace {

using comm::DryTraffic;
using comm::TrafficCount;
using comm::TrafficKind;
using kernels::DryCalls;
using kernels::kOpIndex;

// In the order people read them.
enum Part {
  kProjections,
  kAttentionForward,
  kAttentionBackward,
  kExchange,
  kMlp,
  kLoss,
  kEmbedding,
  kElementwise,
  kWeights,
  kOptimizer,
  kOffload,
  kLaunch,
  kNumParts,
};
constexpr std::array<const char*, kNumParts> kPartNames = {"projections",
                                                           "attention forward",
                                                           "attention backward",
                                                           "exchange",
                                                           "mlp",
                                                           "loss",
                                                           "embedding",
                                                           "norms and moves",
                                                           "weights",
                                                           "optimizer",
                                                           "offload",
                                                           "launch"};
using Seconds = std::array<double, kNumParts>;

// Bytes AdamW reads and writes of each parameter: weight, gradient and two moments; all but the
// gradient.
constexpr double kAdamWBytes = 28;

bool Is(const DryCalls& calls, int op) { return calls.op == op; }

// The output projection runs in the tiles of the MLP, so its time is there.
Part PartOf(const DryCalls& calls, const Section& section) {
  switch (calls.op) {
    case kOpIndex<kernels::MatmulParams>:
      if (section.attention) return kProjections;
      return section.pass == StepPass::kLoss ? kLoss : kMlp;
    case kOpIndex<kernels::AttentionFwdParams>:
      return kAttentionForward;
    case kOpIndex<kernels::AttentionBwdParams>:
      return kAttentionBackward;
    case kOpIndex<kernels::SwiGluFwdParams>:
    case kOpIndex<kernels::SwiGluBwdParams>:
      return kMlp;
    case kOpIndex<kernels::CrossEntropyParams>:
      return kLoss;
    case kOpIndex<kernels::EmbeddingFwdParams>:
    case kOpIndex<kernels::EmbeddingBwdParams>:
      return kEmbedding;
    case kOpIndex<kernels::SumOfSquaresParams>:
    case kOpIndex<kernels::ClipScaleParams>:
    case kOpIndex<kernels::AdamWParams>:
      return kOptimizer;
    default:
      return kElementwise;
  }
}

absl::Status Missing(const v1::DeviceFile& device, const std::string& rate) {
  return absl::InvalidArgumentError(absl::StrCat("device ", device.name(), " has no ", rate,
                                                 ", which a step of this job needs; add it to the "
                                                 "device's description"));
}

double Bytes(const DryCalls& calls) { return calls.cost.bytes_read + calls.cost.bytes_written; }

// Rates of one device; each function asks for what it needs.
class Rates {
 public:
  Rates(const v1::DeviceFile& device, bool own_backward)
      : device_(device), own_backward_(own_backward) {}

  // Of one call, whenever it was launched.
  absl::StatusOr<double> SecondsOf(const DryCalls& calls) const {
    return calls.on_host ? OnHost(calls) : OnDevice(calls);
  }

  double launch() const { return device_.launch().value(); }

  absl::StatusOr<double> Collectives(const TrafficCount& count) const {
    if (count.collectives == 0) return 0.0;
    double sending = 0;
    if (count.bytes_in_node > 0) {
      UPIPE_ASSIGN_OR_RETURN(const double rate,
                             Value(device_.exchange_in_node(), "exchange_in_node"));
      sending = static_cast<double>(count.bytes_in_node) / rate;
    }
    if (count.bytes_between_nodes > 0) {
      UPIPE_ASSIGN_OR_RETURN(const double rate,
                             Value(device_.exchange_between_nodes(), "exchange_between_nodes"));
      sending = std::max(sending, static_cast<double>(count.bytes_between_nodes) / rate);
    }
    return sending + static_cast<double>(count.collectives) * device_.exchange_latency().value();
  }

  absl::StatusOr<double> Copies(const kernels::DryCounts& ops) const {
    const int64_t bytes = std::max(ops.bytes_to_host, ops.bytes_from_host);
    if (bytes == 0) return 0.0;
    UPIPE_ASSIGN_OR_RETURN(const double rate, Value(device_.host_copy(), "host_copy"));
    return static_cast<double>(bytes) / rate;
  }

 private:
  absl::StatusOr<double> Value(const v1::DeviceFile::Number& number, const char* name) const {
    if (number.value() > 0) return number.value();
    return Missing(device_, name);
  }

  absl::StatusOr<double> OnHost(const DryCalls& calls) const {
    UPIPE_ASSIGN_OR_RETURN(const double rate, Value(device_.host_update(), "host_update"));
    return Bytes(calls) / (kAdamWBytes * rate);
  }

  absl::StatusOr<double> OnDevice(const DryCalls& calls) const {
    UPIPE_ASSIGN_OR_RETURN(const double bandwidth,
                           Value(device_.memory_bandwidth(), "memory_bandwidth"));
    const double crossing = Bytes(calls) / bandwidth;
    if (Is(calls, kOpIndex<kernels::MatmulParams>)) {
      UPIPE_ASSIGN_OR_RETURN(const double rate, ProductRate(calls));
      return std::max(crossing, calls.cost.flops / rate);
    }
    const bool backward = Is(calls, kOpIndex<kernels::AttentionBwdParams>);
    if (backward || Is(calls, kOpIndex<kernels::AttentionFwdParams>)) {
      UPIPE_ASSIGN_OR_RETURN(const double rate, AttentionRate(calls, backward));
      return std::max(crossing, calls.cost.flops / rate);
    }
    return crossing;
  }

  absl::StatusOr<double> ProductRate(const DryCalls& calls) const {
    const bool bf16 = calls.dtype == kernels::DType::kBFloat16;
    const v1::DeviceFile::MatmulRate& rate = bf16 ? device_.matmul_bf16() : device_.matmul_fp32();
    if (rate.flops() <= 0) return Missing(device_, bf16 ? "matmul_bf16" : "matmul_fp32");
    const auto rows = static_cast<double>(std::max<int64_t>(calls.extent, 1));
    return rate.flops() * rows / (rows + rate.half_rows());
  }

  absl::StatusOr<double> AttentionRate(const DryCalls& calls, bool backward) const {
    const bool bf16 = calls.dtype == kernels::DType::kBFloat16;
    // Where the own kernel's rates are not known, the other's stand in for them: a bound from
    // below.
    const bool own = own_backward_ && bf16 && backward && !device_.attention_own_bf16().empty();
    const auto& rates = own    ? device_.attention_own_bf16()
                        : bf16 ? device_.attention_bf16()
                               : device_.attention_fp32();
    if (rates.empty()) return Missing(device_, bf16 ? "attention_bf16" : "attention_fp32");
    const auto flops = [&](const v1::DeviceFile::AttentionRate& rate) {
      return backward ? rate.backward_flops() : rate.forward_flops();
    };
    const auto after = std::find_if(rates.begin(), rates.end(), [&](const auto& rate) {
      return rate.length() >= calls.extent;
    });
    if (after == rates.begin()) return flops(rates[0]);
    if (after == rates.end()) return flops(rates[rates.size() - 1]);
    const auto before = after - 1;
    const auto log = [](int64_t length) { return std::log(static_cast<double>(length)); };
    const double share = (log(calls.extent) - log(before->length())) /
                         (log(after->length()) - log(before->length()));
    return flops(*before) + share * (flops(*after) - flops(*before));
  }

  const v1::DeviceFile& device_;
  const bool own_backward_;
};

// One pass: what its parts take when nothing runs beside anything, and what does run beside.
struct PassTime {
  Seconds parts = {};
  double exchange_beside = 0;
  double weights_beside = 0;
  double copies = 0;
};

absl::Status AddSection(const Rates& rates, const Section& section, const SectionCounts& counts,
                        PassTime& pass) {
  for (const auto& kinds : counts.ops.by_kind()) {
    for (const DryCalls& calls : kinds) {
      UPIPE_ASSIGN_OR_RETURN(const double one, rates.SecondsOf(calls));
      const auto times = static_cast<double>(calls.calls);
      pass.parts[PartOf(calls, section)] += times * one;
      pass.parts[kLaunch] += times * std::max(0.0, rates.launch() - one);
    }
  }
  for (const TrafficKind kind :
       {TrafficKind::kExchange, TrafficKind::kGather, TrafficKind::kReduce, TrafficKind::kAgree}) {
    const bool exchange = kind == TrafficKind::kExchange;
    for (const bool leaves_node : {false, true}) {
      const auto seconds = [&](bool beside) {
        return rates.Collectives(counts.traffic.at(
            {.kind = kind, .beside_compute = beside, .leaves_node = leaves_node}));
      };
      UPIPE_ASSIGN_OR_RETURN(const double waited_for, seconds(false));
      UPIPE_ASSIGN_OR_RETURN(const double beside, seconds(true));
      pass.parts[exchange ? kExchange : kWeights] += waited_for;
      (exchange ? pass.exchange_beside : pass.weights_beside) += beside;
    }
  }
  return absl::OkStatus();
}

// Adds what does not fit beside computation to the parts; returns what does.
double Hide(const StepShape& shape, PassTime& pass) {
  double compute = 0;
  for (const Part part : {kProjections, kAttentionForward, kAttentionBackward, kMlp, kLoss,
                          kEmbedding, kElementwise, kLaunch}) {
    compute += pass.parts[part];
  }
  const double attention = pass.parts[kAttentionForward] + pass.parts[kAttentionBackward];
  const auto turns = static_cast<double>(std::max<int64_t>(shape.turns, 1));
  const double exchange = std::min(pass.exchange_beside * (turns - 1) / turns, attention);
  const double weights = std::min(pass.weights_beside, compute - exchange);
  const double copies = std::min(pass.copies, compute);
  pass.parts[kExchange] += pass.exchange_beside - exchange;
  pass.parts[kWeights] += pass.weights_beside - weights;
  pass.parts[kOffload] += pass.copies - copies;
  return exchange + weights + copies;
}

}  // namespace

StepShape StepShape::From(const v1::RunPlan& plan) {
  const v1::JobSpec& spec = plan.spec();
  const double sequences = static_cast<double>(spec.train().gradient_accumulation()) *
                           spec.parallel().dp_ranks() * spec.parallel().fsdp_ranks();
  return {.ranks = spec.parallel().ranks(),
          .tokens = sequences * static_cast<double>(spec.train().context()),
          .model_flops = plan.model_flops(),
          .turns = plan.schedule().stages_size() * plan.schedule().query_chunks(),
          .own_backward = spec.parallel().backend() == "cuda" && spec.train().deterministic()};
}

absl::StatusOr<v1::StepTime> TimeStep(const StepCounts& counts, const StepShape& shape,
                                      const v1::DeviceFile& device) {
  const Rates rates(device, shape.own_backward);
  std::map<StepPass, PassTime> passes;
  std::map<StepPass, kernels::DryCounts> copies;
  for (const auto& [section, at] : counts.sections) {
    UPIPE_RETURN_IF_ERROR(AddSection(rates, section, at, passes[section.pass]));
    copies[section.pass].AddTimes(at.ops, 1);
  }
  Seconds parts = {};
  v1::StepTime time;
  for (auto& [at, pass] : passes) {
    UPIPE_ASSIGN_OR_RETURN(pass.copies, rates.Copies(copies[at]));
    time.set_hidden_seconds(time.hidden_seconds() + Hide(shape, pass));
    for (int part = 0; part < kNumParts; ++part) parts[part] += pass.parts[part];
  }
  double seconds = 0;
  for (int part = 0; part < kNumParts; ++part) {
    if (parts[part] == 0) continue;
    v1::StepTime::Part& named = *time.add_parts();
    named.set_name(kPartNames[part]);
    named.set_seconds(parts[part]);
    seconds += parts[part];
  }
  time.set_seconds(seconds);
  if (seconds == 0) return time;
  time.set_tokens_per_second_per_rank(shape.tokens / shape.ranks / seconds);
  if (device.peak_flops().value() > 0) {
    time.set_causal_mfu(shape.model_flops / shape.ranks / seconds / device.peak_flops().value());
  }
  return time;
}

}  // namespace upipe::planner
