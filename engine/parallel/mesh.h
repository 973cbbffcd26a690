// The mesh of ranks: axes from outermost to innermost dp, fsdp, ring, ulysses. dp and fsdp ranks
// bring sequences of their own; ring and ulysses ranks share one. Pure.
#pragma once

#include <cstdint>
#include <vector>

#include "upipe/v1/job.pb.h"

namespace upipe::parallel {

// Where a rank sits on each axis.
struct Coordinates {
  int dp = 0;
  int fsdp = 0;
  int ring = 0;
  int ulysses = 0;
};

struct Mesh {
  int dp_ranks = 1;
  int fsdp_ranks = 1;
  int ring_ranks = 1;     // R
  int ulysses_ranks = 1;  // C

  // The spec must have passed ValidateJobSpec and WithDefaults.
  static Mesh From(const v1::ParallelSpec& spec);

  int num_ranks() const { return dp_ranks * shard_ranks(); }
  int context_ranks() const { return ring_ranks * ulysses_ranks; }  // CP, of one sequence
  int shard_ranks() const { return fsdp_ranks * context_ranks(); }  // that share all parameters
  int sequence_groups() const { return dp_ranks * fsdp_ranks; }     // sequences at a time

  Coordinates Of(int rank) const;
  int RankAt(const Coordinates& at) const;
  int ContextRank(int rank) const { return rank % context_ranks(); }    // ring * C + ulysses
  int SequenceGroup(int rank) const { return rank / context_ranks(); }  // dp * fsdp_ranks + fsdp

  // Ranks, ascending, that differ from `rank` on the named axes only; `rank` is one of them.
  std::vector<int> ShardGroup(int rank) const;  // fsdp, ring, ulysses
  std::vector<int> DpGroup(int rank) const;
  std::vector<int> RingGroup(int rank) const;
  std::vector<int> UlyssesGroup(int rank) const;
};

}  // namespace upipe::parallel
