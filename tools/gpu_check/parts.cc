#include "tools/gpu_check/parts.h"

#include "tools/gpu_check/machine.h"

namespace upipe::gpu_check {

Part MachinePart(const Settings&) {
  return {.name = "machine",
          .what = "driver, GPU, versions of the libraries",
          .budget = absl::Seconds(10),
          .cases = {},
          .run = [](Findings& findings) {
            for (const auto& [name, text] : DescribeMachine()) findings.Note(name, text);
            return absl::OkStatus();
          }};
}

std::vector<Part> AllParts(const Settings& settings) {
  return {MachinePart(settings),
          WorkspacePart(settings),
          ElementwisePart(settings),
          MatmulPart(settings),
          AttentionRatesPart(settings),
          OpSuitePart(settings),
          LibrarySuitePart(settings),
          AttentionRowsPart(settings),
          RepeatPart(settings),
          StepPart(settings, settings.small ? 64 : 32 * 1024),
          StepPart(settings, settings.small ? 128 : 128 * 1024),
          TimingPart(settings),
          InvariancePart(settings)};
}

}  // namespace upipe::gpu_check
