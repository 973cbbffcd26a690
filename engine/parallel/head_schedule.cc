#include "engine/parallel/head_schedule.h"

#include <algorithm>
#include <set>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/check.h"
#include "common/status.h"
#include "xxhash.h"

namespace upipe::parallel {
namespace {

using v1::HeadChunkSchedule;

absl::Status CheckParams(const HeadScheduleParams& p) {
  if (p.num_heads < 1 || p.num_kv_heads < 1 || p.num_heads % p.num_kv_heads != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("num_kv_heads ", p.num_kv_heads, " must divide num_heads ", p.num_heads,
                     " so that every group has the same number of query heads"));
  }
  if (p.ulysses_ranks < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("ranks ", p.ulysses_ranks, " must be at least 1"));
  }
  if (p.ring_ranks < 1 || p.query_chunks < 1) {
    return absl::InvalidArgumentError(absl::StrCat(
        "ring_ranks ", p.ring_ranks, " and query_chunks ", p.query_chunks, " must be at least 1"));
  }
  const int64_t most = UlyssesHeadsPerRank(p.num_heads, p.ulysses_ranks);
  if (p.heads_per_rank < 1 || p.heads_per_rank > most) {
    return absl::InvalidArgumentError(
        absl::StrCat(p.heads_per_rank, " query heads per rank and stage: legal is 1 to ceil(",
                     p.num_heads, " heads / ", p.ulysses_ranks, " ranks) = ", most));
  }
  return absl::OkStatus();
}

// K/V slots of one rank: a head keeps its slot from fetch to release; the lowest slot that is free
// by the stage of the fetch is taken.
class SlotTable {
 public:
  int Take(int32_t head, int64_t stage) {
    auto slot = std::find_if(slots_.begin(), slots_.end(), [stage](const Slot& s) {
      return s.head == kNone && s.free_from <= stage;
    });
    if (slot == slots_.end()) slot = slots_.insert(slots_.end(), Slot());
    slot->head = head;
    return static_cast<int>(slot - slots_.begin());
  }
  int Of(int32_t head) const {
    auto slot = std::find_if(slots_.begin(), slots_.end(),
                             [head](const Slot& s) { return s.head == head; });
    UPIPE_CHECK(slot != slots_.end()) << "K/V head " << head << " is not resident";
    return static_cast<int>(slot - slots_.begin());
  }
  // To be taken from `stage` on.
  void Free(int32_t head, int64_t stage) { slots_[Of(head)] = {kNone, stage}; }
  int size() const { return static_cast<int>(slots_.size()); }

 private:
  static constexpr int32_t kNone = -1;
  struct Slot {
    int32_t head = kNone;
    int64_t free_from = 0;
  };
  std::vector<Slot> slots_;
};

bool Contains(const google::protobuf::RepeatedField<int32_t>& list, int32_t value) {
  return std::find(list.begin(), list.end(), value) != list.end();
}

// Fills in what `ulysses_rank` fetches, releases and keeps where, stage by stage. Returns the
// number of slots that takes.
int PlaceKv(HeadChunkSchedule& schedule, int ulysses_rank) {
  const int num_stages = schedule.stages_size();
  const int64_t rest = schedule.overlap() ? 2 : 1;  // stages from a head's last to its slot's next
  SlotTable slots;
  for (int s = 0; s < num_stages; ++s) {
    auto& work = *schedule.mutable_stages(s)->mutable_ranks(ulysses_rank);
    for (int32_t kv : work.kv_heads()) {
      if (s == 0 || !Contains(schedule.stages(s - 1).ranks(ulysses_rank).kv_heads(), kv)) {
        work.add_fetch(kv);
        slots.Take(kv, s);
      }
      work.add_kv_slots(slots.Of(kv));
    }
    for (int32_t kv : work.kv_heads()) {
      if (s + 1 == num_stages ||
          !Contains(schedule.stages(s + 1).ranks(ulysses_rank).kv_heads(), kv)) {
        work.add_release(kv);
        slots.Free(kv, s + rest);
      }
    }
  }
  return slots.size();
}

StageExtents Extents(const HeadChunkSchedule& schedule, int ulysses_rank, bool backward) {
  StageExtents extents;
  extents.kv_slots = schedule.num_kv_slots();
  for (int s = 0; s < schedule.stages_size(); ++s) {
    const auto& stage = schedule.stages(s);
    const int64_t own = stage.ranks(ulysses_rank).query_heads_size();
    int64_t queries = -own, fetched = 0, released = 0;
    for (const auto& work : stage.ranks()) {
      queries += work.query_heads_size();
      released += work.release_size();
    }
    released -= stage.ranks(ulysses_rank).release_size();
    for (const Fetch& fetch : FetchesOf(stage, ulysses_rank)) fetched += fetch.own ? 0 : 1;
    extents.local_heads += own;
    extents.query_heads = std::max(extents.query_heads, own);
    extents.staged_heads =
        std::max({extents.staged_heads, queries, fetched, backward ? released : 0});
  }
  return extents;
}

}  // namespace

int64_t UlyssesHeadsPerRank(int64_t num_heads, int ulysses_ranks) {
  return (num_heads + ulysses_ranks - 1) / ulysses_ranks;
}

