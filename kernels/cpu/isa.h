// Which instruction sets the CPU backend runs on. Results are bit-identical only between equal
// answers; a job may cap the first (parallel.isa_cap).
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace upipe::kernels {

// What every op but the fp32 Matmul runs on, best first: "AVX3_BF16" (AVX3 and HasBf16Products),
// "AVX3", "AVX2", "SSE4" or the baseline.
std::string DispatchedIsa();
// True when bf16 products use the processor's own instructions (AVX-512 BF16); false where it has
// none or a cap below AVX3_BF16 turned them off.
bool HasBf16Products();
// The OpenBLAS core of Matmul ("SkylakeX", "Zen", ..); chosen when the library loads
// (OPENBLAS_CORETYPE).
std::string MatmulCore();
// What the bits of results depend on beside the plan and this build: "AVX3_BF16, OpenBLAS 0.3.21
// SkylakeX".
std::string Arithmetic();
// InvalidArgument naming the known ones unless `name` is an instruction set CapIsa knows. Pure.
absl::Status CheckIsaName(absl::string_view name);
// Runs on `name` and nothing better from now on, process-wide. Call before the first op, from one
// thread. A cap can be lowered, not raised. InvalidArgument for an unknown name; FailedPrecondition
// when this machine lacks it.
absl::Status CapIsa(absl::string_view name);
// Turns AVX-512 BF16 off, or on again where the processor has it. For tests, between ops.
void SetBf16ProductsForTest(bool allowed);

}  // namespace upipe::kernels
