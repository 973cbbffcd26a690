#include "kernels/cpu/isa.h"

#include <cblas.h>
#include <cpuid.h>

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "hwy/highway.h"

namespace upipe::kernels {
namespace {

constexpr char kAvx3Bf16[] = "AVX3_BF16";  // above every Highway target

std::atomic<bool> bf16_allowed{true};

// CPUID leaf 7, subleaf 1, EAX bit 5: AVX-512 BF16. Highway's AVX3 is also the proof that the
// system saves the wide registers. Asked once: Highway runs CPUID anew, which a virtual machine
// traps.
bool ProcessorHasBf16() {
  static const bool has = [] {
    unsigned eax, ebx, ecx, edx;
    return __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) != 0 && (eax >> 5 & 1) != 0 &&
           (hwy::SupportedTargets() & HWY_AVX3) != 0;
  }();
  return has;
}

absl::Status CannotCap(absl::string_view name) {
  return absl::FailedPreconditionError(absl::StrCat("instruction set ", name,
                                                    " asked for, but this machine (or an earlier "
                                                    "cap) offers ",
                                                    DispatchedIsa(), " at best"));
}

}  // namespace

bool HasBf16Products() {
  return bf16_allowed.load(std::memory_order_relaxed) && ProcessorHasBf16();
}

void SetBf16ProductsForTest(bool allowed) { bf16_allowed.store(allowed); }

std::string DispatchedIsa() {
  if (HasBf16Products()) return kAvx3Bf16;
  const int64_t targets = hwy::SupportedTargets() & HWY_TARGETS;
  return hwy::TargetName(targets & -targets);  // lower bits are better targets
}

std::string MatmulCore() { return openblas_get_corename(); }

std::string Arithmetic() {
  // "OpenBLAS 0.3.21 DYNAMIC_ARCH .."
  const std::vector<std::string> openblas = absl::StrSplit(openblas_get_config(), ' ');
  return absl::StrCat(DispatchedIsa(), ", ", openblas[0], " ",
                      openblas.size() > 1 ? openblas[1] : "", " ", MatmulCore());
}

absl::Status CheckIsaName(absl::string_view name) {
  if (name == kAvx3Bf16) return absl::OkStatus();
  std::string known = kAvx3Bf16;
  for (int64_t rest = HWY_TARGETS; rest != 0; rest &= rest - 1) {
    const char* target = hwy::TargetName(rest & -rest);
    if (name == target) return absl::OkStatus();
    absl::StrAppend(&known, ", ", target);
  }
  return absl::InvalidArgumentError(
      absl::StrCat("unknown instruction set \"", name, "\"; known: ", known));
}

absl::Status CapIsa(absl::string_view name) {
  if (name == kAvx3Bf16) return HasBf16Products() ? absl::OkStatus() : CannotCap(name);
  for (int64_t rest = HWY_TARGETS; rest != 0; rest &= rest - 1) {
    const int64_t target = rest & -rest;
    if (name != hwy::TargetName(target)) continue;
    if ((hwy::SupportedTargets() & target) == 0) return CannotCap(name);
    bf16_allowed.store(false);
    hwy::DisableTargets(target - 1);
    return absl::OkStatus();
  }
  return CheckIsaName(name);
}

}  // namespace upipe::kernels
