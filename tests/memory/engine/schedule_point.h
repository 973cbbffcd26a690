// A point of the schedule space with a memory policy and a model's shape, and what SCHEDULE says of
// it: sizes in tokens, lists of heads, extents of buffers. Worked out here from SCHEDULE's
// definitions alone, so that the engine is compared with the document and not with itself.
#pragma once

#include <cstdint>
#include <set>
#include <string>

#include "engine/place.h"
#include "kernels/api/dtype.h"
#include "upipe/v1/job.pb.h"

namespace upipe::testing {

struct Point {
  v1::Method method = v1::METHOD_UPIPE;
  int ulysses_ranks = 1;        // C
  int ring_ranks = 1;           // R
  int64_t heads_per_stage = 1;  // u, of one rank; only upipe's, the others take all in one stage
  int64_t query_chunks = 1;     // n
  int64_t num_heads = 4;        // H
  int64_t num_kv_heads = 2;     // K
  int64_t head_dim = 8;         // D
  int64_t hidden_size = 24;     // d
  int64_t intermediate_size = 40;
  int64_t vocab_size = 37;
  int64_t num_layers = 2;
  int64_t context = 24;  // L
  bool tied = false;
  bool bf16 = false;
  engine::MemoryPolicy policy = {};

  // ---- tokens
  int ranks() const { return ulysses_ranks * ring_ranks; }
  int64_t padded_context() const;  // Lp
  int64_t N() const { return padded_context() / ranks(); }
  int64_t M() const { return padded_context() / ring_ranks; }
  int64_t PieceTokens() const { return N() / query_chunks; }
  int64_t ChunkTokens() const { return M() / query_chunks; }

  // ---- heads; c is a Ulysses rank
  int64_t u() const;
  int64_t G() const { return num_heads / num_kv_heads; }
  int64_t NumStages() const;
  using Heads = std::set<int64_t>;
  Heads A(int c) const;
  Heads Q(int64_t stage, int c) const;
  Heads V(int64_t stage, int c) const;        // empty before the first stage and after the last
  Heads Release(int64_t stage, int c) const;  // V(s, c) - V(s + 1, c)

  // ---- extents
  int64_t QueryHeads(int c) const;        // most of a stage at the rank
  int64_t StagedQueryHeads(int c) const;  // most of a stage at the other ranks
  int64_t StageQueryHeads() const;        // most of a stage at all ranks: U where C divides H
  // K/V heads the fullest rank has room for: those of a stage; under overlap the next stage's too.
  int64_t KvSlots() const;
  int64_t StageKvHeads() const;  // most of a stage, of the fullest rank
  bool FetchesAfterTheFirst(int c) const;
  // K/V heads that come home in several parts, from the first of theirs to the last, in (stage,
  // rank) order: most at once.
  int64_t HeadsInParts() const;

  // ---- bytes of an element
  int64_t Stored() const { return bf16 ? 2 : 4; }
  kernels::DType StoredType() const {
    return bf16 ? kernels::DType::kBFloat16 : kernels::DType::kFloat32;
  }

  // ---- units of SCHEDULE's live sets
  int64_t X() const { return Stored() * N() * hidden_size; }
  int64_t HeadsOut() const { return Stored() * N() * num_heads * head_dim; }           // hh
  int64_t StageQuery() const { return HeadsOut() * u() * ulysses_ranks / num_heads; }  // q
  int64_t LogSumExp(int c) const { return 4 * M() * static_cast<int64_t>(A(c).size()); }

  v1::JobSpec Spec() const;
};

// "upipe C4 R2 u1 n1 bf16", for messages.
std::string Describe(const Point& point);

}  // namespace upipe::testing
