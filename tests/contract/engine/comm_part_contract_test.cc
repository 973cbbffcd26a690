// Collectives of a part of the ranks: groups of neighbours (as fsdp has), groups a stride apart (as
// dp has), both under way at once; every size; what is counted and what is refused. Sums are
// compared with the serial ascending sum bit by bit, so all communicators have equal bits.
#include <gmock/gmock.h>

#include <algorithm>
#include <array>

#include "engine/comm/dry/dry_communicator.h"
#include "tests/contract/engine/comm_groups.h"

namespace upipe::comm {
namespace {

using testing::HasSubstr;

// The group of `rank` when `size` ranks are cut into groups of `group_size` neighbours.
RankGroup Neighbours(int rank, int group_size) {
  RankGroup group(group_size);
  for (int i = 0; i < group_size; ++i) group[i] = rank / group_size * group_size + i;
  return group;
}

// And into groups of `group_size` ranks, as far apart as can be.
RankGroup Strided(int rank, int group_size, int size) {
  const int stride = size / group_size;
  RankGroup group(group_size);
  for (int i = 0; i < group_size; ++i) group[i] = rank % stride + i * stride;
  return group;
}

int IndexIn(const RankGroup& group, int rank) {
  return static_cast<int>(std::find(group.begin(), group.end(), rank) - group.begin());
}

class CommPart : public testing::TestWithParam<std::tuple<GroupKind, int>> {
 protected:
  int size() const { return std::get<1>(GetParam()); }
  // Where there are halves, the transport is told of them.
  Ranks Make() const {
    std::vector<CommOptions> by_rank(size());
    for (int rank = 0; rank < size() && size() % 2 == 0; ++rank)
      by_rank[rank].parts = {Neighbours(rank, size() / 2)};
    return std::get<0>(GetParam()).Make(by_rank);
  }
  std::vector<int> GroupSizes() const {
    std::vector<int> sizes;
    for (int n = 1; n <= size(); ++n) {
      if (size() % n == 0) sizes.push_back(n);
    }
    return sizes;
  }
};

// One all-gather and its memory, checked once its stream has passed.
struct Gathering {
  RankGroup group;
  int64_t bytes = 0;
  std::vector<unsigned char> own, all;

  Gathering(int rank, int round, RankGroup ranks, int64_t bytes_each)
      : group(std::move(ranks)),
        bytes(bytes_each),
        own(Message(rank, 0, round, bytes)),
        all(bytes * group.size(), 0xEE) {}
  absl::Status Issue(Communicator& comm, kernels::Stream& stream) {
    return comm.AllGather(group, own.data(), all.data(), bytes, stream);
  }
  void Check(int round) const {
    for (size_t i = 0; i < group.size(); ++i) {
      const std::vector<unsigned char> theirs = Message(group[i], 0, round, bytes);
      ASSERT_TRUE(std::equal(theirs.begin(), theirs.end(), all.begin() + i * bytes))
          << bytes << " bytes of rank " << group[i];
    }
  }
};

struct Reduction {
  RankGroup group;
  int64_t count = 0;
  std::vector<float> send, sum, scratch;

