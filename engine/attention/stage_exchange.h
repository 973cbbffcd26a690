// Brings a turn's heads to the ranks that attend with them and their results home: projection,
// all-to-all among the Ulysses ranks, placement. Everything runs on the side stream. Own tokens of
// own heads are written to their place and never travel.
#pragma once

#include "engine/attention/kv_store.h"
#include "engine/attention/projection.h"

namespace upipe::attention {

// What one Forward or Backward call works on; all borrowed for its length.
struct LayerCall {
  const LayerStreams& streams;
  const LayerViews& views;
  const AttentionLayerParams& params;
  const AttentionWeights& weights;
  const engine::TokenTensor& x;  // [N, d]
  const Sequence& sequence;
  ProjectionShared shared() const {
    return {.params = params, .x = x, .norm = weights.norm, .positions = sequence.positions};
  }
};

// Projects and exchanges the queries of a turn: whole heads land in `queries`.
absl::Status SendQueries(const LayerCall& call, const Turn& turn, const kernels::Buffer& staging,
                         const kernels::Buffer& queries);

// Projects and exchanges the K/V heads that anybody fetches at a stage.
absl::Status FetchKv(const LayerCall& call, int stage, const kernels::Buffer& staging,
                     KvStore& store);

// Forms dO = dh wo of the turn's heads and delta = rowsum(dO * O), and exchanges both.
struct OutputGradientBuffers {
  const kernels::Buffer& staging;
  const kernels::Buffer& dout;         // whole heads land here
  const kernels::Buffer& delta_local;  // [heads of the others, N/n] fp32 to send
  const kernels::Buffer& delta;        // [M/n, own heads] fp32 lands here
};
absl::Status SendOutputGradient(const LayerCall& call, const Turn& turn,
                                const engine::TokenTensor& dh, const engine::TokenTensor& out,
                                const OutputGradientBuffers& buffers);

// Sends the attention output of a turn's heads to where they are attended to once more, for kernels
// that read it: whole heads land in `heads`.
absl::Status ResendOutput(const LayerCall& call, const Turn& turn,
                          const engine::TokenTensor& columns, const kernels::Buffer& staging,
                          const kernels::Buffer& heads);

// Sends whole heads home and puts them into their columns of `columns` [N, H * D]: attention
// outputs as they are, gradients of queries with their rotation undone.
enum class Returned : uint8_t { kOutput, kQueryGradient };
absl::Status ReturnHeads(const LayerCall& call, const Turn& turn, const kernels::Buffer& heads,
                         const kernels::Buffer& staging, Returned what,
                         const engine::TokenTensor& columns);

// Gradients of keys, rotation undone, and of values at their tokens' rank.
struct HomeGradients {
  engine::TokenTensor dk, dv;  // [N, K * D]
  // [N, parallel::NumSumSlots * D] fp32: heads that come home in parts, rounded into dk and dv with
  // the last. Absent where there are none or dk and dv are fp32 themselves.
  engine::TokenTensor dk_sums, dv_sums;
};

// Sends the gradients of K/V heads that anybody releases at a stage home. Parts of one head are
// added in (stage, rank) order.
absl::Status ReturnKvGradients(const LayerCall& call, int stage, const kernels::Buffer& staging,
                               KvStore& store, const HomeGradients& home);

}  // namespace upipe::attention
