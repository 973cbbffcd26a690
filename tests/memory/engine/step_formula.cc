#include "tests/memory/engine/step_formula.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "engine/optim/optimizer.h"
#include "kernels/device_factory.h"

namespace upipe::testing {

using engine::Place;
using kernels::MemoryTag;
using Output = engine::MemoryPolicy::AttentionOutput;

namespace {

constexpr int64_t kF32 = 4;

int64_t Aligned(int64_t elements) { return (elements + 15) / 16 * 16; }

int64_t ScratchOf(const kernels::OpParams& op) {
  static kernels::DryDevice& device = *kernels::CreateDryDevice("cpu")->release();
  return device.ops().WorkspaceBytes(op);
}

kernels::TagBytes Most(const kernels::TagBytes& a, const kernels::TagBytes& b) {
  kernels::TagBytes most = a;
  for (int tag = 0; tag < kernels::kNumMemoryTags; ++tag) most[tag] = std::max(a[tag], b[tag]);
  return most;
}

}  // namespace

// ---- parameters

int64_t StepFormula::UnitShard(int64_t elements) const {
  return kF32 * Aligned((elements + p_.ranks() - 1) / p_.ranks());
}

int64_t StepFormula::BlockShard() const {
  const int64_t d = p_.hidden_size, f = p_.intermediate_size, dim = p_.head_dim;
  return UnitShard(2 * Aligned(d) + 2 * Aligned(p_.num_heads * dim * d) +
                   2 * Aligned(p_.num_kv_heads * dim * d) + 3 * Aligned(f * d));
}

int64_t StepFormula::EmbeddingShard() const {
  const int64_t d = p_.hidden_size;
  return UnitShard(Aligned(p_.vocab_size * d) + (p_.tied ? Aligned(d) : 0));
}

int64_t StepFormula::HeadShard() const {
  const int64_t d = p_.hidden_size;
  return p_.tied ? 0 : UnitShard(Aligned(p_.vocab_size * d) + Aligned(d));
}

int64_t StepFormula::Shard() const {
  return EmbeddingShard() + p_.num_layers * BlockShard() + HeadShard();
}

// The unit in use and the next, both gathered in the storage type; from the host in bf16 the next
// one's shard passes through in fp32. One rank's fp32 shard on the device is the unit.
int64_t StepFormula::Weights() const {
  const bool gathers = p_.ranks() > 1 || p_.bf16 || OptimizerOnHost();
  const auto gathered = [&](int64_t shard) {
    return gathers ? p_.ranks() * shard / kF32 * p_.Stored() : 0;
  };
  const auto passing = [&](int64_t shard) { return OptimizerOnHost() && p_.bf16 ? shard : 0; };
  // In use, and prefetched meanwhile.
  std::vector<std::pair<int64_t, int64_t>> pairs = {{0, EmbeddingShard()},
                                                    {EmbeddingShard(), BlockShard()},
                                                    {BlockShard(), FinalShard()},
                                                    {FinalShard(), BlockShard()}};
  if (p_.num_layers > 1) pairs.emplace_back(BlockShard(), BlockShard());
  int64_t most = 0;
  for (const auto& [now, next] : pairs) {
    most = std::max(most, gathered(now) + gathered(next) + passing(next));
  }
  return most + (OptimizerOnHost() ? 0 : Shard());
}

// The gradient of the unit in work, and where it becomes a shard on the device: on the host a
// unit's reduced shard leaves while the next unit's gradient is made, so that two are resident. A
// tied embedding is reduced twice; the second sum is formed beside the first.
int64_t StepFormula::Gradients() const {
  const bool shares = p_.ranks() > 1;
  if (!OptimizerOnHost() && !shares) return Shard();
  struct Unit {
    int64_t shard;
    bool again = false;
  };
  std::vector<Unit> units = {{FinalShard()}};
  units.insert(units.end(), p_.num_layers, {BlockShard()});
  units.push_back({EmbeddingShard(), p_.tied});
  int64_t most = 0, leaving = 0;
  for (const auto& [shard, again] : units) {
    const int64_t unit = p_.ranks() * shard;
    const int64_t sum = again && shares ? shard : 0;
    if (!OptimizerOnHost()) {
      most = std::max(most, unit + sum);
      continue;
    }
    most = std::max({most, unit + leaving, unit + (shares ? shard : 0) + sum});
    leaving = shard;
  }
  return most + (OptimizerOnHost() ? 0 : Shard());
}

// Two pieces of at most 1 MiB of a unit's shard, or the gathered step scalars.
int64_t StepFormula::Comm() const {
  const int64_t ranks = p_.ranks();
  if (ranks == 1) return 8;
  const int64_t largest = std::max({BlockShard(), EmbeddingShard(), HeadShard()});
  const int64_t piece = std::min<int64_t>(largest, 1 << 20);
  return std::max(piece * std::min<int64_t>(ranks - 1, 2),
                  ranks * 8 * optim::StepScalarsView::kNumReduced);
}

// ---- layers

int64_t StepFormula::KeptOutput() const { return p_.HeadsOut() + p_.LogSumExp(c_); }

// Kept inputs, and those of a segment that are rebuilt before it goes backward.
int64_t StepFormula::LayerInputs() const {
  const int64_t stride = p_.policy.checkpoint_stride;
  int64_t kept = (p_.num_layers + stride - 1) / stride;
  int64_t most = kept;
  for (int64_t first = (kept - 1) * stride; first >= 0; first -= stride, --kept) {
    const int64_t rebuilt = std::min(stride, p_.num_layers - first) - 1;
    most = std::max(most, kept + rebuilt);
  }
  return most * p_.X();
}

kernels::TagBytes StepFormula::Device() const {
  LiveSet set;
  set.device = Most(layer_.Forward().device, layer_.AttentionBackward().device);
  set.of(MemoryTag::kWeights) = Weights();
  set.of(MemoryTag::kGradients) = Gradients();
  set.of(MemoryTag::kOptimizer) = OptimizerOnHost() ? 0 : 2 * Shard();
  set.of(MemoryTag::kResidual) = (p_.policy.hidden_stream == Place::kHost ? 0 : p_.X()) +
                                 (p_.policy.layer_inputs == Place::kHost ? 0 : LayerInputs());
  if (KeepsOutputs(Output::kDevice)) {
    set.of(MemoryTag::kAttnOut) += (p_.num_layers - 1) * KeptOutput();
  }
  set.of(MemoryTag::kMlp) = layer_.MlpBackward().of(MemoryTag::kMlp);
  set.of(MemoryTag::kLogits) = kF32 * LossTile() * p_.vocab_size;
  set.of(MemoryTag::kComm) = Comm();
  set.of(MemoryTag::kWorkspace) = Workspace();
  return set.device;
}

kernels::TagBytes StepFormula::Host() const {
  LiveSet set;
  set.host = Most(layer_.Forward().host, layer_.AttentionBackward().host);
  set.on_host(MemoryTag::kResidual) = (p_.policy.hidden_stream == Place::kHost ? p_.X() : 0) +
                                      (p_.policy.layer_inputs == Place::kHost ? LayerInputs() : 0);
  if (KeepsOutputs(Output::kHost)) set.on_host(MemoryTag::kAttnOut) = p_.num_layers * KeptOutput();
  if (OptimizerOnHost()) {
    set.on_host(MemoryTag::kWeights) = Shard();
    set.on_host(MemoryTag::kGradients) = Shard();
    set.on_host(MemoryTag::kOptimizer) = 2 * Shard();
    set.on_host(MemoryTag::kWorkspace) =
        static_cast<int64_t>(sizeof(optim::StepScalars)) + ScratchOfSquares();
  }
  return set.host;
}

int64_t StepFormula::Attention() const {
  const int64_t layer =
      std::max(layer_.Forward().Attention(), layer_.AttentionBackward().Attention());
  return layer + (KeepsOutputs(Output::kDevice) ? (p_.num_layers - 1) * KeptOutput() : 0);
}

// ---- tiles and scratch, which the cpu backend states

int64_t StepFormula::ScratchOfProduct(int64_t rows, int64_t columns, int64_t depth) const {
  using kernels::TensorView;
  return ScratchOf(
      kernels::MatmulParams{.a = TensorView::Matrix(nullptr, p_.StoredType(), rows, depth),
                            .b = TensorView::Matrix(nullptr, p_.StoredType(), depth, columns),
                            .c = TensorView::Matrix(nullptr, p_.StoredType(), rows, columns)});
}

int64_t StepFormula::ScratchOfNorm(int64_t rows) const {
  const auto x = kernels::TensorView::Matrix(nullptr, p_.StoredType(), rows, p_.hidden_size);
  return ScratchOf(kernels::RmsNormBwdParams{.x = x, .weight = {}, .dy = x, .dx = x});
}

int64_t StepFormula::ScratchOfRope(int64_t rows) const {
  const auto heads = kernels::TensorView::Tensor3(
      nullptr, p_.StoredType(), {rows, p_.u(), p_.head_dim}, p_.u() * p_.head_dim, p_.head_dim);
  return ScratchOf(kernels::RopeParams{.src = heads, .dst = heads});
}

int64_t StepFormula::ScratchOfSquares() const { return 8 * ((Shard() / kF32 + 16383) / 16384); }

bool StepFormula::StatesWorkspace() const {
  return p_.policy.hidden_stream == Place::kDevice && p_.policy.layer_inputs == Place::kDevice &&
         !OptimizerOnHost();
}

// Positions, tokens, labels, scalars; then the tiles of one pass and the scratch of one op.
int64_t StepFormula::Workspace() const {
  const int64_t n = p_.N(), d = p_.hidden_size, f = p_.intermediate_size, vocab = p_.vocab_size;
  const int64_t resident = (8 + 4 + 4) * n + static_cast<int64_t>(sizeof(optim::StepScalars));
  const int64_t t = Tile(), wide = kF32 * t * d, narrow = p_.Stored() * t * d;
  const int64_t heads = p_.num_heads * p_.head_dim;
  const auto product = [&](int64_t rows, int64_t columns, int64_t depth) {
    return ScratchOfProduct(rows, columns, depth);
  };
  const int64_t mlp_backward =
      wide + 2 * narrow +
      std::max({ScratchOfNorm(t), product(t, d, heads), product(t, f, d), product(d, f, t),
                product(f, d, t), product(t, d, f), product(d, heads, t)});
  const int64_t r = LossTile(), wide_loss = kF32 * r * d, narrow_loss = p_.Stored() * r * d;
  const int64_t loss =
      narrow_loss + std::max({product(r, vocab, d), product(vocab, d, r), 8 * r,
                              wide_loss + std::max(product(r, d, vocab), ScratchOfNorm(r))});
  const int64_t project_back =
      narrow + wide + std::max({ScratchOfNorm(t), product(t, d, heads), product(heads, d, t)});
  const int64_t piece = p_.PieceTokens(), tile = std::min(kTile, piece);
  const int64_t columns = p_.QueryHeads(c_) * p_.head_dim;
  const int64_t side_by_side = p_.QueryHeads(c_) > 1 ? p_.Stored() * tile * columns : 0;
  const int64_t project = p_.Stored() * tile * d + side_by_side +
                          std::max(ScratchOfRope(tile), product(tile, columns, d));
  const int64_t whole = std::max(ScratchOfRope(piece), product(piece, p_.head_dim, d));
  return resident +
         std::max({mlp_backward, loss, project_back, project, whole, ScratchOfSquares()});
}

}  // namespace upipe::testing
