// Op calls of the sizes a model makes, on tensors of the check's device: what is timed, run twice
// for its bits, and asked for its scratch.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "tools/gpu_check/check_device.h"

namespace upipe::gpu_check {

struct SizedCall {
  kernels::OpParams params;
  std::vector<kernels::TensorView> results;
  // Puts the results back to what they were before the call; what it does not set, the op writes.
  std::function<absl::Status()> reset = [] { return absl::OkStatus(); };
};

struct CallSpec {
  std::string name;  // with its sizes
  std::function<absl::StatusOr<SizedCall>(CheckDevice&)> make;
};

// Ops that memory bandwidth bounds: tensors far beyond what caches hold, or a part of that.
std::vector<CallSpec> ElementwiseCalls(bool small, int64_t part = 1);
// Products: projections, MLP tiles, their gradients, the tile of the language-model head.
std::vector<CallSpec> MatmulCalls(bool small);

// One causal document of `tokens`, head_dim 128, every head with K/V of its own, as a head-chunk
// stage has it.
struct AttentionSize {
  int64_t tokens, heads;
};
std::vector<AttentionSize> AttentionSizes(bool small);
std::string ToString(const AttentionSize& size);

struct AttentionCalls {
  kernels::AttentionFwdParams forward;
  kernels::AttentionBwdParams backward;  // from the forward's lse, once it has run
  kernels::RowDotParams delta;           // to be run between the two
};
// `queries` over `keys`, positions of one document; bf16, o too.
struct AttentionShape {
  kernels::PositionRun queries, keys;
  int64_t heads = 1, head_dim = 128;
  std::optional<int64_t> window = {};
  double q_stddev = 1;
};
absl::StatusOr<AttentionCalls> MakeAttention(const AttentionShape& shape, CheckDevice& device);

}  // namespace upipe::gpu_check
