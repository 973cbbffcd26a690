#include "kernels/cpu/isa.h"

#include <cblas.h>

#include <cstdint>

#include "absl/strings/str_cat.h"
#include "hwy/highway.h"

namespace upipe::kernels {

std::string DispatchedIsa() {
  const int64_t targets = hwy::SupportedTargets() & HWY_TARGETS;
  return hwy::TargetName(targets & -targets);  // lower bits are better targets
}

std::string MatmulCore() { return openblas_get_corename(); }

absl::Status CheckIsaName(absl::string_view name) {
  std::string known;
  for (int64_t rest = HWY_TARGETS; rest != 0; rest &= rest - 1) {
    const char* target = hwy::TargetName(rest & -rest);
    if (name == target) return absl::OkStatus();
    absl::StrAppend(&known, known.empty() ? "" : ", ", target);
  }
  return absl::InvalidArgumentError(
      absl::StrCat("unknown instruction set \"", name, "\"; known: ", known));
}

absl::Status CapIsa(absl::string_view name) {
  for (int64_t rest = HWY_TARGETS; rest != 0; rest &= rest - 1) {
    const int64_t target = rest & -rest;
    if (name != hwy::TargetName(target)) continue;
    if ((hwy::SupportedTargets() & target) == 0) {
      return absl::FailedPreconditionError(absl::StrCat(
          "instruction set ", name, " asked for, but this machine (or an earlier cap) offers ",
          DispatchedIsa(), " at best"));
    }
    hwy::DisableTargets(target - 1);
    return absl::OkStatus();
  }
  return CheckIsaName(name);
}

}  // namespace upipe::kernels
