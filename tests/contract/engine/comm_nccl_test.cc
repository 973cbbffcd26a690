// What only NCCL's communicator does, over the recording fake: which calls it makes, that every
// rank makes them in one order, and how it ends when a rank or NCCL does not do its part.
#include <gmock/gmock.h>

#include <future>

#include "absl/time/clock.h"
#include "engine/comm/comm_factory.h"
#include "engine/comm/nccl/nccl_communicator.h"
#include "engine/comm/traffic.h"
#include "tests/contract/engine/comm_groups.h"
#include "tests/support/cuda_runtime/fake_runtime.h"

namespace upipe::comm {
namespace {

using testing::HasSubstr;

constexpr int64_t kBytes = 1000;

// A connected group and what its ranks called.
struct Group {
  explicit Group(int size, const CommOptions& options = {}, const NcclOptions& nccl = {},
                 std::shared_ptr<kernels::CudaRuntime> runtime = nullptr)
      : contexts(MakeNcclContexts(size, nccl, std::move(runtime))),
        ranks(ConnectNccl(contexts, std::vector<CommOptions>(size, options))) {}
  FakeNccl& nccl(int rank) { return *contexts[rank].nccl; }

  std::vector<NcclRank> contexts;
  Ranks ranks;
};

absl::Status GatherOnce(Communicator& comm, kernels::Stream& stream) {
  std::vector<char> all(comm.size() * kBytes);
  const absl::Status issued = comm.AllGather(comm.everyone(), all.data() + comm.rank() * kBytes,
                                             all.data(), kBytes, stream);
  const absl::Status ended = stream.Synchronize();
  return issued.ok() ? ended : issued;
}

// Waits for what another thread does soon.
template <typename Condition>
bool Soon(const Condition& condition) {
  for (const absl::Time end = absl::Now() + absl::Seconds(10); absl::Now() < end;) {
    if (condition()) return true;
    absl::SleepFor(absl::Milliseconds(1));
  }
  return false;
}

std::vector<std::string> NamesOf(const std::vector<NcclCall>& calls) {
  std::vector<std::string> names;
  for (const NcclCall& call : calls) names.push_back(call.name);
  return names;
}

TEST(NcclCalls, AreInGroupsAndInOneOrderOnAllRanks) {
  Group group(4, {.reduce_room = kDeviceReduceRoom});
  OnEveryRank(group.ranks, [](Communicator& comm, kernels::Stream& stream) {
    const RankGroup half = comm.rank() < 2 ? RankGroup{0, 1} : RankGroup{2, 3};
    std::vector<float> values(4 * 300000), sum(300000),
        scratch(comm.ReduceScatterScratchBytes(4, 300000) / sizeof(float));
    std::vector<double> scalars(4, comm.rank()), gathered(16);
    AllToAllVParams exchange;
    for (int peer = 0; peer < 4; ++peer) {
      exchange.sends.push_back({peer, values.data(), kBytes});
      exchange.receives.push_back({peer, sum.data() + peer * kBytes, kBytes});
    }
    for (int round = 0; round < 3; ++round) {
      ASSERT_TRUE(comm.AllToAllV(exchange, stream).ok());
      ASSERT_TRUE(comm.AllGather(half, values.data(), sum.data(), kBytes, stream).ok());
      ASSERT_TRUE(comm.ReduceScatter(comm.everyone(), values.data(), sum.data(), 300000,
                                     scratch.data(), stream)
                      .ok());
      ASSERT_TRUE(comm.AllReduce(scalars.data(), 4, ReduceOp::kMax, gathered.data(), stream).ok());
      ASSERT_TRUE(comm.Barrier(stream).ok());
    }
    ASSERT_TRUE(stream.Synchronize().ok()) << comm.status();
  });
  group.ranks.Destroy();
  const std::vector<std::string> order = NamesOf(group.nccl(1).calls());
  EXPECT_EQ("CommInit", order.front());
  for (int rank = 0; rank < 4; ++rank) {
    std::vector<NcclCall> calls = group.nccl(rank).calls();
    if (rank == 0) {
      EXPECT_EQ("GetUniqueId", calls.front().name);
      calls.erase(calls.begin());
    }
    EXPECT_EQ(order, NamesOf(calls)) << "rank " << rank;
    for (const NcclCall& call : calls) {
      const bool moves = call.name == "Send" || call.name == "Recv" || call.name == "AllGather";
      EXPECT_EQ(moves || call.name.starts_with("Group") ? 1 : 0, call.depth) << call.name;
      EXPECT_NE(rank, call.peer) << "to itself";
      EXPECT_TRUE(!moves || call.bytes > 0);
    }
    EXPECT_EQ(group.nccl(rank).Count("GroupStart"), group.nccl(rank).Count("GroupEnd"));
    EXPECT_EQ("CommDestroy", calls.back().name);
    EXPECT_EQ(0, group.nccl(rank).Count("CommAbort"));
  }
}

TEST(NcclCalls, LeaveOutPeersWithoutBytesOnBothSides) {
  Group group(3);
  OnEveryRank(group.ranks, [](Communicator& comm, kernels::Stream& stream) {
    char out[8] = "to 2", in[8] = "";
    AllToAllVParams params;
    for (int peer = 0; peer < 3; ++peer) {
      params.sends.push_back({peer, out, comm.rank() == 0 && peer == 2 ? 5 : 0});
      params.receives.push_back({peer, in, comm.rank() == 2 && peer == 0 ? 5 : 0});
    }
    ASSERT_TRUE(comm.AllToAllV(params, stream).ok());
    ASSERT_TRUE(stream.Synchronize().ok()) << comm.status();
    EXPECT_STREQ(comm.rank() == 2 ? "to 2" : "", in);
  });
  for (int rank = 0; rank < 3; ++rank) {
    // The warm-up's are two each.
    EXPECT_EQ(rank == 0 ? 3 : 2, group.nccl(rank).Count("Send")) << "rank " << rank;
    EXPECT_EQ(rank == 2 ? 3 : 2, group.nccl(rank).Count("Recv")) << "rank " << rank;
  }
}

// Halves of four ranks that are said to gather.
std::vector<CommOptions> InHalves() {
  std::vector<CommOptions> by_rank(4);
  for (int rank = 0; rank < 4; ++rank)
    by_rank[rank].parts = {rank < 2 ? RankGroup{0, 1} : RankGroup{2, 3}};
  return by_rank;
}

TEST(NcclParts, GatherInOneCallOfTheirOwnCommunicator) {
  std::vector<NcclRank> contexts = MakeNcclContexts(4);
  Ranks ranks = ConnectNccl(contexts, InHalves());
  std::vector<int> sends, gathers;
  for (const NcclRank& rank : contexts) {
    sends.push_back(rank.nccl->Count("Send"));
    gathers.push_back(rank.nccl->Count("AllGather"));
  }
  OnEveryRank(ranks, [](Communicator& comm, kernels::Stream& stream) {
    const RankGroup half = comm.rank() < 2 ? RankGroup{0, 1} : RankGroup{2, 3};
    const char own = static_cast<char>(comm.rank());
    char all[2] = {9, 9};
    ASSERT_TRUE(comm.AllGather(half, &own, all, 1, stream).ok());
    ASSERT_TRUE(GatherOnce(comm, stream).ok());
    EXPECT_EQ(half[0], all[0]);
    EXPECT_EQ(half[1], all[1]);
  });
  ranks.Destroy();
  for (int rank = 0; rank < 4; ++rank) {
    const FakeNccl& nccl = *contexts[rank].nccl;
    EXPECT_EQ(1, nccl.Count("CommSplit"));
    EXPECT_EQ(sends[rank], nccl.Count("Send")) << "rank " << rank;
    EXPECT_EQ(gathers[rank] + 2, nccl.Count("AllGather")) << "rank " << rank;
    EXPECT_EQ(2, nccl.Count("CommDestroy"));
    EXPECT_EQ(0, nccl.Count("CommAbort"));
    EXPECT_THAT(nccl.Violations(), testing::IsEmpty());
  }
}

TEST(NcclParts, EndWithTheWhole) {
  std::vector<NcclRank> contexts = MakeNcclContexts(4);
  Ranks ranks = ConnectNccl(contexts, InHalves());
  kernels::HostStream stream = NewStream();
  std::vector<char> all(2 * kBytes);
  Communicator& comm = *ranks[0];
  ASSERT_TRUE(comm.AllGather({0, 1}, all.data(), all.data(), kBytes, stream).ok());
  comm.Abort(absl::CancelledError("enough"));
  EXPECT_EQ(absl::StatusCode::kCancelled, stream.Synchronize().code());
  EXPECT_TRUE(Soon([&] { return contexts[0].nccl->Count("CommAbort") == 2; }));
}

TEST(NcclCalls, OneRankNeedsNone) {
  Group group(1);
  OnEveryRank(group.ranks, [](Communicator& comm, kernels::Stream& stream) {
    EXPECT_TRUE(GatherOnce(comm, stream).ok());
    EXPECT_TRUE(comm.Barrier(stream).ok());
    double value = 3;
    EXPECT_TRUE(comm.AllReduce(&value, 1, ReduceOp::kSum, nullptr, stream).ok());
    EXPECT_TRUE(stream.Synchronize().ok());
    EXPECT_EQ(3, value);
  });
  EXPECT_EQ(0, group.nccl(0).Count("GroupStart"));
}

TEST(NcclFailure, APeerThatDoesNotComeEndsInOneAbortEach) {
  Group group(3, {.deadline = absl::Milliseconds(200)});
  OnEveryRank(group.ranks, [](Communicator& comm, kernels::Stream& stream) {
    if (comm.rank() == 1) return;
    const absl::Status status = GatherOnce(comm, stream);
    EXPECT_EQ(absl::StatusCode::kDeadlineExceeded, status.code()) << status;
    EXPECT_THAT(status.message(), HasSubstr("collective 1 (all-gather)"));
    EXPECT_THAT(status.message(), HasSubstr("200ms"));
    EXPECT_EQ(status, comm.Barrier(stream));
  });
  group.ranks.Destroy();
  for (int rank : {0, 2}) {
    EXPECT_EQ(1, group.nccl(rank).Count("CommAbort"));
    EXPECT_EQ(0, group.nccl(rank).Count("CommFinalize"));
  }
  EXPECT_EQ(0, group.nccl(1).Count("CommAbort"));
  EXPECT_EQ("CommDestroy", group.nccl(1).calls().back().name);
}

TEST(NcclFailure, ARankThatStaysDoesNotHoldTheOthersWhenTheyLeave) {
  Group group(2, {}, {.close_deadline = absl::Milliseconds(100)});
  group.ranks[0].reset();
  EXPECT_EQ(1, group.nccl(0).Count("CommAbort"));
  EXPECT_EQ(0, group.nccl(0).Count("CommDestroy"));
  EXPECT_TRUE(group.ranks[1]->status().ok());
}

TEST(NcclFailure, WhatNcclFindsMeanwhileEndsTheOperationInFlight) {
  Group group(2);
  kernels::HostStream stream = NewStream();
  std::vector<char> all(2 * kBytes);
  Communicator& comm = *group.ranks[0];
  ASSERT_TRUE(comm.AllGather(comm.everyone(), all.data(), all.data(), kBytes, stream).ok());
  group.nccl(0).Fail(NcclResult::kRemoteError);
  const absl::Status status = stream.Synchronize();
  EXPECT_EQ(absl::StatusCode::kUnavailable, status.code()) << status;
  EXPECT_THAT(status.message(), HasSubstr("remote error: told by the fake"));
  EXPECT_TRUE(Soon([&] { return group.nccl(0).Count("CommAbort") == 1; }));
  EXPECT_EQ(status, comm.status());
}

TEST(NcclFailure, IsLookedForWhileNothingIsInFlight) {
  Group group(2);
  const int looks = group.nccl(0).num_looks();
  EXPECT_TRUE(Soon([&] { return group.nccl(0).num_looks() > looks + 1; }));
  group.nccl(0).Fail(NcclResult::kUnhandledCudaError);
  EXPECT_TRUE(Soon([&] { return absl::IsInternal(group.ranks[0]->status()); }));
  EXPECT_TRUE(Soon([&] { return group.nccl(0).Count("CommAbort") == 1; }));
}

TEST(NcclFailure, OfACallNamesItAndClosesTheGroup) {
  Group group(2);
  group.nccl(0).FailNextCall(NcclResult::kInvalidUsage);
  kernels::HostStream stream = NewStream();
  std::vector<char> all(2 * kBytes);
  Communicator& comm = *group.ranks[0];
  comm.AllGather(comm.everyone(), all.data(), all.data(), kBytes, stream).IgnoreError();
  const absl::Status status = stream.Synchronize();
  EXPECT_EQ(absl::StatusCode::kInternal, status.code());
  EXPECT_THAT(status.message(), HasSubstr("collective 1 (all-gather) on rank 0 of 2"));
  EXPECT_THAT(status.message(), HasSubstr("invalid usage"));
  EXPECT_EQ(group.nccl(0).Count("GroupStart"), group.nccl(0).Count("GroupEnd"));
}

TEST(NcclFailure, WhatEndedWellBeforeStaysSo) {
  Group group(2);
  std::vector<kernels::Event> passed(2);
  OnEveryRank(group.ranks, [&](Communicator& comm, kernels::Stream& stream) {
    ASSERT_TRUE(GatherOnce(comm, stream).ok());
    passed[comm.rank()] = stream.Record();
  });
  for (auto& comm : group.ranks) comm->Abort(absl::CancelledError("enough"));
  for (const kernels::Event& event : passed) EXPECT_TRUE(event.Synchronize().ok());
}

// A CUDA stream waits on the device, without the host; the outcome is asked when it is.
TEST(NcclOnCudaStreams, StreamsOfTheDeviceCarryTheOutcome) {
  Group group(2, {}, {}, std::make_shared<kernels::testing::FakeCudaRuntime>());
  std::vector<std::vector<char>> all(2, std::vector<char>(2 * kBytes));
  std::vector<std::unique_ptr<kernels::Stream>> streams;
  const auto gather = [&](int rank) {
    Communicator& comm = *group.ranks[rank];
    char* const own = all[rank].data() + rank * kBytes;
    std::fill_n(own, kBytes, static_cast<char>(10 + rank));
    return comm.AllGather(comm.everyone(), own, all[rank].data(), kBytes, *streams[rank]);
  };
  for (int rank : {0, 1}) streams.push_back(group.contexts[rank].device->CreateStream("compute"));
  for (int rank : {0, 1}) ASSERT_TRUE(gather(rank).ok());
  for (int rank : {0, 1}) {
    ASSERT_TRUE(streams[rank]->Synchronize().ok());
    EXPECT_EQ(10, all[rank][0]);
    EXPECT_EQ(11, all[rank][kBytes]);
  }
  EXPECT_GT(group.ranks[0]->stats().seconds(), 0);

  const kernels::Event before = streams[0]->Record();
  ASSERT_TRUE(gather(0).ok());
  EXPECT_FALSE(streams[0]->Record().Done());
  group.ranks[0]->Abort(absl::CancelledError("user cancelled"));
  EXPECT_EQ(absl::StatusCode::kCancelled, streams[0]->Synchronize().code());
  EXPECT_TRUE(before.Synchronize().ok());
  EXPECT_EQ(absl::StatusCode::kCancelled, gather(0).code());
}

TEST(NcclMeeting, ADeadlineWhenARankDoesNotConnect) {
  std::vector<NcclRank> contexts =
      MakeNcclContexts(2, {.connect_deadline = absl::Milliseconds(100)});
  PeerGroup group{.rank = 0, .node_ids = {"a", "a"}};
  for (const NcclRank& rank : contexts) group.addresses.push_back(rank.context->address());
  const auto comm = contexts[0].context->Connect(group, {});
  EXPECT_EQ(absl::StatusCode::kDeadlineExceeded, comm.status().code());
  EXPECT_THAT(comm.status().message(), HasSubstr("connecting rank 0 of 2: "));
  EXPECT_EQ(1, contexts[0].nccl->Count("CommAbort"));
}

TEST(NcclMeeting, OnlyRankZeroTellsAnId) {
  std::vector<NcclRank> contexts = MakeNcclContexts(3);
  EXPECT_THAT(contexts[0].context->address(), HasSubstr("fake id"));
  EXPECT_LT(contexts[0].context->address().size(), 300u);
  for (int rank : {1, 2}) {
    EXPECT_EQ("nccl\n22809\nGPU-" + std::to_string(rank) + "\n", contexts[rank].context->address());
    EXPECT_EQ(0, contexts[rank].nccl->Count("GetUniqueId"));
  }
}

TEST(NcclMeeting, CountsTheMemoryOfTheCommunicator) {
  Group group(3);
  for (const NcclRank& rank : group.contexts) {
    EXPECT_EQ((3 + 1) * 16, rank.context->device_bytes());
  }
}

absl::Status Refusal(const std::vector<std::string>& addresses) {
  std::vector<NcclRank> contexts = MakeNcclContexts(1);
  PeerGroup group{.rank = 0, .addresses = addresses};
  group.addresses.insert(group.addresses.begin(), contexts[0].context->address());
  const auto comm = contexts[0].context->Connect(group, {});
  EXPECT_EQ(0, contexts[0].nccl->Count("CommInit"));
  return comm.status();
}

TEST(NcclMeeting, RefusesRanksThatShareADevice) {
  const absl::Status status = Refusal({"nccl\n22809\nGPU-1\n", "nccl\n22809\nGPU-0\n"});
  EXPECT_EQ(absl::StatusCode::kFailedPrecondition, status.code());
  EXPECT_EQ(status.message(),
            "ranks 0 and 2 are both on device GPU-0, and NCCL takes one rank per device; start "
            "workers with one slot per device");
}

TEST(NcclMeeting, RefusesAnotherVersionAndWhatIsNoAddress) {
  const absl::Status version = Refusal({"nccl\n22304\nGPU-1\n"});
  EXPECT_EQ(absl::StatusCode::kFailedPrecondition, version.code());
  EXPECT_THAT(version.message(), HasSubstr("rank 0 loaded NCCL 22809 and rank 1 NCCL 22304"));
  for (const char* address : {"", "nccl", "nccl\nx\nGPU-1\n", "nccl\n22809\n\n", "ucx\n1\nGPU-1\n",
                              "nccl\n22809\nGPU-1\nan id of a rank that has none"}) {
    const absl::Status status = Refusal({address});
    EXPECT_EQ(absl::StatusCode::kInvalidArgument, status.code()) << address;
    EXPECT_THAT(status.message(), HasSubstr("the address of rank 1 ("));
  }
}

TEST(CommFactory, SaysWhatABackendNeeds) {
  const auto on_host = OpenCommDevice("cpu");
  ASSERT_TRUE(on_host.ok());
  EXPECT_EQ(nullptr, *on_host);
  const auto device = OpenCommDevice("cuda");
  if (device.ok()) GTEST_SKIP() << "there is a device";
  EXPECT_EQ(absl::StatusCode::kFailedPrecondition, device.status().code()) << device.status();
  const auto context = CreatePeerContext({.backend = "cuda"});
  EXPECT_EQ(device.status(), context.status());
}

TEST(NcclSums, PiecesFitIntoTheScratchEveryOneIsGiven) {
  for (const ReduceRoom& room : {ReduceRoom(), kDeviceReduceRoom}) {
    for (int size : {2, 3, 7, 8, 64, 129, 1000, 4096}) {
      for (int64_t count : {int64_t{1}, int64_t{2}, int64_t{1000}, int64_t{4097}, int64_t{1} << 18,
                            (int64_t{1} << 18) + 1, int64_t{3} << 30}) {
        const NcclReducePieces pieces = PiecesOf(room, size, count);
        EXPECT_GE(pieces.peers, 1);
        EXPECT_LT(pieces.peers, size);
        EXPECT_GE(pieces.piece, 1);
        EXPECT_LE(pieces.piece, count);
        EXPECT_LE(pieces.peers * pieces.piece * 4, ReduceScatterScratchBytesFor(room, size, count))
            << size << " ranks, " << count;
        if (pieces.piece < count) {
          EXPECT_GE(pieces.piece, 1 << 18);
        }
      }
    }
  }
}

TEST(NcclSums, EightRanksOfADeviceSendMessagesOfFourMegabytes) {
  const NcclReducePieces pieces = PiecesOf(kDeviceReduceRoom, 8, 27 << 20);
  EXPECT_EQ(pieces.peers, 7);
  EXPECT_EQ(pieces.piece, 1 << 20);
  EXPECT_EQ(ReduceScatterScratchBytesFor(kDeviceReduceRoom, 8, 27 << 20), 28 << 20);
  EXPECT_EQ(ReduceScatterScratchBytesFor(kDeviceReduceRoom, 64, 27 << 20), 32 << 20);
}

// Pieces that end within a block, contributions of all ranks at once and in two batches.
TEST(NcclSums, TheRoomChangesNoBit) {
  constexpr int64_t kCount = (1 << 18) * 3 + 7;
  std::vector<std::vector<float>> sums;
  for (const ReduceRoom& room : {ReduceRoom{.piece_bytes = 1 << 20, .pieces = 2},
                                 ReduceRoom{.piece_bytes = 1 << 21, .pieces = 3}}) {
    Group group(4, {.reduce_room = room});
    std::vector<float> all(4 * kCount);
    OnEveryRank(group.ranks, [&](Communicator& comm, kernels::Stream& stream) {
      std::vector<float> values(4 * kCount);
      for (size_t i = 0; i < values.size(); ++i) {
        values[i] = Contribution(comm.rank(), static_cast<int64_t>(i));
      }
      std::vector<char> scratch(comm.ReduceScatterScratchBytes(4, kCount));
      ASSERT_TRUE(comm.ReduceScatter(comm.everyone(), values.data(),
                                     all.data() + comm.rank() * kCount, kCount, scratch.data(),
                                     stream)
                      .ok());
      ASSERT_TRUE(stream.Synchronize().ok()) << comm.status();
    });
    sums.push_back(std::move(all));
  }
  EXPECT_TRUE(sums[0] == sums[1]);
}

}  // namespace
}  // namespace upipe::comm
