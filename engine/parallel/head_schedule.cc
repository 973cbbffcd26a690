#include "engine/parallel/head_schedule.h"

#include <algorithm>
#include <map>
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

// Slots of heads: a head keeps its slot; the lowest slot that is free by the time of the call is
// taken. Times are stages, or any numbers that ascend.
class SlotTable {
 public:
  int Take(int32_t head, int64_t time) {
    auto slot = std::find_if(slots_.begin(), slots_.end(), [time](const Slot& s) {
      return s.head == kNone && s.free_from <= time;
    });
    if (slot == slots_.end()) slot = slots_.insert(slots_.end(), Slot());
    slot->head = head;
    return static_cast<int>(slot - slots_.begin());
  }
  int Of(int32_t head) const {
    auto slot = std::find_if(slots_.begin(), slots_.end(),
                             [head](const Slot& s) { return s.head == head; });
    UPIPE_CHECK(slot != slots_.end()) << "K/V head " << head << " has no slot";
    return static_cast<int>(slot - slots_.begin());
  }
  // To be taken from `time` on.
  void Free(int32_t head, int64_t time) { slots_[Of(head)] = {kNone, time}; }
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

// Fills in what `ulysses_rank` fetches and releases, stage by stage.
void AddFetchAndRelease(HeadChunkSchedule& schedule, int ulysses_rank) {
  const int num_stages = schedule.stages_size();
  for (int s = 0; s < num_stages; ++s) {
    auto& work = *schedule.mutable_stages(s)->mutable_ranks(ulysses_rank);
    const auto resident_at = [&](int stage, int32_t kv) {
      return stage >= 0 && stage < num_stages &&
             Contains(schedule.stages(stage).ranks(ulysses_rank).kv_heads(), kv);
    };
    for (int32_t kv : work.kv_heads()) {
      if (!resident_at(s - 1, kv)) work.add_fetch(kv);
      if (!resident_at(s + 1, kv)) work.add_release(kv);
    }
  }
}

// Slots of a rank's heads from fetch to release, `rest` stages from a head's last to its slot's
// next. `count` is that rank's.
StageSlots PlaceHeads(const HeadChunkSchedule& schedule, int ulysses_rank, int64_t rest) {
  StageSlots placed;
  SlotTable table;
  for (int s = 0; s < schedule.stages_size(); ++s) {
    const auto& work = schedule.stages(s).ranks(ulysses_rank);
    std::vector<int32_t>& slots = placed.slots.emplace_back();
    for (int32_t kv : work.kv_heads()) {
      slots.push_back(Contains(work.fetch(), kv) ? table.Take(kv, s) : table.Of(kv));
    }
    for (int32_t kv : work.release()) table.Free(kv, s + rest);
  }
  placed.count = table.size();
  return placed;
}

// All releases of a schedule, by stage, and the sum slots they take.
struct AllReleases {
  std::vector<std::vector<Release>> of_stage;
  int num_sum_slots = 0;
};

AllReleases FindReleases(const HeadChunkSchedule& schedule) {
  std::map<int32_t, int> parts_of, seen;
  for (const auto& stage : schedule.stages()) {
    for (const auto& work : stage.ranks()) {
      for (int32_t kv : work.release()) ++parts_of[kv];
    }
  }
  AllReleases all;
  SlotTable sums;
  int64_t time = 0;
  for (const auto& stage : schedule.stages()) {
    std::vector<Release>& releases = all.of_stage.emplace_back();
    for (int c = 0; c < stage.ranks_size(); ++c) {
      for (int32_t kv : stage.ranks(c).release()) {
        const int part = ++seen[kv], parts = parts_of[kv];
        Release release{.rank = c, .kv_head = kv, .first = part == 1, .last = part == parts};
        if (parts > 1) {
          release.sum_slot = release.first ? sums.Take(kv, time) : sums.Of(kv);
          if (release.last) sums.Free(kv, time + 1);
        }
        releases.push_back(release);
        ++time;
      }
    }
  }
  all.num_sum_slots = sums.size();
  return all;
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
  for (int c = 0; c < p.ulysses_ranks; ++c) {
    AddFetchAndRelease(schedule, c);
    const StageSlots kv = PlaceHeads(schedule, c, p.overlap ? 2 : 1);
    num_slots = std::max(num_slots, kv.count);
    for (int s = 0; s < num_stages; ++s) {
      auto& work = *schedule.mutable_stages(s)->mutable_ranks(c);
      work.mutable_kv_slots()->Add(kv.slots[s].begin(), kv.slots[s].end());
    }
  }
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
    fetch.own = Contains(own.fetch(), head);
    if (!fetch.own) fetch.staged_index = staged++;
    fetches.push_back(fetch);
  }
  return fetches;
}

StageSlots StageSlotsOf(const HeadChunkSchedule& schedule, int ulysses_rank) {
  StageSlots slots = PlaceHeads(schedule, ulysses_rank, /*rest=*/1);
  for (int c = 0; c < schedule.ulysses_ranks(); ++c) {
    slots.count = std::max(slots.count, PlaceHeads(schedule, c, /*rest=*/1).count);
  }
  return slots;
}

std::vector<Release> ReleasesOf(const HeadChunkSchedule& schedule, int stage_index) {
  return FindReleases(schedule).of_stage[stage_index];
}

int NumSumSlots(const HeadChunkSchedule& schedule) { return FindReleases(schedule).num_sum_slots; }

}  // namespace upipe::parallel
