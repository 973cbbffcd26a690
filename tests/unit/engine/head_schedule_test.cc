// The head-chunk schedule against its definition, written a second time here from the formulas,
// over every small combination of heads, K/V heads, ranks and heads per stage and some large ones.
#include "engine/parallel/head_schedule.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <functional>
#include <map>
#include <set>
#include <vector>

#include "absl/strings/str_cat.h"
#include "google/protobuf/message.h"
#include "xxhash.h"

namespace upipe::parallel {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using Heads = std::vector<int32_t>;

// The definitions, with sets and no cleverness.
struct Definition {
  int64_t h, k, c, u;
  bool overlap = false;

  int64_t group() const { return h / k; }
  int64_t stages() const { return ((h + c - 1) / c + u - 1) / u; }
  Heads HeadsOf(int64_t rank) const {
    Heads heads;
    for (int64_t head = rank * h / c; head < (rank + 1) * h / c; ++head) {
      heads.push_back(static_cast<int32_t>(head));
    }
    return heads;
  }
  Heads Queries(int64_t stage, int64_t rank) const {
    Heads queries;
    const Heads heads = HeadsOf(rank);
    for (int64_t i = stage * u; i < stage * u + u && i < static_cast<int64_t>(heads.size()); ++i) {
      queries.push_back(heads[i]);
    }
    return queries;
  }
  std::set<int32_t> Kv(int64_t stage, int64_t rank) const {
    std::set<int32_t> kv;
    if (stage < 0 || stage >= stages()) return kv;
    for (int32_t head : Queries(stage, rank)) kv.insert(static_cast<int32_t>(head / group()));
    return kv;
  }
  Heads Difference(int64_t stage, int64_t other_stage, int64_t rank) const {
    const auto kv = Kv(stage, rank), other = Kv(other_stage, rank);
    Heads difference;
    std::set_difference(kv.begin(), kv.end(), other.begin(), other.end(),
                        std::back_inserter(difference));
    return difference;
  }
  Heads Fetch(int64_t stage, int64_t rank) const { return Difference(stage, stage - 1, rank); }
  Heads Release(int64_t stage, int64_t rank) const { return Difference(stage, stage + 1, rank); }
  int64_t CutsInsideGroups() const {
    std::set<int64_t> cuts;
    for (int64_t rank = 1; rank < c; ++rank) {
      const int64_t cut = rank * h / c;
      if (cut > 0 && cut < h && cut % group() != 0) cuts.insert(cut);
    }
    return static_cast<int64_t>(cuts.size());
  }
  std::string Name() const {
    return absl::StrCat("H", h, " K", k, " C", c, " u", u, overlap ? " overlap" : "");
  }
  absl::StatusOr<v1::HeadChunkSchedule> Make() const {
    return MakeHeadChunkSchedule({.num_heads = h,
                                  .num_kv_heads = k,
                                  .ulysses_ranks = static_cast<int>(c),
                                  .heads_per_rank = u,
                                  .overlap = overlap});
  }
};

void AddAllU(std::vector<Definition>& all, int64_t h, int64_t k, int64_t c) {
  for (int64_t u = 1; u <= (h + c - 1) / c; ++u) {
    for (bool overlap : {false, true}) all.push_back({h, k, c, u, overlap});
  }
}

std::vector<Definition> AllDefinitions() {
  std::vector<Definition> all;
  for (int64_t h = 1; h <= 12; ++h) {
    for (int64_t k = 1; k <= h; ++k) {
      if (h % k != 0) continue;
      for (int64_t c = 1; c <= 10; ++c) AddAllU(all, h, k, c);
    }
  }
  for (const auto& [h, k, c] : std::vector<std::array<int64_t, 3>>{{28, 4, 8},
                                                                   {64, 8, 8},
                                                                   {32, 8, 8},
                                                                   {40, 8, 6},
                                                                   {96, 8, 16},
                                                                   {36, 12, 5},
                                                                   {128, 1, 7},
                                                                   {60, 20, 16}}) {
    AddAllU(all, h, k, c);
  }
  return all;
}

template <typename List>
Heads ToHeads(const List& list) {
  return {list.begin(), list.end()};
}

TEST(HeadSchedule, ListsFollowTheDefinition) {
  for (const Definition& def : AllDefinitions()) {
    SCOPED_TRACE(def.Name());
    const auto schedule = def.Make();
    ASSERT_TRUE(schedule.ok()) << schedule.status();
    EXPECT_EQ(schedule->num_heads(), def.h);
    EXPECT_EQ(schedule->num_kv_heads(), def.k);
    EXPECT_EQ(schedule->ulysses_ranks(), def.c);
    EXPECT_EQ(schedule->ring_ranks(), 1);
    EXPECT_EQ(schedule->heads_per_rank(), def.u);
    EXPECT_EQ(schedule->query_chunks(), 1);
    EXPECT_EQ(schedule->overlap(), def.overlap);
    ASSERT_EQ(schedule->stages_size(), def.stages());
    std::map<int32_t, int> times_attended;
    for (int64_t s = 0; s < def.stages(); ++s) {
      ASSERT_EQ(schedule->stages(s).ranks_size(), def.c);
      for (int64_t c = 0; c < def.c; ++c) {
        const auto& work = schedule->stages(s).ranks(c);
        const auto kv = def.Kv(s, c);
        ASSERT_EQ(ToHeads(work.query_heads()), def.Queries(s, c)) << "stage " << s << " rank " << c;
        ASSERT_EQ(ToHeads(work.kv_heads()), Heads(kv.begin(), kv.end()))
            << "stage " << s << " rank " << c;
        ASSERT_EQ(ToHeads(work.fetch()), def.Fetch(s, c)) << "stage " << s << " rank " << c;
        ASSERT_EQ(ToHeads(work.release()), def.Release(s, c)) << "stage " << s << " rank " << c;
        for (int32_t head : work.query_heads()) ++times_attended[head];
      }
    }
    ASSERT_EQ(static_cast<int64_t>(times_attended.size()), def.h);
    for (const auto& [head, times] : times_attended) ASSERT_EQ(times, 1) << "head " << head;
  }
}

TEST(HeadSchedule, EachRankFetchesAndReleasesAKvHeadOnce) {
  for (const Definition& def : AllDefinitions()) {
    SCOPED_TRACE(def.Name());
    const auto schedule = *def.Make();
    int64_t fetches = 0;
    for (int64_t c = 0; c < def.c; ++c) {
      std::multiset<int32_t> fetched, released;
      std::set<int32_t> needed;
      for (const auto& stage : schedule.stages()) {
        const auto& work = stage.ranks(c);
        fetched.insert(work.fetch().begin(), work.fetch().end());
        released.insert(work.release().begin(), work.release().end());
        for (int32_t head : work.query_heads()) needed.insert(head / def.group());
      }
      const std::multiset<int32_t> once(needed.begin(), needed.end());
      ASSERT_EQ(fetched, once) << "rank " << c;
      ASSERT_EQ(released, once) << "rank " << c;
      fetches += static_cast<int64_t>(fetched.size());
    }
    ASSERT_EQ(fetches, def.k + def.CutsInsideGroups());
  }
}

TEST(HeadSchedule, ResidentKvHeadsStayWithinTheBoundAndSlotsNeverCollide) {
  for (const Definition& def : AllDefinitions()) {
    SCOPED_TRACE(def.Name());
    const auto schedule = *def.Make();
    const int64_t g = def.group();
    int64_t most = 0;              // resident at a stage
    int64_t most_with_before = 0;  // at a stage and the one before
    for (int64_t c = 0; c < def.c; ++c) {
      std::map<int32_t, int32_t> slot_of_head;  // of the resident heads
      std::set<int32_t> used_before;            // slots of the stage before
      for (const auto& stage : schedule.stages()) {
        const auto& work = stage.ranks(c);
        ASSERT_EQ(work.kv_slots_size(), work.kv_heads_size());
        std::set<int32_t> in_use;
        for (int i = 0; i < work.kv_heads_size(); ++i) {
          const int32_t slot = work.kv_slots(i);
          ASSERT_GE(slot, 0);
          ASSERT_LT(slot, schedule.num_kv_slots());
          ASSERT_TRUE(in_use.insert(slot).second) << "slot " << slot << " holds two heads";
          const auto [it, fresh] = slot_of_head.insert({work.kv_heads(i), slot});
          ASSERT_EQ(it->second, slot) << "head " << work.kv_heads(i) << " moved while resident";
        }
        ASSERT_EQ(slot_of_head.size(), in_use.size());
        most = std::max(most, static_cast<int64_t>(in_use.size()));
        in_use.insert(used_before.begin(), used_before.end());
        most_with_before = std::max(most_with_before, static_cast<int64_t>(in_use.size()));
        used_before.clear();
        used_before.insert(work.kv_slots().begin(), work.kv_slots().end());
        for (int32_t head : work.release()) slot_of_head.erase(head);
      }
      ASSERT_TRUE(slot_of_head.empty()) << "rank " << c << " never releases a head";
    }
    ASSERT_EQ(schedule.num_kv_slots(), def.overlap ? most_with_before : most);
    ASSERT_LE(most, (def.u - 1 + g - 1) / g + 1);
    if (def.k % def.c != 0) continue;
    if (g % def.u == 0) {
      ASSERT_EQ(most, 1);
    } else if (def.u % g == 0) {
      ASSERT_EQ(most, def.u / g);
    }
  }
}

// While stage s attends, the K/V heads of stage s + 1 arrive.
TEST(HeadSchedule, WithOverlapNothingArrivesInASlotThatTheStageBeforeUsesOrFrees) {
  int64_t taken_again = 0;
  for (const Definition& def : AllDefinitions()) {
    if (!def.overlap) continue;
    SCOPED_TRACE(def.Name());
    const auto schedule = *def.Make();
    for (int c = 0; c < def.c; ++c) {
      std::set<int32_t> ever_used;
      for (int s = 0; s < schedule.stages_size(); ++s) {
        const auto& work = schedule.stages(s).ranks(c);
        for (int32_t head : work.fetch()) {
          const Heads heads = ToHeads(work.kv_heads());
          const int32_t slot = work.kv_slots(
              static_cast<int>(std::find(heads.begin(), heads.end(), head) - heads.begin()));
          if (s > 0) {
            const auto& before = schedule.stages(s - 1).ranks(c).kv_slots();
            ASSERT_EQ(std::count(before.begin(), before.end(), slot), 0)
                << "rank " << c << " stage " << s << " head " << head << " slot " << slot;
          }
          taken_again += ever_used.count(slot);
        }
        ever_used.insert(work.kv_slots().begin(), work.kv_slots().end());
      }
    }
  }
  EXPECT_GT(taken_again, 0) << "slots are never taken again, so memory grows with the heads";
}

// What only the stage in work has room for: as many slots as a stage has heads, overlap or not.
TEST(HeadSchedule, StageSlotsAreAsManyAsAStageHasKvHeads) {
  for (const Definition& def : AllDefinitions()) {
    SCOPED_TRACE(def.Name());
    const auto schedule = *def.Make();
    size_t most = 0;
    for (int c = 0; c < def.c; ++c) {
      const StageSlots placed = StageSlotsOf(schedule, c);
      std::map<int32_t, int32_t> slot_of_head;  // of the resident heads
      for (int s = 0; s < schedule.stages_size(); ++s) {
        const auto& work = schedule.stages(s).ranks(c);
        std::set<int32_t> in_use;
        ASSERT_EQ(placed.slots[s].size(), static_cast<size_t>(work.kv_heads_size()));
        for (int i = 0; i < work.kv_heads_size(); ++i) {
          const int32_t slot = placed.slots[s][i];
          ASSERT_TRUE(slot >= 0 && slot < placed.count && in_use.insert(slot).second) << slot;
          const auto [it, fresh] = slot_of_head.insert({work.kv_heads(i), slot});
          ASSERT_EQ(it->second, slot) << "head " << work.kv_heads(i) << " moved while resident";
        }
        most = std::max(most, in_use.size());
        for (int32_t head : work.release()) slot_of_head.erase(head);
      }
    }
    ASSERT_EQ(static_cast<size_t>(StageSlotsOf(schedule, 0).count), most);
  }
}

TEST(HeadSchedule, ReleasesComeInStageAndRankOrderAndOnlyTheEarliestIsFirst) {
  for (const Definition& def : AllDefinitions()) {
    SCOPED_TRACE(def.Name());
    const auto schedule = *def.Make();
    std::set<int32_t> seen, ended;
    for (int64_t s = 0; s < def.stages(); ++s) {
      const std::vector<Release> releases = ReleasesOf(schedule, static_cast<int>(s));
      size_t next = 0;
      for (int64_t c = 0; c < def.c; ++c) {
        for (int32_t head : def.Release(s, c)) {
          ASSERT_LT(next, releases.size());
          const Release& release = releases[next++];
          ASSERT_EQ(release.rank, c);
          ASSERT_EQ(release.kv_head, head);
          ASSERT_EQ(release.first, seen.insert(head).second)
              << "head " << head << " stage " << s << " rank " << c;
          ASSERT_EQ(ended.count(head), 0u) << "head " << head << " is released after its last";
          if (release.last) ended.insert(head);
        }
      }
      ASSERT_EQ(next, releases.size());
    }
    ASSERT_EQ(static_cast<int64_t>(seen.size()), def.k) << "a K/V head's gradient never comes home";
    ASSERT_EQ(ended, seen);
  }
}

TEST(HeadSchedule, ExtentsAreTheMaximaOverStages) {
  for (const Definition& def : AllDefinitions()) {
    SCOPED_TRACE(def.Name());
    const auto schedule = *def.Make();
    for (int64_t c = 0; c < def.c; ++c) {
      int64_t forward_staged = 0, backward_staged = 0;
      for (int64_t s = 0; s < def.stages(); ++s) {
        // Of the other ranks; heads that this rank fetches too lie in its own slots.
        int64_t queries = 0, releases = 0;
        std::set<int32_t> fetched;
        for (int64_t other = 0; other < def.c; ++other) {
          if (other == c) continue;
          queries += static_cast<int64_t>(def.Queries(s, other).size());
          releases += static_cast<int64_t>(def.Release(s, other).size());
          for (int32_t head : def.Fetch(s, other)) fetched.insert(head);
        }
        for (int32_t head : def.Fetch(s, c)) fetched.erase(head);
        forward_staged = std::max({forward_staged, queries, static_cast<int64_t>(fetched.size())});
        backward_staged = std::max({backward_staged, forward_staged, releases});
      }
      const int64_t own = static_cast<int64_t>(def.HeadsOf(c).size());
      for (const StageExtents& extents : {ForwardExtents(schedule, static_cast<int>(c)),
                                          BackwardExtents(schedule, static_cast<int>(c))}) {
        ASSERT_EQ(extents.query_heads, std::min(own, def.u));
        ASSERT_EQ(extents.local_heads, own);
        ASSERT_EQ(extents.kv_slots, schedule.num_kv_slots());
      }
      ASSERT_EQ(ForwardExtents(schedule, static_cast<int>(c)).staged_heads, forward_staged);
      ASSERT_EQ(BackwardExtents(schedule, static_cast<int>(c)).staged_heads, backward_staged);
    }
  }
}

TEST(HeadSchedule, FetchesOfOthersLieInStaging) {
  for (const Definition& def : AllDefinitions()) {
    SCOPED_TRACE(def.Name());
    const auto schedule = *def.Make();
    for (int64_t s = 0; s < def.stages(); ++s) {
      std::set<int32_t> all;
      for (int64_t c = 0; c < def.c; ++c) {
        for (int32_t head : def.Fetch(s, c)) all.insert(head);
      }
      for (int64_t c = 0; c < def.c; ++c) {
        const auto own = def.Fetch(s, c);
        const auto fetches = FetchesOf(schedule.stages(static_cast<int>(s)), static_cast<int>(c));
        ASSERT_EQ(fetches.size(), all.size());
        int64_t staged = 0;
        auto head = all.begin();
        for (const Fetch& fetch : fetches) {
          ASSERT_EQ(fetch.kv_head, *head++);
          ASSERT_EQ(fetch.own, std::count(own.begin(), own.end(), fetch.kv_head) == 1);
          if (!fetch.own) {
            ASSERT_EQ(fetch.staged_index, staged++);
          }
        }
      }
    }
  }
}

// A head that is released several times holds a slot from its first release to its last, nobody
// else's meanwhile; as many slots as there are such heads at once.
TEST(HeadSchedule, SumsOfPartsHoldASlotFromTheFirstPartToTheLast) {
  for (const Definition& def : AllDefinitions()) {
    SCOPED_TRACE(def.Name());
    const auto schedule = *def.Make();
    std::map<int32_t, std::vector<int64_t>> parts_of;
    int64_t time = 0;
    for (int64_t s = 0; s < def.stages(); ++s) {
      for (int64_t c = 0; c < def.c; ++c) {
        for (int32_t head : def.Release(s, c)) parts_of[head].push_back(time++);
      }
    }
    int64_t most = 0;
    for (int64_t now = 0; now < time; ++now) {
      most = std::max<int64_t>(
          most, std::count_if(parts_of.begin(), parts_of.end(), [now](const auto& head) {
            const auto& parts = head.second;
            return parts.size() > 1 && parts.front() <= now && now <= parts.back();
          }));
    }
    ASSERT_EQ(NumSumSlots(schedule), most);
    std::map<int32_t, int32_t> head_in;  // of the slots that are taken
    for (int s = 0; s < schedule.stages_size(); ++s) {
      for (const Release& release : ReleasesOf(schedule, s)) {
        if (parts_of[release.kv_head].size() == 1) {
          ASSERT_EQ(release.sum_slot, Release::kNoSum);
          continue;
        }
        ASSERT_TRUE(release.sum_slot >= 0 && release.sum_slot < most) << release.sum_slot;
        if (release.first) {
          ASSERT_EQ(head_in.count(release.sum_slot), 0u);
        }
        ASSERT_EQ(head_in.insert({release.sum_slot, release.kv_head}).first->second,
                  release.kv_head);
        if (release.last) head_in.erase(release.sum_slot);
      }
    }
    ASSERT_TRUE(head_in.empty());
  }
}

// Changes every number in a message and its submessages, one at a time: visit(name), then the
// change is undone.
void ForEveryNumber(google::protobuf::Message& message,
                    const std::function<void(const std::string&)>& visit) {
  const auto* reflection = message.GetReflection();
  const auto* descriptor = message.GetDescriptor();
  for (int f = 0; f < descriptor->field_count(); ++f) {
    const auto* field = descriptor->field(f);
    using Field = google::protobuf::FieldDescriptor;
    if (field->cpp_type() == Field::CPPTYPE_MESSAGE) {
      for (int i = 0; i < reflection->FieldSize(message, field); ++i) {
        ForEveryNumber(*reflection->MutableRepeatedMessage(&message, field, i), visit);
      }
    } else if (field->is_repeated()) {
      for (int i = 0; i < reflection->FieldSize(message, field); ++i) {
        const int32_t before = reflection->GetRepeatedInt32(message, field, i);
        reflection->SetRepeatedInt32(&message, field, i, before + 1);
        visit(field->full_name());
        reflection->SetRepeatedInt32(&message, field, i, before);
      }
      reflection->AddInt32(&message, field, 0);
      visit(absl::StrCat("one more ", field->full_name()));
      reflection->RemoveLast(&message, field);
    } else if (field->cpp_type() == Field::CPPTYPE_INT32) {
      const int32_t before = reflection->GetInt32(message, field);
      reflection->SetInt32(&message, field, before + 1);
      visit(field->full_name());
      reflection->SetInt32(&message, field, before);
    } else if (field->cpp_type() == Field::CPPTYPE_BOOL) {
      const bool before = reflection->GetBool(message, field);
      reflection->SetBool(&message, field, !before);
      visit(field->full_name());
      reflection->SetBool(&message, field, before);
    } else {
      const int64_t before = reflection->GetInt64(message, field);
      reflection->SetInt64(&message, field, before + 1);
      visit(field->full_name());
      reflection->SetInt64(&message, field, before);
    }
  }
}

TEST(HeadScheduleHash, ChangesWithEveryNumber) {
  auto schedule = *Definition{8, 2, 3, 2}.Make();
  const uint64_t original = HashOf(schedule);
  std::set<uint64_t> hashes = {original};
  int changes = 0;
  ForEveryNumber(schedule, [&](const std::string& what) {
    ++changes;
    EXPECT_NE(HashOf(schedule), original) << what;
    hashes.insert(HashOf(schedule));
  });
  EXPECT_GT(changes, 50);
  EXPECT_EQ(hashes.size(), static_cast<size_t>(changes) + 1)
      << "two different changes have one hash";
  EXPECT_EQ(HashOf(schedule), original);
}

TEST(HeadScheduleHash, ANumberMovedToTheNeighbouringListChangesIt) {
  auto schedule = *Definition{8, 2, 3, 2}.Make();
  const uint64_t original = HashOf(schedule);
  auto& work = *schedule.mutable_stages(0)->mutable_ranks(0);
  ASSERT_EQ(work.fetch_size(), 1);
  work.add_kv_heads(work.fetch(0));
  work.clear_fetch();
  EXPECT_NE(HashOf(schedule), original);
}

TEST(HeadScheduleHash, DiffersBetweenAllSchedules) {
  std::map<uint64_t, std::string> seen;
  for (const Definition& def : AllDefinitions()) {
    const auto [it, fresh] = seen.insert({HashOf(*def.Make()), def.Name()});
    EXPECT_TRUE(fresh || it->second == def.Name()) << it->second << " and " << def.Name();
  }
}

// Ranks of different builds compare these.
TEST(HeadScheduleHash, IsOfTheWrittenEncoding) {
  const std::vector<int64_t> canonical = {
      1, 1, 1, 1, 1, 1,  // H, K, C, R, u, n
      1,                 // K/V slots
      1,                 // stages
      1,                 // ranks of stage 0
      1, 0, 1, 0, 1, 0,
      1, 0, 1, 0,  // query heads, K/V heads, fetch, release, slots: one number each, 0
      0};          // overlap
  EXPECT_EQ(HashOf(*Definition{1, 1, 1, 1}.Make()),
            XXH64(canonical.data(), canonical.size() * sizeof(int64_t), 0));
  EXPECT_EQ(HashOf(*Definition{8, 2, 4, 1}.Make()), 16115244070896986743u);
  EXPECT_EQ(HashOf(*Definition{28, 4, 8, 2}.Make()), 16660127655553669284u);
}

TEST(HeadSchedule, RefusesWhatIsNotLegalWithTheNumbers) {
  const auto message = [](const Definition& def) {
    const auto schedule = def.Make();
    EXPECT_EQ(schedule.status().code(), absl::StatusCode::kInvalidArgument) << def.Name();
    return std::string(schedule.status().message());
  };
  EXPECT_THAT(message({8, 3, 2, 1}), AllOf(HasSubstr("num_kv_heads 3"), HasSubstr("num_heads 8")));
  EXPECT_THAT(message({8, 0, 2, 1}), HasSubstr("num_kv_heads 0"));
  EXPECT_THAT(message({2, 4, 1, 1}), AllOf(HasSubstr("num_kv_heads 4"), HasSubstr("num_heads 2")));
  EXPECT_THAT(message({0, 0, 1, 1}), HasSubstr("num_heads 0"));
  EXPECT_THAT(message({8, 2, 0, 1}), HasSubstr("ranks 0"));
  EXPECT_THAT(message({8, 2, 3, 0}),
              AllOf(HasSubstr("0 query heads"), HasSubstr("ceil(8 heads / 3 ranks) = 3")));
  EXPECT_THAT(message({8, 2, 3, 4}),
              AllOf(HasSubstr("4 query heads"), HasSubstr("1 to"), HasSubstr("= 3")));
  EXPECT_THAT(message({8, 2, 3, -1}), HasSubstr("-1 query heads"));
}

TEST(HeadSchedule, CarriesTheRingAndTheChunksAndRefusesNone) {
  HeadScheduleParams params{
      .num_heads = 8, .num_kv_heads = 2, .ulysses_ranks = 2, .ring_ranks = 3, .query_chunks = 5};
  const auto schedule = MakeHeadChunkSchedule(params);
  ASSERT_TRUE(schedule.ok()) << schedule.status();
  EXPECT_EQ(schedule->ring_ranks(), 3);
  EXPECT_EQ(schedule->query_chunks(), 5);
  EXPECT_EQ(schedule->ulysses_ranks(), 2);
  params.ring_ranks = 0;
  EXPECT_THAT(std::string(MakeHeadChunkSchedule(params).status().message()),
              HasSubstr("ring_ranks 0"));
  params.ring_ranks = 1;
  params.query_chunks = 0;
  EXPECT_THAT(std::string(MakeHeadChunkSchedule(params).status().message()),
              HasSubstr("query_chunks 0"));
}

// More ranks than K/V heads: several ranks hold the same head, and its gradient is the sum of what
// each releases.
TEST(HeadSchedule, Peers32_Peers33_Peers36_RanksBeyondTheKvHeadsShareThem) {
  for (const auto& [h, k, c] : std::vector<std::array<int64_t, 3>>{
           {16, 2, 4}, {16, 2, 16}, {28, 4, 8}, {12, 1, 5}, {14, 2, 7}}) {
    const int64_t g = h / k;
    for (int64_t u = 1; u <= (h + c - 1) / c; ++u) {
      const Definition def{h, k, c, u};
      SCOPED_TRACE(def.Name());
      const auto schedule = *def.Make();
      std::map<int32_t, std::set<int>> holders;  // of a K/V head
      std::map<int32_t, int> releases, firsts;
      for (int s = 0; s < schedule.stages_size(); ++s) {
        for (int rank = 0; rank < c; ++rank) {
          for (int32_t head : schedule.stages(s).ranks(rank).kv_heads()) {
            holders[head].insert(rank);
          }
        }
        for (const Release& release : ReleasesOf(schedule, s)) {
          ++releases[release.kv_head];
          firsts[release.kv_head] += release.first ? 1 : 0;
        }
      }
      for (int64_t kv = 0; kv < k; ++kv) {
        std::set<int> needed;  // ranks with a query head of the group
        for (int rank = 0; rank < c; ++rank) {
          for (int32_t head : def.HeadsOf(rank)) {
            if (head / g == kv) needed.insert(rank);
          }
        }
        EXPECT_EQ(holders[kv], needed);
        EXPECT_GT(needed.size(), 1u);
        EXPECT_EQ(releases[kv], static_cast<int>(needed.size())) << "a replica's part is lost";
        EXPECT_EQ(firsts[kv], 1);
      }
    }
  }
}

// No head is padded: every query head reads the K/V head that its own number says.
TEST(HeadSchedule, Peers35_HeadsThatDoNotDivideKeepTheirGroups) {
  for (const auto& [h, k, c] : std::vector<std::array<int64_t, 3>>{
           {28, 4, 8}, {10, 5, 4}, {6, 3, 4}, {7, 7, 3}, {9, 1, 4}}) {
    const Definition def{h, k, c, 1};
    const auto schedule = *def.Make();
    size_t attended = 0, most = 0, least = h;
    for (int rank = 0; rank < c; ++rank) {
      size_t of_rank = 0;
      for (const auto& stage : schedule.stages()) {
        const auto& work = stage.ranks(rank);
        for (int32_t head : work.query_heads()) {
          ASSERT_LT(head, h);
          EXPECT_EQ(ToHeads(work.kv_heads()), Heads{static_cast<int32_t>(head / (h / k))});
        }
        of_rank += work.query_heads_size();
      }
      attended += of_rank;
      most = std::max(most, of_rank);
      least = std::min(least, of_rank);
    }
    EXPECT_EQ(attended, static_cast<size_t>(h));
    EXPECT_LE(most - least, 1u);
  }
}

TEST(HeadSchedule, UlyssesIsTheOneStagePoint) {
  for (int64_t h = 1; h <= 12; ++h) {
    for (int c = 1; c <= 10; ++c) {
      const int64_t u = UlyssesHeadsPerRank(h, c);
      EXPECT_EQ((Definition{h, 1, c, u}.Make()->stages_size()), 1)
          << h << " heads, " << c << " ranks";
    }
  }
}

}  // namespace
}  // namespace upipe::parallel
