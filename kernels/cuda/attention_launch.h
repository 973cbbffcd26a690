// How one attention call becomes kernel launches: the part that is arithmetic on positions, without
// CUDA. Slots of heads and document bounds travel as kernel parameters, so a call copies nothing
// and needs no scratch; one with more heads or documents than fit takes several launches. Their
// number depends on the mask, no buffer does.
//
// "Rows" are what a block of threads owns and "columns" what it loops over: queries and keys, or in
// the kernel that makes dk and dv, keys and queries.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "kernels/api/op_params.h"

namespace upipe::kernels::cuda {

inline constexpr int kAttentionTileRows = 128;
inline constexpr int kLaunchDocuments = 320;
inline constexpr int kLaunchHeads = 64;
static_assert(kLaunchDocuments > kAttentionTileRows, "a tile of rows fits one launch");

// The rows of one launch and what each of them sees: columns from `before` positions before its own
// to `after` positions after it, within its document.
struct LaunchRows {
  int64_t first_row = 0;  // of the tensor; a multiple of kAttentionTileRows
  int64_t end_row = 0;
  int64_t row_position = 0;     // of row 0 of the tensor
  int64_t column_position = 0;  // of column 0 of the tensor
  int64_t num_columns = 0;
  int64_t before = 0;
  int64_t after = 0;
  // Document i of the launch is positions [bounds[i], bounds[i + 1]).
  int32_t num_documents = 0;
  int64_t bounds[kLaunchDocuments + 1] = {};

  int64_t num_tiles() const { return (end_row - first_row - 1) / kAttentionTileRows + 1; }
};

// Heads first_head, first_head + 1, ... and the K/V slot each reads.
struct LaunchHeads {
  int32_t first_head = 0;
  int32_t num_heads = 0;
  int32_t kv_slot[kLaunchHeads] = {};
};

// Gradient slots and the heads that add to each: head[begin[i]] to head[begin[i + 1]], ascending.
struct LaunchSlots {
  int32_t num_slots = 0;
  int32_t kv_slot[kLaunchHeads] = {};
  int32_t grad_slot[kLaunchHeads] = {};
  int32_t begin[kLaunchHeads + 1] = {};
  int32_t head[kLaunchHeads] = {};
};

// Query rows over key columns, ascending; nothing where there are no queries.
void ForEachQueryLaunch(const AttentionMask& mask, PositionRun queries, PositionRun keys,
                        const std::function<void(const LaunchRows&)>& launch);
// Key rows over query columns.
void ForEachKeyLaunch(const AttentionMask& mask, PositionRun keys, PositionRun queries,
                      const std::function<void(const LaunchRows&)>& launch);

void ForEachHeadLaunch(const std::vector<int32_t>& kv_slot,
                       const std::function<void(const LaunchHeads&)>& launch);
// A slot of more heads than one launch takes is in several, one after the other.
void ForEachSlotLaunch(const std::vector<int32_t>& kv_slot, const std::vector<int32_t>& grad_slot,
                       const std::function<void(const LaunchSlots&)>& launch);

}  // namespace upipe::kernels::cuda
