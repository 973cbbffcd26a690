// What a rank holds over whole training steps, by tag, as formulas: the layer's live sets
// (layer_formula.h), what the policy keeps of every layer, parameters and their sharding, tiles and
// scratch. One evaluation and one or more optimizer steps, dp = fsdp = 1.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/api/op_table.h"
#include "tests/memory/engine/layer_formula.h"

namespace upipe::testing {

class StepFormula {
 public:
  StepFormula(const Point& point, int rank)
      : p_(point), layer_(point, rank), c_(rank % point.ulysses_ranks) {}

  // Each tag's own peak. The device's workspace is only stated where nothing lives on the host:
  // tiles of host tensors are layer_live_set_test's.
  kernels::TagBytes Device() const;
  kernels::TagBytes Host() const;
  bool StatesWorkspace() const;
  int64_t Attention() const;  // joint peak of the attn_* tags on the device

  // ---- parameters, fp32 bytes of a rank
  int64_t BlockShard() const;
  int64_t EmbeddingShard() const;
  int64_t HeadShard() const;  // 0 when tied
  int64_t Shard() const;
  // Tokens of an MLP tile, and of a loss tile, which ends where the rank's positions jump.
  int64_t Tile() const { return std::min(kTile, p_.N()); }
  int64_t LossTile() const { return std::min(kTile, p_.PieceTokens()); }
  int64_t ScratchOfRope(int64_t rows) const;

 private:
  bool OptimizerOnHost() const { return p_.policy.optimizer == engine::Place::kHost; }
  bool KeepsOutputs(engine::MemoryPolicy::AttentionOutput where) const {
    return p_.policy.attention_output == where;
  }
  int64_t UnitShard(int64_t elements) const;
  int64_t FinalShard() const { return p_.tied ? EmbeddingShard() : HeadShard(); }
  int64_t KeptOutput() const;  // O and log-sum-exp of a layer
  int64_t LayerInputs() const;
  int64_t Weights() const;
  int64_t Gradients() const;
  int64_t Comm() const;
  int64_t Workspace() const;
  int64_t ScratchOfProduct(int64_t rows, int64_t columns, int64_t depth) const;
  int64_t ScratchOfNorm(int64_t rows) const;
  int64_t ScratchOfSquares() const;

  const Point p_;
  const LayerFormula layer_;
  const int c_;
};

}  // namespace upipe::testing
