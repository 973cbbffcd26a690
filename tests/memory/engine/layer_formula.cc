#include "tests/memory/engine/layer_formula.h"

#include <algorithm>

namespace upipe::testing {

using kernels::MemoryTag;

namespace {

constexpr int64_t kF32 = 4;

int64_t Sum(const kernels::TagBytes& bytes) {
  int64_t sum = 0;
  for (int64_t b : bytes) sum += b;
  return sum;
}

}  // namespace

int64_t LiveSet::Attention() const {
  int64_t sum = 0;
  for (int tag = 0; tag < kernels::kNumMemoryTags; ++tag) {
    if (IsAttention(static_cast<MemoryTag>(tag))) sum += device[tag];
  }
  return sum;
}

int64_t LayerFormula::Sets() const {
  return p_.policy.overlap && p_.NumStages() * p_.query_chunks > 1 ? 2 : 1;
}

bool LayerFormula::MergesOutputs() const {
  return p_.ring_ranks > 1 || (KvOnHost() && p_.query_chunks > 1);
}

int64_t LayerFormula::WholeHeads(int64_t element_bytes) const {
  return element_bytes * p_.ChunkTokens() * p_.QueryHeads(c_) * p_.head_dim;
}

// The own block does not travel (ADR 7): (C - 1) / C q where C divides H.
int64_t LayerFormula::Staging() const {
  return p_.Stored() * p_.PieceTokens() * p_.StagedQueryHeads(c_) * p_.head_dim;
}

int64_t LayerFormula::KeysOrValues() const {
  const int64_t token = p_.Stored() * p_.head_dim;
  if (KvOnHost()) {  // a part in work and one on its way; under overlap the next stage's, arriving
    const bool arrives_beside = p_.policy.overlap && p_.FetchesAfterTheFirst(c_);
    return (arrives_beside ? 3 : 2) * p_.ChunkTokens() * p_.StageKvHeads() * token;
  }
  if (p_.ring_ranks == 1) return p_.M() * p_.KvSlots() * token;
  if (p_.policy.ring_keeps_kv) return p_.ring_ranks * p_.M() * p_.KvSlots() * token;
  return p_.M() * (p_.KvSlots() + p_.StageKvHeads()) * token;  // shards of the stage on their way
}

int64_t LayerFormula::KeyOrValueGradients() const {
  const int64_t token = kF32 * p_.head_dim;
  if (KvOnHost()) return 2 * p_.ChunkTokens() * p_.StageKvHeads() * token;
  if (p_.ring_ranks == 1) return p_.M() * p_.StageKvHeads() * token;
  // Kept shards are reduced beside the next stage's attention: dead K/V hold what others send, so
  // that dk, dv have nowhere to move to and hold a slot as long as K/V.
  if (p_.policy.ring_keeps_kv) return p_.ring_ranks * p_.M() * p_.KvSlots() * token;
  return 2 * p_.M() * p_.StageKvHeads() * token;
}

int64_t LayerFormula::KvOnTheHost(int64_t element_bytes, int64_t heads) const {
  return KvOnHost() ? element_bytes * p_.M() * heads * p_.head_dim : 0;
}

int64_t LayerFormula::Delta() const {
  return Sets() * kF32 * p_.ChunkTokens() * p_.QueryHeads(c_) +
         kF32 * p_.PieceTokens() * p_.StagedQueryHeads(c_);
}

int64_t LayerFormula::ReturnedKv() const {
  return 2 * p_.Stored() * p_.N() * p_.num_kv_heads * p_.head_dim;
}

// Beside fp32 gradients they are not needed: those are the sums.
int64_t LayerFormula::SumsOfParts() const {
  return p_.bf16 ? 2 * kF32 * p_.N() * p_.HeadsInParts() * p_.head_dim : 0;
}

int64_t LayerFormula::HostTiles(int64_t tokens, int64_t bytes_per_token) {
  const int64_t tile = std::min(kTile, tokens);
  return (tokens > tile ? 2 : 1) * tile * bytes_per_token;
}

int64_t LayerFormula::NormalisedTile() const {
  return p_.Stored() * std::min(kTile, p_.PieceTokens()) * p_.hidden_size;
}

// A tile of the normalised stream, and a rank's heads side by side before they are rotated.
int64_t LayerFormula::ProjectionTiles(bool x_on_host) const {
  int64_t widest = 0;
  for (int c = 0; c < p_.ulysses_ranks; ++c) widest = std::max(widest, p_.QueryHeads(c));
  const int64_t tile = std::min(kTile, p_.PieceTokens());
  const int64_t apart = widest > 1 ? p_.Stored() * tile * widest * p_.head_dim : 0;
  return NormalisedTile() + apart +
         (x_on_host ? HostTiles(p_.PieceTokens(), p_.Stored() * p_.hidden_size) : 0);
}

// dq of the queries and dk, dv of the K/V heads of one call: a run of each.
int64_t LayerFormula::KernelWorkspace() const {
  if (!kernel_.narrow_gradients) return 0;
  const int64_t keys = KvOnHost() ? p_.ChunkTokens() : p_.M();  // those of shard R - 1 are one run
  const bool two_runs = ring_ < p_.ring_ranks - 1;
  const int64_t queries = two_runs ? std::min(p_.ChunkTokens(), p_.M() / 2) : p_.ChunkTokens();
  int64_t most = 0;
  for (int64_t s = 0; s < p_.NumStages(); ++s) {
    const auto q = static_cast<int64_t>(p_.Q(s, c_).size());
    const auto kv = static_cast<int64_t>(p_.V(s, c_).size());
    most = std::max(most, p_.Stored() * p_.head_dim * (queries * q + 2 * keys * kv));
  }
  return most;
}

int64_t LayerFormula::TurnWorkspace(bool backward) const {
  int64_t most = ProjectionTiles(backward ? InputsOnHost() : HiddenOnHost());
  if (backward) most = std::max(most, KernelWorkspace());
  if (!HiddenOnHost()) return most;
  const int64_t head = p_.Stored() * p_.head_dim;
  const int64_t piece = p_.PieceTokens();
  int64_t widest = 0;
  for (int c = 0; c < p_.ulysses_ranks; ++c) widest = std::max(widest, p_.QueryHeads(c));
  most = std::max(most, HostTiles(piece, widest * head));  // results to their columns
  if (!backward) return most;
  // dh and the columns of O that dO and delta are formed of; a gradient of K/V to its column.
  const int64_t columns = p_.Stored() * p_.hidden_size + p_.StageQueryHeads() * head;
  // The last part of a sum is added and rounded: a tile of either.
  const int64_t returned = head + (SumsOfParts() > 0 ? kF32 * p_.head_dim : 0);
  return std::max({most, HostTiles(piece, columns), HostTiles(piece, returned)});
}

int64_t LayerFormula::ProjectBackWorkspace() const {
  const int64_t tile = std::min(kTile, p_.N());
  const int64_t hidden = p_.Stored() * p_.hidden_size;
  const int64_t kv_columns = p_.num_kv_heads * p_.head_dim;
  int64_t bytes = tile * (hidden + kF32 * p_.hidden_size);  // normalised stream, its gradient
  if (InputsOnHost()) bytes += HostTiles(p_.N(), hidden);
  if (HiddenOnHost()) {  // dq, dk and dv, dh
    bytes +=
        HostTiles(p_.N(), p_.Stored() * (p_.num_heads * p_.head_dim + 2 * kv_columns) + hidden);
  }
  return bytes;
}

LiveSet LayerFormula::Forward() const {
  LiveSet set;
  const int64_t stored = p_.Stored(), tile = std::min(kTile, p_.N());
  const int64_t result = MergesOutputs() ? kF32 : stored;
  (HiddenOnHost() ? set.on_host(MemoryTag::kResidual) : set.of(MemoryTag::kResidual)) = p_.X();
  (HiddenOnHost() ? set.on_host(MemoryTag::kAttnOut) : set.of(MemoryTag::kAttnOut)) = p_.HeadsOut();
  const int64_t kept = Sum(set.device) + p_.LogSumExp(c_);
  set.of(MemoryTag::kAttnQ) = Sets() * WholeHeads(stored);
  set.of(MemoryTag::kAttnKv) = 2 * KeysOrValues();
  set.of(MemoryTag::kAttnExchange) = Staging();
  set.of(MemoryTag::kAttnOut) += p_.LogSumExp(c_) + WholeHeads(result);
  set.on_host(MemoryTag::kAttnKv) = 2 * KvOnTheHost(stored, p_.KvSlots());
  const int64_t stage = Sum(set.device) + TurnWorkspace(/*backward=*/false);
  set.of(MemoryTag::kMlp) = 2 * stored * tile * p_.intermediate_size;
  // The sum with the residual in fp32, the normalised stream.
  const int64_t hidden = stored * p_.hidden_size;
  int64_t mlp = tile * (kF32 * p_.hidden_size + hidden);
  if (HiddenOnHost()) mlp += HostTiles(p_.N(), stored * p_.num_heads * p_.head_dim + hidden);
  set.of(MemoryTag::kWorkspace) = std::max(TurnWorkspace(/*backward=*/false), mlp);
  set.device_total = std::max(stage, kept + set.of(MemoryTag::kMlp) + mlp);
  set.host_total = Sum(set.host);
  return set;
}

LiveSet LayerFormula::MlpBackward() const {
  LiveSet set;
  const int64_t stored = p_.Stored(), tile = std::min(kTile, p_.N());
  const int64_t hidden = stored * p_.hidden_size;
  (InputsOnHost() ? set.on_host(MemoryTag::kResidual) : set.of(MemoryTag::kResidual)) = p_.X();
  (HiddenOnHost() ? set.on_host(MemoryTag::kResidual) : set.of(MemoryTag::kResidual)) += p_.X();
  (HiddenOnHost() ? set.on_host(MemoryTag::kAttnOut) : set.of(MemoryTag::kAttnOut)) = p_.HeadsOut();
  set.of(MemoryTag::kAttnOut) += p_.LogSumExp(c_);
  set.of(MemoryTag::kMlp) = 3 * stored * tile * p_.intermediate_size;
  int64_t& workspace = set.of(MemoryTag::kWorkspace);
  workspace = tile * (kF32 * p_.hidden_size + 2 * hidden);  // wide; the middle stream, normalised
  if (InputsOnHost()) workspace += HostTiles(p_.N(), hidden);
  if (HiddenOnHost()) {
    workspace += HostTiles(p_.N(), stored * p_.num_heads * p_.head_dim + hidden);
  }
  set.device_total = Sum(set.device);
  set.host_total = Sum(set.host);
  return set;
}

LiveSet LayerFormula::AttentionBackward() const {
  LiveSet set;
  const int64_t stored = p_.Stored();
  (InputsOnHost() ? set.on_host(MemoryTag::kResidual) : set.of(MemoryTag::kResidual)) = p_.X();
  (HiddenOnHost() ? set.on_host(MemoryTag::kResidual) : set.of(MemoryTag::kResidual)) += p_.X();
  (HiddenOnHost() ? set.on_host(MemoryTag::kAttnOut) : set.of(MemoryTag::kAttnOut)) = p_.HeadsOut();
  (HiddenOnHost() ? set.on_host(MemoryTag::kAttnGrad) : set.of(MemoryTag::kAttnGrad)) =
      ReturnedKv();
  const int64_t kept = Sum(set.device);
  (HiddenOnHost() ? set.on_host(MemoryTag::kAttnGrad) : set.of(MemoryTag::kAttnGrad)) +=
      SumsOfParts();
  set.of(MemoryTag::kAttnQ) = Sets() * WholeHeads(stored);
  set.of(MemoryTag::kAttnKv) = 2 * KeysOrValues();
  set.of(MemoryTag::kAttnExchange) = Staging();
  set.of(MemoryTag::kAttnOut) += p_.LogSumExp(c_) + Delta();
  const int64_t inputs = Sets() * WholeHeads(stored);
  if (kernel_.resends_output) set.of(MemoryTag::kAttnOut) += inputs;
  set.of(MemoryTag::kAttnGrad) += inputs + WholeHeads(kF32) + 2 * KeyOrValueGradients();
  set.on_host(MemoryTag::kAttnKv) = 2 * KvOnTheHost(stored, p_.KvSlots());
  set.on_host(MemoryTag::kAttnGrad) += 2 * KvOnTheHost(kF32, p_.StageKvHeads());
  const int64_t stage = Sum(set.device) + TurnWorkspace(/*backward=*/true);
  set.of(MemoryTag::kWorkspace) =
      std::max(TurnWorkspace(/*backward=*/true), ProjectBackWorkspace());
  set.device_total = std::max(stage, kept + ProjectBackWorkspace());
  set.host_total = Sum(set.host);
  return set;
}

}  // namespace upipe::testing
