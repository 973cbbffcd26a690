// Attention on tensors stored as bf16, with the processor's own bf16 products (AVX-512 BF16): the
// counterparts of the Highway blocks in attention_fwd.cc and attention_bwd.cc. Call them only while
// HasBf16Products().
#pragma once

#include <cstdint>

#include "kernels/api/op_params.h"
#include "kernels/cpu/attention_tiles.h"

namespace upipe::kernels::cpu {

// A run of queries of one head, at most Bf16QueryBlock(head_dim), which see keys within `reach`
// only.
void AttentionForwardBlockBf16(const AttentionFwdParams& p, int64_t head, PositionRun queries,
                               PositionRun reach);
int64_t Bf16QueryBlock(int64_t head_dim);

// All heads of a K/V head, the queries of one chunk against the keys of one chunk.
void AttentionBackwardChunkBf16(const AttentionBwdParams& p, const KvHeadSlots& slots,
                                PositionRun query_chunk, PositionRun key_chunk);

}  // namespace upipe::kernels::cpu