  Reduction(const Communicator& comm, RankGroup ranks, int64_t elements)
      : group(std::move(ranks)), count(elements), send(count * group.size()), sum(count, -1) {
    for (size_t i = 0; i < send.size(); ++i) send[i] = Contribution(comm.rank(), i);
    const int group_size = static_cast<int>(group.size());
    scratch.resize(comm.ReduceScatterScratchBytes(group_size, count) / sizeof(float));
  }
  absl::Status Issue(Communicator& comm, kernels::Stream& stream) {
    return comm.ReduceScatter(group, send.data(), sum.data(), count, scratch.data(), stream);
  }
  void Check(int rank) const {
    for (int64_t i = 0; i < count; ++i) {
      const int64_t index = IndexIn(group, rank) * count + i;
      float serial = Contribution(group[0], index);
      for (size_t g = 1; g < group.size(); ++g) serial += Contribution(group[g], index);
      ASSERT_EQ(serial, sum[i]) << "element " << i << " of " << count << " on rank " << rank;
    }
  }
};

TEST_P(CommPart, GathersOverGroupsOfEverySize) {
  Ranks ranks = Make();
  OnEveryRank(ranks, [this](Communicator& comm, kernels::Stream& stream) {
    int round = 0;
    for (int n : GroupSizes()) {
      for (int64_t bytes : {0, 1, 4096, 65537}) {
        for (const RankGroup& group :
             {Neighbours(comm.rank(), n), Strided(comm.rank(), n, comm.size())}) {
          Gathering gathering(comm.rank(), ++round, group, bytes);
          ASSERT_TRUE(gathering.Issue(comm, stream).ok()) << comm.status();
          ASSERT_TRUE(stream.Synchronize().ok()) << comm.status();
          gathering.Check(round);
        }
      }
    }
  });
}

TEST_P(CommPart, SumsOverGroupsOfEverySizeHaveTheBitsOfTheAscendingSum) {
  Ranks ranks = Make();
  OnEveryRank(ranks, [this](Communicator& comm, kernels::Stream& stream) {
    for (int n : GroupSizes()) {
      for (int64_t count : {0, 1, 5, 1000, (1 << 18) + 77}) {
        for (const RankGroup& group :
             {Neighbours(comm.rank(), n), Strided(comm.rank(), n, comm.size())}) {
          Reduction reduction(comm, group, count);
          ASSERT_TRUE(reduction.Issue(comm, stream).ok()) << comm.status();
          ASSERT_TRUE(stream.Synchronize().ok()) << comm.status();
          reduction.Check(comm.rank());
        }
      }
    }
  });
}

// As a step with fsdp and dp does: parameters are gathered over neighbours on one stream, gradients
// summed over them and then over the replicas on another, several of each under way.
TEST_P(CommPart, NeighboursAndReplicasTakeTurnsOnTwoStreams) {
  Ranks ranks = Make();
  OnEveryRank(ranks, [this](Communicator& comm, kernels::Stream& stream) {
    kernels::HostStream other = NewStream();
    constexpr int kRounds = 6;
    for (int n : GroupSizes()) {
      const RankGroup shards = Neighbours(comm.rank(), n);
      const RankGroup replicas = Strided(comm.rank(), comm.size() / n, comm.size());
      std::vector<Gathering> gatherings;
      std::vector<Reduction> reductions;
      for (int round = 0; round < kRounds; ++round) {
        gatherings.emplace_back(comm.rank(), round, shards, 1000 * round + 17);
        reductions.emplace_back(comm, round % 2 == 0 ? replicas : shards, 700 * round + 3);
      }
      for (int round = 0; round < kRounds; ++round) {
        ASSERT_TRUE(gatherings[round].Issue(comm, stream).ok()) << comm.status();
        ASSERT_TRUE(reductions[round].Issue(comm, other).ok()) << comm.status();
      }
      ASSERT_TRUE(stream.Synchronize().ok()) << comm.status();
      ASSERT_TRUE(other.Synchronize().ok()) << comm.status();
      for (int round = 0; round < kRounds; ++round) {
        gatherings[round].Check(round);
        reductions[round].Check(comm.rank());
      }
    }
  });
}

// Research/peers.md part 7, 47: a large uneven exchange there and back again.
TEST_P(CommPart, Peers47_UnevenPayloadsOfEverySizeGoAndComeBack) {
  Ranks ranks = Make();
  OnEveryRank(ranks, [](Communicator& comm, kernels::Stream& stream) {
    const int me = comm.rank();
    for (int64_t unit : {1, 100, 8192, 65536, 300000}) {
      const auto bytes = [unit](int from, int to) { return unit * ((from * 3 + to * 5) % 7); };
      std::vector<std::vector<unsigned char>> out, landed, back;
      AllToAllVParams there, home;
      for (int peer = 0; peer < comm.size(); ++peer) {
        out.push_back(Message(me, peer, 0, bytes(me, peer)));
        landed.emplace_back(bytes(peer, me), 0xEE);
        back.emplace_back(bytes(me, peer), 0xDD);
        there.sends.push_back({peer, out[peer].data(), bytes(me, peer)});
        there.receives.push_back({peer, landed[peer].data(), bytes(peer, me)});
        home.sends.push_back({peer, landed[peer].data(), bytes(peer, me)});
        home.receives.push_back({peer, back[peer].data(), bytes(me, peer)});
      }
      ASSERT_TRUE(comm.AllToAllV(there, stream).ok()) << comm.status();
      ASSERT_TRUE(comm.AllToAllV(home, stream).ok()) << comm.status();
      ASSERT_TRUE(stream.Synchronize().ok()) << comm.status();
      for (int peer = 0; peer < comm.size(); ++peer) {
        ASSERT_EQ(landed[peer], Message(peer, me, 0, bytes(peer, me))) << "unit " << unit;
        ASSERT_EQ(back[peer], out[peer]) << "unit " << unit << ", from rank " << peer;
      }
    }
  });
}

TEST_P(CommPart, OnlyTheGroupsPeersAreCounted) {
  Ranks ranks = Make();
  OnEveryRank(ranks, [this](Communicator& comm, kernels::Stream& stream) {
    DryCommunicator dry(comm.rank(), comm.size());
    std::vector<int64_t> expected(comm.size(), 0);
    for (int n : GroupSizes()) {
      const RankGroup neighbours = Neighbours(comm.rank(), n);
      const RankGroup strided = Strided(comm.rank(), n, comm.size());
      for (int peer = 0; peer < comm.size(); ++peer) {
        if (peer == comm.rank()) continue;
        if (std::count(neighbours.begin(), neighbours.end(), peer) == 1) expected[peer] += 1000;
        if (std::count(strided.begin(), strided.end(), peer) == 1) expected[peer] += 4 * 30;
      }
      Gathering gathering(comm.rank(), 0, neighbours, 1000);
      Reduction reduction(comm, strided, 30);
      EXPECT_EQ(dry.ReduceScatterScratchBytes(n, 30), comm.ReduceScatterScratchBytes(n, 30));
      for (Communicator* each : std::array<Communicator*, 2>{&comm, &dry}) {
        ASSERT_TRUE(gathering.Issue(*each, stream).ok()) << each->status();
        ASSERT_TRUE(reduction.Issue(*each, stream).ok()) << each->status();
      }
      ASSERT_TRUE(stream.Synchronize().ok()) << comm.status();
    }
    EXPECT_EQ(expected, comm.stats().bytes_sent_to_peer);
    EXPECT_EQ(expected, dry.stats().bytes_sent_to_peer);
    EXPECT_EQ(dry.stats().num_collectives(), comm.stats().num_collectives());
  });
}

TEST_P(CommPart, WhatIsNoGroupWithTheCallerIsRefused) {
  if (size() < 3) return;
  const std::vector<std::pair<int, RankGroup>> wrong = {
      {1, {}}, {1, {0, 2}}, {1, {1, 0}}, {1, {1, 1}}, {1, {1, size()}}, {1, {-1, 1}}};
  for (const auto& [rank, group] : wrong) {
    DryCommunicator dry(rank, size());
    Ranks ranks = Make();
    for (Communicator* comm : std::array<Communicator*, 2>{&dry, ranks[rank].get()}) {
      kernels::HostStream stream = NewStream();
      char byte = 0;
      std::vector<char> all(2);
      const absl::Status status = comm->AllGather(group, &byte, all.data(), 1, stream);
      EXPECT_EQ(absl::StatusCode::kInvalidArgument, status.code());
      EXPECT_THAT(status.message(), HasSubstr("all-gather: the group ["));
      EXPECT_EQ(absl::StatusCode::kInvalidArgument, stream.Synchronize().code());
    }
    for (auto& comm : ranks) comm->Abort(absl::CancelledError("over"));
  }
  DryCommunicator dry(1, size());
  kernels::HostStream stream = NewStream();
  float value = 0, scratch = 0;
  EXPECT_THAT(dry.ReduceScatter({0}, &value, &value, 1, &scratch, stream).message(),
              HasSubstr("reduce-scatter: the group [0] must be ascending"));
}

INSTANTIATE_TEST_SUITE_P(All, CommPart,
                         testing::Combine(testing::ValuesIn(AllGroupKinds()),
                                          testing::Values(1, 2, 4, 6)),
                         [](const auto& info) {
                           return absl::StrCat(std::get<0>(info.param).name, "_",
                                               std::get<1>(info.param));
                         });

}  // namespace
}  // namespace upipe::comm
