// A whole training step of a stack of layers of the shape of a 1B model: how long, and whether the
// memory is what was planned.
#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "common/status.h"
#include "engine/train/rank_run.h"
#include "tests/support/engine/engine_harness.h"
#include "tools/gpu_check/machine.h"
#include "tools/gpu_check/parts.h"

namespace upipe::gpu_check {
namespace {

constexpr double kOffPlanAim = 0.03;
constexpr int kSteps = 2;  // the first warms up

v1::JobSpec StepSpec(const Settings& settings, int64_t tokens) {
  testing::SmallJob job;
  job.backend = settings.backend;
  job.context = tokens;
  job.bf16 = true;
  if (!settings.small) {
    job.heads_per_rank = 8;
    job.num_heads = 32;
    job.num_kv_heads = 8;
    job.head_dim = 64;
    job.hidden_size = 2048;
    job.intermediate_size = 8192;
    job.vocab_size = 128256;
    job.num_layers = 16;
    job.tie_embeddings = true;
  }
  v1::JobSpec spec = testing::MakeSpec(job);
  spec.mutable_model()->set_init_stddev(0.02);
  if (settings.backend == "cuda") spec.mutable_parallel()->set_device("h200");
  return spec;
}

void ReportMemory(const v1::RunPlan& plan, const kernels::MemoryStats& stats,
                  std::optional<int64_t> in_use, Findings& findings) {
  const v1::MemoryUsage& planned = plan.ranks(0).memory();
  constexpr double kGi = 1 << 30;
  findings.Add(
      {"peak of live tensors", static_cast<double>(stats.peak_total_bytes) / kGi, "GiB", {}});
  findings.Expect(stats.peak_total_bytes == planned.peak_bytes(), "peak as planned",
                  absl::StrCat(stats.peak_total_bytes, " bytes at the peak, ", planned.peak_bytes(),
                               " planned"));
  findings.Expect(stats.arena_high_water_bytes == planned.arena_bytes(), "arena as planned",
                  absl::StrCat(stats.arena_high_water_bytes, " bytes of the arena used, ",
                               planned.arena_bytes(), " planned"));
  if (!in_use) {
    findings.Skipped("bytes of the whole device: no NVML");
    return;
  }
  const auto total = static_cast<double>(planned.arena_bytes() + plan.budget().reserved_bytes());
  findings.Add(
      {"the device's bytes in use by this step", static_cast<double>(*in_use) / kGi, "GiB", {}});
  findings.Add({"planned, with what the device file reserves", total / kGi, "GiB", {}});
  findings.Add({"planned and measured apart", std::abs(total / static_cast<double>(*in_use) - 1),
                "of measured", kOffPlanAim, /*at_most=*/true});
}

absl::Status RunSteps(const Settings& settings, int64_t tokens, Findings& findings) {
  UPIPE_ASSIGN_OR_RETURN(const v1::RunPlan plan, testing::MakePlan(StepSpec(settings, tokens)));
  const std::optional<int64_t> before = DeviceBytesInUse();
  const testing::Sequence sequence = testing::MakeSequence(plan.spec(), 1);
  const auto adjust = [&](int, kernels::DeviceOptions& options) {
    options.attention_kernel = train::AttentionKernelOf(plan);
  };
  return testing::RunRanks(
      {.plan = plan, .adjust = adjust}, [&](testing::Rank rank) -> absl::Status {
        double seconds = 0;
        for (int step = 1; step <= kSteps; ++step) {
          const absl::Time begin = absl::Now();
          UPIPE_ASSIGN_OR_RETURN(const train::StepResult result,
                                 testing::RunStep(rank, step, sequence));
          seconds = absl::ToDoubleSeconds(absl::Now() - begin);
          findings.Expect(std::isfinite(result.loss) && !result.skipped,
                          absl::StrCat("step ", step),
                          absl::StrCat("loss ", result.loss, ", gradient norm ", result.grad_norm));
        }
        findings.Add({"one step", seconds, "s", {}});
        findings.Add({"tokens", static_cast<double>(tokens) / seconds, "tokens/s", {}});
        findings.Add({"FLOPs of the model", plan.model_flops() / seconds / 1e12, "TFLOP/s", {}});
        std::optional<int64_t> in_use = DeviceBytesInUse();
        if (in_use && before) *in_use -= *before;
        ReportMemory(plan, rank.context.device().allocator().stats(), in_use, findings);
        return absl::OkStatus();
      });
}

}  // namespace

Part StepPart(const Settings& settings, int64_t tokens) {
  const std::string size =
      tokens % 1024 == 0 ? absl::StrCat(tokens / 1024, "k") : absl::StrCat(tokens);
  return {
      .name = "step_" + size,
      .what = "one training step of a 1B-shape layer stack; planned against measured bytes",
      .budget = absl::Seconds(tokens > 64 * 1024 ? 55 : 25),
      .cases = {absl::StrCat(tokens, settings.small ? " tokens, a tiny model, bf16"
                                                    : " tokens, 16 layers of width 2048, 32 heads "
                                                      "of 64, 8 of keys and values, bf16")},
      .run = [settings, tokens](Findings& f) { return RunSteps(settings, tokens, f); }};
}

}  // namespace upipe::gpu_check
