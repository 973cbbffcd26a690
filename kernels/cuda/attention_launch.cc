#include "kernels/cuda/attention_launch.h"

#include <algorithm>
#include <map>

namespace upipe::kernels::cuda {
namespace {

// Largest distance that the window allows; one of all positions hides nothing.
int64_t Reach(const AttentionMask& mask) {
  return std::min(mask.window.value_or(mask.total), mask.total) - 1;
}

// Cuts the rows into launches of as many documents as fit. `launch` holds what all have in common.
void ForEachRowLaunch(const AttentionMask& mask, PositionRun rows, LaunchRows& launch,
                      const std::function<void(const LaunchRows&)>& body) {
  const std::vector<int64_t>& starts = *mask.document_starts;
  const int64_t num_rows = rows.end - rows.begin;
  for (int64_t first = 0; first < num_rows; first = launch.end_row) {
    const auto document =
        std::upper_bound(starts.begin(), starts.end(), rows.begin + first) - starts.begin() - 1;
    const auto num_starts = static_cast<int64_t>(starts.size());
    const int64_t end_document = std::min(num_starts, document + kLaunchDocuments);
    const int64_t end_position = end_document == num_starts ? mask.total : starts[end_document];
    int64_t end = std::min(num_rows, end_position - rows.begin);
    if (end < num_rows) end -= end % kAttentionTileRows;
    launch.first_row = first;
    launch.end_row = end;
    launch.num_documents = static_cast<int32_t>(end_document - document);
    std::copy(starts.begin() + document, starts.begin() + end_document, launch.bounds);
    launch.bounds[launch.num_documents] = end_position;
    body(launch);
  }
}

}  // namespace

void ForEachQueryLaunch(const AttentionMask& mask, PositionRun queries, PositionRun keys,
                        const std::function<void(const LaunchRows&)>& launch) {
  LaunchRows rows = {.row_position = queries.begin,
                     .column_position = keys.begin,
                     .num_columns = keys.end - keys.begin,
                     .before = Reach(mask),
                     .after = mask.causal ? 0 : Reach(mask)};
  ForEachRowLaunch(mask, queries, rows, launch);
}

void ForEachKeyLaunch(const AttentionMask& mask, PositionRun keys, PositionRun queries,
                      const std::function<void(const LaunchRows&)>& launch) {
  LaunchRows rows = {.row_position = keys.begin,
                     .column_position = queries.begin,
                     .num_columns = queries.end - queries.begin,
                     .before = mask.causal ? 0 : Reach(mask),
                     .after = Reach(mask)};
  ForEachRowLaunch(mask, keys, rows, launch);
}

void ForEachHeadLaunch(const std::vector<int32_t>& kv_slot,
                       const std::function<void(const LaunchHeads&)>& launch) {
  const auto num_heads = static_cast<int32_t>(kv_slot.size());
  for (int32_t first = 0; first < num_heads; first += kLaunchHeads) {
    LaunchHeads heads = {.first_head = first,
                         .num_heads = std::min(kLaunchHeads, num_heads - first)};
    std::copy_n(kv_slot.begin() + first, heads.num_heads, heads.kv_slot);
    launch(heads);
  }
}

void ForEachSlotLaunch(const std::vector<int32_t>& kv_slot, const std::vector<int32_t>& grad_slot,
                       const std::function<void(const LaunchSlots&)>& launch) {
  std::map<int32_t, std::vector<int32_t>> heads_of;
  for (size_t head = 0; head < grad_slot.size(); ++head) {
    heads_of[grad_slot[head]].push_back(static_cast<int32_t>(head));
  }
  LaunchSlots slots;
  const auto flush = [&] {
    if (slots.num_slots > 0) launch(slots);
    slots = {};
  };
  for (const auto& [slot, heads] : heads_of) {
    for (size_t first = 0; first < heads.size(); first += kLaunchHeads) {
      const auto count = static_cast<int32_t>(std::min<size_t>(kLaunchHeads, heads.size() - first));
      int32_t used = slots.begin[slots.num_slots];
      if (used + count > kLaunchHeads) {
        flush();
        used = 0;
      }
      slots.grad_slot[slots.num_slots] = slot;
      slots.kv_slot[slots.num_slots] = kv_slot[heads[first]];
      std::copy_n(heads.begin() + static_cast<int64_t>(first), count, slots.head + used);
      slots.begin[++slots.num_slots] = used + count;
    }
  }
  flush();
}

}  // namespace upipe::kernels::cuda