absl::StatusOr<HeadChunkSchedule> MakeHeadChunkSchedule(const HeadScheduleParams& p) {
  UPIPE_RETURN_IF_ERROR(CheckParams(p));
  const int64_t group = p.num_heads / p.num_kv_heads;
  const int64_t u = p.heads_per_rank;
  const int64_t num_stages = (UlyssesHeadsPerRank(p.num_heads, p.ulysses_ranks) + u - 1) / u;
  HeadChunkSchedule schedule;
  schedule.set_num_heads(p.num_heads);
  schedule.set_num_kv_heads(p.num_kv_heads);
  schedule.set_ulysses_ranks(p.ulysses_ranks);
  schedule.set_ring_ranks(p.ring_ranks);
  schedule.set_heads_per_rank(u);
  schedule.set_query_chunks(p.query_chunks);
  schedule.set_overlap(p.overlap);
  for (int64_t s = 0; s < num_stages; ++s) {
    auto* stage = schedule.add_stages();
    for (int c = 0; c < p.ulysses_ranks; ++c) {
      const int64_t first = c * p.num_heads / p.ulysses_ranks;  // A_c = [first, last)
      const int64_t last = (c + 1) * p.num_heads / p.ulysses_ranks;
      auto* work = stage->add_ranks();
      for (int64_t h = first + s * u; h < std::min(first + (s + 1) * u, last); ++h) {
        work->add_query_heads(static_cast<int32_t>(h));
        const auto kv = static_cast<int32_t>(h / group);
        if (!Contains(work->kv_heads(), kv)) work->add_kv_heads(kv);
      }
    }
  }
  int num_slots = 0;
  for (int c = 0; c < p.ulysses_ranks; ++c) num_slots = std::max(num_slots, PlaceKv(schedule, c));
  schedule.set_num_kv_slots(num_slots);
  return schedule;
}

uint64_t HashOf(const HeadChunkSchedule& schedule) {
  std::vector<int64_t> canonical = {schedule.num_heads(),      schedule.num_kv_heads(),
                                    schedule.ulysses_ranks(),  schedule.ring_ranks(),
                                    schedule.heads_per_rank(), schedule.query_chunks(),
                                    schedule.num_kv_slots(),   schedule.stages_size()};
  auto append = [&canonical](const google::protobuf::RepeatedField<int32_t>& list) {
    canonical.push_back(list.size());
    canonical.insert(canonical.end(), list.begin(), list.end());
  };
  for (const auto& stage : schedule.stages()) {
    canonical.push_back(stage.ranks_size());
    for (const auto& work : stage.ranks()) {
      append(work.query_heads());
      append(work.kv_heads());
      append(work.fetch());
      append(work.release());
      append(work.kv_slots());
    }
  }
  canonical.push_back(schedule.overlap());
  static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__);
  return XXH64(canonical.data(), canonical.size() * sizeof(int64_t), 0);
}

StageExtents ForwardExtents(const HeadChunkSchedule& schedule, int ulysses_rank) {
  return Extents(schedule, ulysses_rank, /*backward=*/false);
}

StageExtents BackwardExtents(const HeadChunkSchedule& schedule, int ulysses_rank) {
  return Extents(schedule, ulysses_rank, /*backward=*/true);
}

std::vector<Fetch> FetchesOf(const HeadChunkSchedule::Stage& stage, int ulysses_rank) {
  std::set<int32_t> heads;
  for (const auto& work : stage.ranks()) heads.insert(work.fetch().begin(), work.fetch().end());
  const auto& own = stage.ranks(ulysses_rank);
  std::vector<Fetch> fetches;
  int64_t staged = 0;
  for (int32_t head : heads) {
    Fetch fetch{.kv_head = head};
    fetch.own = std::find(own.fetch().begin(), own.fetch().end(), head) != own.fetch().end();
    if (fetch.own) {
      const auto index =
          std::find(own.kv_heads().begin(), own.kv_heads().end(), head) - own.kv_heads().begin();
      fetch.slot = own.kv_slots(static_cast<int>(index));
    } else {
      fetch.staged_index = staged++;
    }
    fetches.push_back(fetch);
  }
  return fetches;
}

std::vector<Release> ReleasesOf(const HeadChunkSchedule& schedule, int stage_index) {
  std::set<int32_t> released_before;
  for (int s = 0; s < stage_index; ++s) {
    for (const auto& work : schedule.stages(s).ranks()) {
      released_before.insert(work.release().begin(), work.release().end());
    }
  }
  std::vector<Release> releases;
  const auto& stage = schedule.stages(stage_index);
  for (int c = 0; c < stage.ranks_size(); ++c) {
    const auto& work = stage.ranks(c);
    for (int32_t kv : work.release()) {
      const auto index =
          std::find(work.kv_heads().begin(), work.kv_heads().end(), kv) - work.kv_heads().begin();
      const bool first = released_before.insert(kv).second;
      releases.push_back({c, kv, work.kv_slots(static_cast<int>(index)), first});
    }
  }
  return releases;
}

bool SharesKvHeads(const HeadChunkSchedule& schedule) {
  std::set<int32_t> released;
  for (const auto& stage : schedule.stages()) {
    for (const auto& work : stage.ranks()) {
      for (int32_t kv : work.release()) {
        if (!released.insert(kv).second) return true;
      }
    }
  }
  return false;
}

}  // namespace upipe::parallel
