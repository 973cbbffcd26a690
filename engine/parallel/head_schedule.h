// The head-chunk schedule: which query heads each rank attends to at each stage, which K/V heads it
// fetches and when their gradients go home. Pure functions of (H, K, C, u, overlap); the one
// abstraction that UPipe, Ulysses, Ring, the hybrids and FPDT are points of (arXiv 2602.21196;
// docs/architecture.md). Heads are in Hugging Face order and never permuted.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "upipe/v1/plan.pb.h"

namespace upipe::parallel {

struct HeadScheduleParams {
  int64_t num_heads = 0;       // H
  int64_t num_kv_heads = 0;    // K, divides H
  int ulysses_ranks = 1;       // C
  int64_t heads_per_rank = 1;  // u, 1 <= u <= ceil(H / C)
  int ring_ranks = 1;          // R
  int64_t query_chunks = 1;    // n
  // A stage's K/V heads arrive while the stage before attends: they may not take the slots it
  // frees.
  bool overlap = false;
};

// InvalidArgument naming the number that failed and the legal range.
absl::StatusOr<v1::HeadChunkSchedule> MakeHeadChunkSchedule(const HeadScheduleParams& params);

// u of the one-stage point: ceil(H / C).
int64_t UlyssesHeadsPerRank(int64_t num_heads, int ulysses_ranks);

// 64-bit hash of a canonical encoding (every number as a little-endian int64 in field order, lists
// preceded by their length), independent of protobuf's serialisation.
uint64_t HashOf(const v1::HeadChunkSchedule& schedule);

// Elements of a stage's buffers, in units of head_dim x tokens; maxima over the stages of the
// schedule. `ulysses_rank` is 0 .. C - 1.
struct StageExtents {
  // Of one rank: q, o, dO, dq of a query chunk hold [query_heads, M / n, head_dim].
  int64_t query_heads = 0;
  // Of the other Ulysses ranks: staging of a chunk holds [staged_heads, N / n, head_dim].
  int64_t staged_heads = 0;
  int64_t kv_slots = 0;     // k, v hold [kv_slots, M, head_dim]
  int64_t local_heads = 0;  // heads of the rank over all stages: rows of the log-sum-exp
};
// Forward staging: queries of the other ranks, or the K/V heads that only they fetch. Backward
// staging also receives what they release.
StageExtents ForwardExtents(const v1::HeadChunkSchedule& schedule, int ulysses_rank);
StageExtents BackwardExtents(const v1::HeadChunkSchedule& schedule, int ulysses_rank);

// Where the K/V heads of a stage lie in what only the stage in work has room for: dk and dv, the
// ring's rooms, parts on the device. A slot is free for the next stage as soon as a head is
// released, overlap or not.
struct StageSlots {
  int count = 0;                            // most of any Ulysses rank
  std::vector<std::vector<int32_t>> slots;  // [stage][of its kv_heads]
};
StageSlots StageSlotsOf(const v1::HeadChunkSchedule& schedule, int ulysses_rank);

// K/V heads somebody fetches at a stage, ascending: each is projected once by every token owner,
// into `ulysses_rank`'s own slot where it fetches the head itself, else into staging.
struct Fetch {
  int32_t kv_head = 0;
  bool own = false;          // fetched by `ulysses_rank`
  int64_t staged_index = 0;  // among the others, when not
};
std::vector<Fetch> FetchesOf(const v1::HeadChunkSchedule::Stage& stage, int ulysses_rank);

// One K/V head coming home. A head that is released several times is a sum of parts, which keeps a
// slot from the first to the last.
struct Release {
  int rank = 0;  // Ulysses
  int32_t kv_head = 0;
  bool first = false;  // no earlier stage or rank releases the head: written, else added
  bool last = false;   // no later one does
  int32_t sum_slot = kNoSum;

  static constexpr int32_t kNoSum = -1;  // first and last
};
// (Ulysses rank, head) pairs of a stage in ascending order.
std::vector<Release> ReleasesOf(const v1::HeadChunkSchedule& schedule, int stage_index);

// Sums that are under way at once at most; 0 where every K/V head is released once.
int NumSumSlots(const v1::HeadChunkSchedule& schedule);

}  // namespace upipe::parallel
