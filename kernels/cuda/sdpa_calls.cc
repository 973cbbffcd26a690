#include "kernels/cuda/sdpa_calls.h"

#include <algorithm>
#include <bit>
#include <map>
#include <utility>

#include "common/check.h"

namespace upipe::kernels {
namespace {

constexpr int64_t kHeadDimMax = 256;
constexpr int64_t kHeadDimMultiple = 16;  // 8 would do, but not with a bound on ragged totals
constexpr int64_t kAlignmentBytes = 16;

// A piece at its global positions, and how its mask lies.
struct Placed {
  int64_t query, query_end, key, key_end;
};

bool Aligned(const TensorView& view) {
  const int64_t element = SizeOf(view.dtype);
  return reinterpret_cast<uintptr_t>(view.data) % kAlignmentBytes == 0 &&
         view.stride[0] * element % kAlignmentBytes == 0 &&
         view.stride[1] * element % kAlignmentBytes == 0;
}

template <typename Params>
bool Takes(const Params& p) {
  const int64_t dim = p.q.shape[2];
  return p.q.dtype == DType::kBFloat16 && dim % kHeadDimMultiple == 0 && dim <= kHeadDimMax &&
         (p.q.shape[0] > 1 || p.k.shape[0] > 1) && (p.mask.causal || !p.mask.window) &&
         Aligned(p.q) && Aligned(p.k) && Aligned(p.v);
}

class Planner {
 public:
  template <typename Params>
  explicit Planner(const Params& p)
      : queries_(p.queries), keys_(p.keys), mask_(p.mask), kv_slot_(p.kv_slot) {
    if (mask_.window && *mask_.window < mask_.total) window_ = mask_.window;
  }

  SdpaCalls Plan() {
    const std::vector<int64_t>& starts = *mask_.document_starts;
    // The documents that both runs reach.
    auto next = std::upper_bound(starts.begin(), starts.end(), queries_.begin);
    for (auto start = std::prev(next); start != starts.end() && *start < queries_.end; ++start) {
      const int64_t end = start + 1 == starts.end() ? mask_.total : start[1];
      Add({std::max(queries_.begin, *start), std::min(queries_.end, end),
           std::max(keys_.begin, *start), std::min(keys_.end, end)});
    }
    for (auto& [mask, pieces] : groups_) AddCalls(mask, pieces);
    FindBlind();
    return std::move(result_);
  }

 private:
  // Queries and keys of one document. Drops what sees nothing, cuts at the last key.
  void Add(Placed at) {
    if (mask_.causal) {
      at.key_end = std::min(at.key_end, at.query_end);
      at.query = std::max(at.query, at.key);
    }
    if (window_) {
      at.key = std::max(at.key, at.query - *window_ + 1);
      at.query_end = std::min(at.query_end, at.key_end - 1 + *window_);
    }
    if (at.query >= at.query_end || at.key >= at.key_end) return;
    if (mask_.causal && at.query < at.key_end - 1 && at.key_end < at.query_end) {
      AddPiece({at.query, at.key_end, at.key, at.key_end});
      at.query = at.key_end;
      if (window_) at.key = std::max(at.key, at.query - *window_ + 1);
    }
    AddPiece(at);
  }

  void AddPiece(const Placed& at) {
    // A query beside its own key alone needs no diagonal; of packed documents it goes with the
    // rest.
    const bool diagonal = bounded() ? at.key_end == at.query_end : at.key_end - 1 > at.query;
    const bool causal = mask_.causal && diagonal;
    UPIPE_CHECK(!causal || at.key_end == at.query_end) << "a causal piece ends at its last query";
    SdpaMask mask = {.causal = causal};
    if (window_ && (at.query_end - 1 - at.key >= *window_ || (bounded() && causal))) {
      // Without a diagonal at its end the piece is looked at from its top left corner.
      mask.left = causal ? *window_ : *window_ - (at.query - at.key);
    }
    groups_[mask].push_back({at.query - queries_.begin, at.query_end - queries_.begin,
                             at.key - keys_.begin, at.key_end - keys_.begin});
  }

