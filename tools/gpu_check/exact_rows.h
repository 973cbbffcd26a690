// Some rows of a long attention call in double precision, straight from the definition: what
// kernels are held to where no reference could run the whole. The same in fp32 with bf16 operands,
// plain loops in order, is the yardstick of the bound.
//
// It runs where the tensors are: on the GPU, or on the emulator over a host device's memory.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/api/device.h"

namespace upipe::gpu_check {

enum class Precision { kDouble, kPlain };

// `rows` of head 0. bf16 tensors, one document, a causal mask with or without window, no merge;
// what was written to o, lse, dq, dk and dv is not read.
struct ExactForward {
  std::vector<std::vector<double>> o;  // [rows][head_dim], in kPlain rounded to bf16
  std::vector<double> lse;             // [rows]
};
absl::StatusOr<ExactForward> ExactForwardRows(const kernels::AttentionFwdParams& p,
                                              const std::vector<int64_t>& rows, Precision precision,
                                              kernels::Device& device, kernels::Stream& stream);

// From the call's own lse and delta; query rows of dq, key rows of dk and dv.
using ExactRows = std::vector<std::vector<double>>;  // [rows][head_dim]
absl::StatusOr<ExactRows> ExactQueryGradient(const kernels::AttentionBwdParams& p,
                                             const std::vector<int64_t>& rows, Precision precision,
                                             kernels::Device& device, kernels::Stream& stream);
struct ExactKeyGradients {
  ExactRows dk, dv;
};
absl::StatusOr<ExactKeyGradients> ExactKeyGradientRows(const kernels::AttentionBwdParams& p,
                                                       const std::vector<int64_t>& rows,
                                                       Precision precision, kernels::Device& device,
                                                       kernels::Stream& stream);

}  // namespace upipe::gpu_check
