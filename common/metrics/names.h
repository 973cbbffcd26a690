// Values that labels and members of reports take: what a step's time is split into, how ranks talk
// to each other, what memory is for. A test holds the tags equal to those of kernels/api.
#pragma once

#include <array>

namespace upipe {

// StageSeconds.stage, in the order people read them.
inline constexpr std::array kStageNames = {"projection", "exchange",  "attention", "return",
                                           "mlp",        "loss",      "embedding", "weights",
                                           "gradients",  "optimizer", "offload"};

// StepTimeline.Lane, as people read them.
inline constexpr std::array kLaneNames = {"compute", "side",     "ring",
                                          "copies",  "host ops", "weights"};

// CommUse.operation.
inline constexpr std::array kOperationNames = {"all_to_all",     "ring",       "all_gather",
                                               "reduce_scatter", "all_reduce", "barrier"};

// TagBytes.tag.
inline constexpr std::array kTagNames = {
    "weights",  "gradients", "optimizer", "residual", "attn_q", "attn_kv",   "attn_exchange",
    "attn_out", "attn_grad", "mlp",       "logits",   "comm",   "workspace", "checkpoint"};

// MemoryUsage of a rank is kept for each.
inline constexpr std::array kPoolNames = {"device", "host"};

}  // namespace upipe