  void AddCalls(SdpaMask mask, const std::vector<SdpaPiece>& pieces) {
    for (const SdpaPiece& piece : pieces) {
      if (mask.causal && piece.keys() > piece.queries()) mask.bottom_right = true;
      AddSeeing({piece.query, piece.query_end});
    }
    if (mask.causal && bounded()) mask.bottom_right = keys_.begin < queries_.begin;
    // Lengths in device memory lift cuDNN's rules that a left bound needs no fewer keys than
    // queries, and that there is more than one of either.
    const SdpaPiece& one = pieces[0];
    const bool ragged = bounded() || pieces.size() > 1 ||
                        (mask.left && one.queries() > one.keys()) ||
                        (one.queries() == 1 && one.keys() == 1);
    for (size_t first = 0; first < pieces.size(); first += kSdpaDocumentsMax) {
      const size_t last = std::min(pieces.size(), first + kSdpaDocumentsMax);
      const std::vector<SdpaPiece> some(pieces.begin() + first, pieces.begin() + last);
      for (SdpaHeads& heads : Heads(ragged)) {
        result_.calls.push_back({mask, std::move(heads), some, ragged});
      }
    }
  }

  // Ragged: one head a call, since ragged grouped queries cost scratch of all of them. Dense: all
  // heads where they share K/V heads evenly, else those that share one.
  std::vector<SdpaHeads> Heads(bool ragged) const {
    const int count = static_cast<int>(kv_slot_.size());
    std::vector<SdpaHeads> runs;
    for (int head = 0; head < count; ++head) {
      if (!ragged && !runs.empty() && runs.back().kv_slots[0] == kv_slot_[head]) {
        ++runs.back().heads;
      } else {
        runs.push_back({.head = head, .kv_slots = {kv_slot_[head]}});
      }
    }
    if (ragged || runs.size() < 2) return runs;
    SdpaHeads all = {.head = 0, .heads = count};
    const int32_t step = runs[1].kv_slots[0] - runs[0].kv_slots[0];
    for (const SdpaHeads& run : runs) {
      const int32_t slot = run.kv_slots[0];
      if (run.heads != runs[0].heads || step <= 0) return runs;
      if (!all.kv_slots.empty() && slot - all.kv_slots.back() != step) return runs;
      all.kv_slots.push_back(slot);
    }
    return {all};
  }

  // Packed documents: what kinds of calls there are, and their plans, depends on the runs alone.
  bool bounded() const { return mask_.documents_max > 1; }

  void AddSeeing(SdpaCalls::Rows rows) { result_.seeing.push_back(rows); }

  // Joins the rows that see keys, and takes the rest for blind.
  void FindBlind() {
    std::vector<SdpaCalls::Rows>& seeing = result_.seeing;
    std::sort(seeing.begin(), seeing.end(),
              [](const auto& a, const auto& b) { return a.begin < b.begin; });
    std::vector<SdpaCalls::Rows> joined;
    for (const SdpaCalls::Rows& rows : seeing) {
      if (!joined.empty() && joined.back().end == rows.begin) {
        joined.back().end = rows.end;
      } else {
        joined.push_back(rows);
      }
    }
    seeing = std::move(joined);
    int64_t at = 0;
    for (const SdpaCalls::Rows& rows : seeing) {
      if (rows.begin > at) result_.blind.push_back({at, rows.begin});
      at = rows.end;
    }
    const int64_t rows = queries_.end - queries_.begin;
    if (at < rows) result_.blind.push_back({at, rows});
  }

  const PositionRun queries_;
  const PositionRun keys_;
  const AttentionMask& mask_;
  const std::vector<int32_t>& kv_slot_;
  std::optional<int64_t> window_;  // where it can hide anything
  std::map<SdpaMask, std::vector<SdpaPiece>> groups_;
  SdpaCalls result_;
};

}  // namespace

bool SdpaTakes(const AttentionFwdParams& p) {
  return Takes(p) && (p.o.dtype == DType::kFloat32 || Aligned(p.o));
}

bool SdpaTakes(const AttentionBwdParams& p) {
  return Takes(p) && p.o.present() && Aligned(p.o) && Aligned(p.dout);
}

SdpaCalls SdpaCallsOf(const AttentionFwdParams& p) { return Planner(p).Plan(); }
SdpaCalls SdpaCallsOf(const AttentionBwdParams& p) { return Planner(p).Plan(); }

int64_t SdpaBatch(int64_t documents) {
  for (const int64_t batch : {int64_t{1}, int64_t{8}, int64_t{64}}) {
    if (documents <= batch) return batch;
  }
  return kSdpaDocumentsMax;
}

int64_t SdpaLength(int64_t longest, int64_t rows) {
  constexpr uint64_t kShortest = 1024;
  const uint64_t length = std::max(kShortest, std::bit_ceil(static_cast<uint64_t>(longest)));
  return std::min(static_cast<int64_t>(length), rows);
}

}  // namespace upipe::kernels
