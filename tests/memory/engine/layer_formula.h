// The live sets of one layer as formulas: SCHEDULE "Live sets" for R = 1 and n = 1, and the same
// reasoning for the other points. One per pass: forward, MLP backward, attention backward.
#pragma once

#include <cstdint>

#include "kernels/api/allocator.h"
#include "tests/memory/engine/schedule_point.h"

namespace upipe::testing {

inline constexpr int64_t kTile = 512;  // tokens worked on at a time where no whole length is needed

// What an attention kernel costs beside its operands.
struct KernelScratch {
  bool resends_output = false;    // backward: O of the stage's heads beside dO
  bool narrow_gradients = false;  // backward: dq, dk, dv in the storage type too
};
inline constexpr KernelScratch kOwnKernel = {};
inline constexpr KernelScratch kCudnn = {.resends_output = true, .narrow_gradients = true};

// Most bytes of a pass. Of the workspace only tiles are counted: scratch of ops other than
// attention is not the schedule's.
struct LiveSet {
  kernels::TagBytes device = {};  // each tag's own peak
  kernels::TagBytes host = {};
  int64_t device_total = 0;  // at the moment when most is held
  int64_t host_total = 0;

  int64_t& of(kernels::MemoryTag tag) { return device[static_cast<int>(tag)]; }
  int64_t& on_host(kernels::MemoryTag tag) { return host[static_cast<int>(tag)]; }
  int64_t Attention() const;  // of all attn_* tags on the device
};

class LayerFormula {
 public:
  LayerFormula(const Point& point, int rank, const KernelScratch& kernel = kOwnKernel)
      : p_(point),
        c_(rank % point.ulysses_ranks),
        ring_(rank / point.ulysses_ranks),
        kernel_(kernel) {}

  LiveSet Forward() const;
  LiveSet MlpBackward() const;
  LiveSet AttentionBackward() const;

  // ---- pieces, bytes
  int64_t WholeHeads(int64_t element_bytes) const;  // of the rank's own heads of a turn
  int64_t Staging() const;                          // of the others' heads
  int64_t KeysOrValues() const;         // of the stage, and of the next one under overlap
  int64_t KeyOrValueGradients() const;  // fp32, of the stage
  int64_t Delta() const;                // at the head's rank, and staged at the token's
  int64_t ReturnedKv() const;           // dk and dv of the own tokens
  int64_t SumsOfParts() const;  // fp32, of K/V heads that come home in parts, until the last

 private:
  bool HiddenOnHost() const { return p_.policy.hidden_stream == engine::Place::kHost; }
  bool InputsOnHost() const { return p_.policy.layer_inputs == engine::Place::kHost; }
  bool KvOnHost() const { return p_.policy.stage_kv == engine::Place::kHost; }
  int64_t Sets() const;        // of a turn's inputs
  bool MergesOutputs() const;  // a turn meets its keys in several parts
  int64_t KvOnTheHost(int64_t element_bytes, int64_t heads) const;
  // One tile of each host tensor in work and one on its way, where there is more than one.
  static int64_t HostTiles(int64_t tokens, int64_t bytes_per_token);
  int64_t NormalisedTile() const;
  int64_t ProjectionTiles(bool x_on_host) const;
  int64_t TurnWorkspace(bool backward) const;
  int64_t ProjectBackWorkspace() const;
  int64_t KernelWorkspace() const;

  const Point p_;
  const int c_;     // Ulysses rank
  const int ring_;  // ring rank
  const KernelScratch kernel_;
};

}  // namespace upipe::testing
