// What memory is for. Every allocation carries one tag, whichever pool it is from; reports, plans
// and metrics split the bytes of each pool by it.
#pragma once

#include <array>
#include <cstdint>

namespace upipe::kernels {

enum class MemoryTag : uint8_t {
  kWeights,       // parameter shard and gathered units
  kGradients,     // gradient shard and the unit being accumulated
  kOptimizer,     // AdamW moments
  kResidual,      // hidden stream, its gradient, checkpointed layer inputs
  kAttnQ,         // stage queries at the head's rank, [tokens, heads, head_dim]
  kAttnKv,        // stage keys and values at the head's rank
  kAttnExchange,  // staging of all-to-all sends and receives
  kAttnOut,       // attention outputs of all local tokens, log-sum-exp, delta, stage output
  kAttnGrad,      // stage dO, dq, dk, dv and the returned dk, dv of local tokens
  kMlp,           // MLP tile intermediates
  kLogits,        // loss tile logits
  kComm,          // scratch of collectives
  kWorkspace,     // op scratch, normalised tiles, tokens, labels, positions, step scalars
  kCheckpoint,    // copy of weights and moments that is being written
};
inline constexpr int kNumMemoryTags = 14;

inline constexpr std::array<const char*, kNumMemoryTags> kMemoryTagNames = {
    "weights",  "gradients", "optimizer", "residual", "attn_q", "attn_kv",   "attn_exchange",
    "attn_out", "attn_grad", "mlp",       "logits",   "comm",   "workspace", "checkpoint"};

constexpr const char* NameOf(MemoryTag tag) { return kMemoryTagNames[static_cast<int>(tag)]; }

// The tags whose joint peak is called "intermediate attention bytes".
constexpr bool IsAttention(MemoryTag tag) {
  return tag >= MemoryTag::kAttnQ && tag <= MemoryTag::kAttnGrad;
}

}  // namespace upipe::kernels
