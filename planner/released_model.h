// Live sets of the released UPipe and Ulysses code in closed form, read from its sources, to
// compare plans of this engine with. Apart from every plan: no policy of the engine is priced here,
// and nothing here is measured.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "upipe/v1/device.pb.h"
#include "upipe/v1/job.pb.h"

namespace upipe::planner {

enum class ReleasedCode {
  kUpipe,    // one query head per rank and stage: U = C, not to be chosen
  kUlysses,  // all heads at once, with the same checkpoints, tiles and fused loss
};

struct ReleasedSetup {
  ReleasedCode code = ReleasedCode::kUpipe;
  v1::ModelSpec model;    // with its defaults (common/spec/model_rules.h)
  int64_t context = 0;    // L
  int ulysses_ranks = 1;  // C
  int ring_ranks = 1;     // R
  v1::DeviceFile device;  // memory, context, communicator and fragmentation are read
};

// Bytes of one rank under one name.
struct ReleasedTerm {
  std::string name;
  std::string formula;  // in the symbols of docs/memory.md
  std::string source;   // section of docs/memory.md that tells where it was read
  int64_t bytes = 0;
};

// A moment of a layer, or the loss: what it holds beside what is held throughout.
struct ReleasedMoment {
  std::string name;
  std::vector<ReleasedTerm> terms;
  int64_t bytes = 0;  // of the terms
};

struct ReleasedMemory {
  std::vector<ReleasedTerm> throughout;
  std::vector<ReleasedMoment> moments;  // in the order of a step
  size_t peak_moment = 0;               // index of the largest
  int64_t peak_bytes = 0;  // what PyTorch's allocator would report: no context, no NCCL
  int64_t device_bytes =
      0;                   // of the card: the above over its unusable share, context, communicators
  int64_t host_bytes = 0;  // of one rank: layer inputs that wait in host memory
  bool fits = false;       // device_bytes <= device.memory
  int64_t context_max = 0;  // the longest that fits; 0: none does
};

// Pure. InvalidArgument where the released code stops too: heads that the Ulysses ranks do not
// divide, a context that is no multiple of twice the ranks.
absl::StatusOr<ReleasedMemory> ReleasedMemoryOf(const ReleasedSetup& setup);

// What a stage of U = C heads saves of attention's intermediate tensors, as shares of Ulysses'.
struct AttentionSaving {
  double paper = 0;     // 1 - U / H: every tensor counted as if K = H
  double forward = 0;   // q, k, v, o with the K/V heads there are
  double backward = 0;  // the same of the backward pass, with FlashAttention 3's buffers
};
AttentionSaving ReleasedAttentionSaving(const v1::ModelSpec& model, int ulysses_ranks);

// The terms as a table, the moment of the peak, whether it fits, the longest context, and for UPipe
// both counts of the saving.
std::string RenderReleased(const ReleasedSetup& setup, const ReleasedMemory& memory);

}  // namespace upipe::planner
