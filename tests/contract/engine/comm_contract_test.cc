// The collectives of every communicator: what arrives, in which order it is summed, what is
// counted, and how an operation is ordered on streams.
#include <atomic>
#include <cmath>
#include <cstring>
#include <future>
#include <map>
#include <mutex>

#include "engine/comm/dry/dry_communicator.h"
#include "kernels/host/host_device.h"
#include "tests/contract/engine/comm_groups.h"

namespace upipe::comm {
namespace {

using Param = std::tuple<GroupKind, int>;

class CommContract : public testing::TestWithParam<Param> {
 protected:
  int size() const { return std::get<1>(GetParam()); }
  Ranks Make(const CommOptions& options = {}) const {
    return std::get<0>(GetParam()).Make(std::vector<CommOptions>(size(), options));
  }
};

// Block sizes between a pair, both sides alike: some pairs none, some several, some empty ones
// between.
std::vector<int64_t> UnevenSizes(int from, int to) {
  switch ((from * 3 + to * 5) % 5) {
    case 0:
      return {};
    case 1:
      return {0, 1, 0, 65535};
    case 2:
      return {65536};
    case 3:
      return {65537, 7, 40000};
    default:
      return {300000, 0};
  }
}

void CheckAllToAll(Communicator& comm, kernels::Stream& stream,
                   const std::function<std::vector<int64_t>(int from, int to)>& sizes) {
  const int me = comm.rank();
  std::vector<std::vector<unsigned char>> out, in;
  std::vector<std::pair<int, int>> origin;  // of each receive: peer, block
  AllToAllVParams params;
  for (int peer = comm.size() - 1; peer >= 0; --peer) {
    int block = 0;
    for (const int64_t bytes : sizes(me, peer)) out.push_back(Message(me, peer, block++, bytes));
    block = 0;
    for (const int64_t bytes : sizes(peer, me)) {
      in.emplace_back(bytes, 0xEE);
      origin.emplace_back(peer, block++);
    }
  }
  size_t next = 0;
  for (int peer = comm.size() - 1; peer >= 0; --peer) {
    for (const int64_t bytes : sizes(me, peer))
      params.sends.push_back({peer, out[next++].data(), bytes});
  }
  for (size_t i = 0; i < in.size(); ++i) {
    params.receives.push_back({origin[i].first, in[i].data(), static_cast<int64_t>(in[i].size())});
  }
  ASSERT_TRUE(comm.AllToAllV(params, stream).ok()) << comm.status();
  ASSERT_TRUE(stream.Synchronize().ok()) << comm.status();
  for (size_t i = 0; i < in.size(); ++i) {
    ASSERT_TRUE(in[i] == Message(origin[i].first, me, origin[i].second, in[i].size()))
        << "rank " << me << ", block " << origin[i].second << " of " << in[i].size()
        << " bytes from rank " << origin[i].first;
  }
}

TEST_P(CommContract, AllToAllOfUnevenBlocks) {
  Ranks ranks = Make();
  OnEveryRank(ranks, [](Communicator& comm, kernels::Stream& stream) {
    for (int repeat = 0; repeat < 3; ++repeat) CheckAllToAll(comm, stream, UnevenSizes);
  });
}

TEST_P(CommContract, AllToAllOfEverySize) {
  Ranks ranks = Make();
  OnEveryRank(ranks, [](Communicator& comm, kernels::Stream& stream) {
    for (const int64_t bytes : {0, 1, 65535, 65536, 65537, 1 << 20}) {
      CheckAllToAll(comm, stream, [bytes](int, int) { return std::vector<int64_t>{bytes}; });
    }
    if (comm.size() <= 3) {
      CheckAllToAll(comm, stream, [](int, int) { return std::vector<int64_t>{8 << 20}; });
    }
  });
}

TEST_P(CommContract, AllToAllOfBlocksSideBySide) {
  Ranks ranks = Make();
  OnEveryRank(ranks, [](Communicator& comm, kernels::Stream& stream) {
    const int me = comm.rank();
    for (const int64_t bytes : {0, 1, 4096, 100001}) {
      std::vector<unsigned char> out, in(comm.size() * bytes + 1, 0xEE), expected;
      for (int peer = 0; peer < comm.size(); ++peer) {
        const std::vector<unsigned char> sent = Message(me, peer, 0, bytes);
        const std::vector<unsigned char> comes = Message(peer, me, 0, bytes);
        out.insert(out.end(), sent.begin(), sent.end());
        expected.insert(expected.end(), comes.begin(), comes.end());
      }
      out.push_back(0xDD);  // an address also for no bytes
      AllToAllVParams params;
      for (int peer = 0; peer < comm.size(); ++peer) {
        params.sends.push_back({peer, out.data() + peer * bytes, bytes});
        params.receives.push_back({peer, in.data() + peer * bytes, bytes});
      }
      ASSERT_TRUE(comm.AllToAllV(params, stream).ok()) << comm.status();
      ASSERT_TRUE(stream.Synchronize().ok()) << comm.status();
      EXPECT_EQ(0xEE, in.back());
      in.pop_back();
      ASSERT_TRUE(in == expected) << bytes << " bytes each to rank " << me;
    }
  });
}

TEST_P(CommContract, SendsMayAlias) {
  Ranks ranks = Make();
  OnEveryRank(ranks, [](Communicator& comm, kernels::Stream& stream) {
    constexpr int64_t kBytes = 70000;
    std::vector<unsigned char> out = Message(comm.rank(), 0, 0, kBytes + 10);
    std::vector<std::vector<unsigned char>> in(2 * comm.size(), std::vector<unsigned char>(kBytes));
    AllToAllVParams params;
    for (int peer = 0; peer < comm.size(); ++peer) {
      params.sends.push_back({peer, out.data(), kBytes});
      params.sends.push_back({peer, out.data() + 10, kBytes});
      params.receives.push_back({peer, in[2 * peer].data(), kBytes});
      params.receives.push_back({peer, in[2 * peer + 1].data(), kBytes});
    }
    ASSERT_TRUE(comm.AllToAllV(params, stream).ok());
    ASSERT_TRUE(stream.Synchronize().ok()) << comm.status();
    for (int peer = 0; peer < comm.size(); ++peer) {
      const std::vector<unsigned char> theirs = Message(peer, 0, 0, kBytes + 10);
      EXPECT_EQ(0, std::memcmp(in[2 * peer].data(), theirs.data(), kBytes));
      EXPECT_EQ(0, std::memcmp(in[2 * peer + 1].data(), theirs.data() + 10, kBytes));
    }
  });
}

TEST_P(CommContract, AllGatherInAndOutOfPlace) {
  Ranks ranks = Make();
  OnEveryRank(ranks, [](Communicator& comm, kernels::Stream& stream) {
    for (const int64_t bytes : {0, 1, 4096, 65537}) {
      for (const bool in_place : {false, true}) {
        std::vector<unsigned char> own = Message(comm.rank(), 0, 0, bytes);
        std::vector<unsigned char> all(bytes * comm.size(), 0xEE);
        unsigned char* place = all.data() + comm.rank() * bytes;
        if (in_place) std::copy(own.begin(), own.end(), place);
        // An empty vector has no address; nothing moves then.
        ASSERT_TRUE(comm.AllGather(comm.everyone(), in_place ? place : own.data(), all.data(),
                                   bytes, stream)
                        .ok());
        ASSERT_TRUE(stream.Synchronize().ok()) << comm.status();
        for (int peer = 0; peer < comm.size(); ++peer) {
          const std::vector<unsigned char> theirs = Message(peer, 0, 0, bytes);
          ASSERT_TRUE(std::equal(theirs.begin(), theirs.end(), all.begin() + peer * bytes));
        }
      }
    }
  });
}

TEST_P(CommContract, ReduceScatterHasTheBitsOfTheAscendingSum) {
  Ranks ranks = Make();
  OnEveryRank(ranks, [](Communicator& comm, kernels::Stream& stream) {
    for (const int64_t count : {0, 1, 5, 1000, (1 << 18) + 77}) {
      std::vector<float> send(count * comm.size());
      for (size_t i = 0; i < send.size(); ++i) send[i] = Contribution(comm.rank(), i);
      std::vector<float> sum(count, -1),
          scratch(comm.ReduceScatterScratchBytes(comm.size(), count) / sizeof(float));
      ASSERT_TRUE(comm.ReduceScatter(comm.everyone(), send.data(), sum.data(), count,
                                     scratch.data(), stream)
                      .ok());
      ASSERT_TRUE(stream.Synchronize().ok()) << comm.status();
      for (int64_t i = 0; i < count; ++i) {
        const int64_t index = comm.rank() * count + i;
        float serial = Contribution(0, index);
        for (int rank = 1; rank < comm.size(); ++rank) serial += Contribution(rank, index);
        ASSERT_EQ(serial, sum[i]) << "element " << i << " of " << count << " on rank "
                                  << comm.rank();
      }
    }
  });
}

TEST_P(CommContract, AllReduceIsTheSameEverywhere) {
  Ranks ranks = Make();
  OnEveryRank(ranks, [](Communicator& comm, kernels::Stream& stream) {
    const int64_t count = 37;
    std::vector<double> scratch(comm.AllReduceScratchBytes(count) / sizeof(double));
    for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kMax}) {
      std::vector<double> values(count), expected(count);
      for (int64_t i = 0; i < count; ++i) {
        values[i] = Contribution(comm.rank(), i);
        expected[i] = Contribution(0, i);
        for (int rank = 1; rank < comm.size(); ++rank) {
          const double other = Contribution(rank, i);
          expected[i] = op == ReduceOp::kSum ? expected[i] + other : std::max(expected[i], other);
        }
      }
      ASSERT_TRUE(comm.AllReduce(values.data(), count, op, scratch.data(), stream).ok());
      ASSERT_TRUE(stream.Synchronize().ok()) << comm.status();
      EXPECT_EQ(expected, values);
    }
  });
}

TEST_P(CommContract, MaximumShowsWhatIsNoNumber) {
  Ranks ranks = Make();
  OnEveryRank(ranks, [](Communicator& comm, kernels::Stream& stream) {
    double value = comm.rank() == comm.size() / 2 ? std::nan("") : comm.rank();
    std::vector<double> scratch(comm.size());
    ASSERT_TRUE(comm.AllReduce(&value, 1, ReduceOp::kMax, scratch.data(), stream).ok());
    ASSERT_TRUE(stream.Synchronize().ok()) << comm.status();
    EXPECT_TRUE(std::isnan(value));
  });
}

TEST_P(CommContract, NobodyLeavesABarrierBeforeAllHaveCome) {
  Ranks ranks = Make();
  std::atomic<int> arrived{0};
  OnEveryRank(ranks, [&](Communicator& comm, kernels::Stream& stream) {
    for (int round = 1; round <= 10; ++round) {
      stream.Submit([&](kernels::ExecContext&) {
        ++arrived;
        return absl::OkStatus();
      });
      ASSERT_TRUE(comm.Barrier(stream).ok());
      ASSERT_TRUE(stream.Synchronize().ok()) << comm.status();
      EXPECT_GE(arrived, round * comm.size());
    }
  });
}

// One sequence of everything, for counts and observers.
void IssueOneOfEach(Communicator& comm, kernels::Stream& stream, std::vector<char>& memory) {
  const int size = comm.size();
  memory.assign(4 << 20, 0);
  char* at = memory.data();
  const auto take = [&at](int64_t bytes) {
    char* block = at;
    at += (bytes + 63) / 64 * 64;
    return block;
  };
  AllToAllVParams params;
  for (int peer = 0; peer < size; ++peer) {
    for (const int64_t bytes : {int64_t{100}, int64_t{0}, int64_t{10} * (1 + comm.rank() + peer)}) {
      params.sends.push_back({peer, take(bytes), bytes});
      params.receives.push_back({peer, take(bytes), bytes});
    }
  }
  ASSERT_TRUE(comm.AllToAllV(params, stream).ok());
  ASSERT_TRUE(comm.AllGather(comm.everyone(), take(1000), take(1000 * size), 1000, stream).ok());
  ASSERT_TRUE(comm.ReduceScatter(comm.everyone(), reinterpret_cast<float*>(take(4 * 500 * size)),
                                 reinterpret_cast<float*>(take(4 * 500)), 500,
                                 take(comm.ReduceScatterScratchBytes(comm.size(), 500)), stream)
                  .ok());
  ASSERT_TRUE(comm.AllReduce(reinterpret_cast<double*>(take(8 * 3)), 3, ReduceOp::kSum,
                             take(comm.AllReduceScratchBytes(3)), stream)
                  .ok());
  ASSERT_TRUE(comm.Barrier(stream).ok());
  ASSERT_TRUE(stream.Synchronize().ok()) << comm.status();
}

std::vector<int64_t> BytesOfOneOfEach(int rank, int size) {
  std::vector<int64_t> bytes(size, 0);
  for (int peer = 0; peer < size; ++peer) {
    if (peer != rank) bytes[peer] = 100 + 10 * (1 + rank + peer) + 1000 + 4 * 500 + 8 * 3;
  }
  return bytes;
}

TEST_P(CommContract, CountsBytesPerPeerAsTheDryOneDoes) {
  Ranks ranks = Make();
  OnEveryRank(ranks, [](Communicator& comm, kernels::Stream& stream) {
    std::vector<char> memory;
    IssueOneOfEach(comm, stream, memory);
    EXPECT_EQ(BytesOfOneOfEach(comm.rank(), comm.size()), comm.stats().bytes_sent_to_peer);
    EXPECT_EQ(5, comm.stats().num_collectives);
    EXPECT_GT(comm.stats().seconds, 0);

    DryCommunicator dry(comm.rank(), comm.size());
    IssueOneOfEach(dry, stream, memory);
    EXPECT_EQ(dry.stats().bytes_sent_to_peer, comm.stats().bytes_sent_to_peer);
    EXPECT_EQ(dry.stats().num_collectives, comm.stats().num_collectives);
    for (const int64_t count : {1, 1000, 1 << 22}) {
      EXPECT_EQ(dry.ReduceScatterScratchBytes(dry.size(), count),
                comm.ReduceScatterScratchBytes(comm.size(), count));
      EXPECT_EQ(dry.AllReduceScratchBytes(count), comm.AllReduceScratchBytes(count));
      EXPECT_LE(comm.ReduceScatterScratchBytes(comm.size(), count), 2 << 20);
    }
  });
}

TEST_P(CommContract, ObserverSeesEveryCollectiveInOrder) {
  std::vector<std::vector<int64_t>> seen(size());
  std::vector<CommOptions> by_rank(size());
  for (int rank = 0; rank < size(); ++rank) {
    by_rank[rank].observer.entered = [&seen, rank](int64_t number) {
      seen[rank].push_back(number);
    };
    by_rank[rank].observer.left = [&seen, rank](int64_t number) { seen[rank].push_back(-number); };
  }
  Ranks ranks = std::get<0>(GetParam()).Make(by_rank);
  OnEveryRank(ranks, [](Communicator& comm, kernels::Stream& stream) {
    std::vector<char> memory;
    IssueOneOfEach(comm, stream, memory);
  });
  ranks.Destroy();
  for (int rank = 0; rank < size(); ++rank) {
    EXPECT_EQ((std::vector<int64_t>{1, -1, 2, -2, 3, -3, 4, -4, 5, -5}), seen[rank])
        << "rank " << rank;
  }
}

// The operation starts when its stream reaches it, later work of that stream waits, another stream
// goes on.
TEST_P(CommContract, OrderedOnItsStreamOnly) {
  Ranks ranks = Make();
  OnEveryRank(ranks, [](Communicator& comm, kernels::Stream& stream) {
    kernels::HostStream other = NewStream();
    std::promise<void> go;
    int64_t own = -1;
    std::vector<int64_t> all(comm.size(), -1), copy;
    stream.Submit([&](kernels::ExecContext&) {
      go.get_future().wait();
      own = 100 + comm.rank();
      return absl::OkStatus();
    });
    ASSERT_TRUE(comm.AllGather(comm.everyone(), &own, all.data(), sizeof own, stream).ok());
    stream.Submit([&](kernels::ExecContext&) {
      copy = all;
      return absl::OkStatus();
    });
    bool other_ran = false;
    other.Submit([&](kernels::ExecContext&) {
      other_ran = true;
      return absl::OkStatus();
    });
    ASSERT_TRUE(other.Synchronize().ok());
    EXPECT_TRUE(other_ran);
    EXPECT_EQ(-1, own);
    go.set_value();
    ASSERT_TRUE(stream.Synchronize().ok()) << comm.status();
    for (int peer = 0; peer < comm.size(); ++peer) EXPECT_EQ(100 + peer, copy[peer]);
  });
}

TEST_P(CommContract, TwoStreamsTakeTurnsInTheOrderOfIssue) {
  Ranks ranks = Make();
  OnEveryRank(ranks, [](Communicator& comm, kernels::Stream& stream) {
    kernels::HostStream other = NewStream();
    constexpr int kRounds = 20;
    std::vector<std::vector<int64_t>> all(kRounds, std::vector<int64_t>(comm.size(), -1));
    std::vector<int64_t> own(kRounds);
    for (int i = 0; i < kRounds; ++i) {
      own[i] = 1000 * i + comm.rank();
      ASSERT_TRUE(comm.AllGather(comm.everyone(), &own[i], all[i].data(), sizeof(int64_t),
                                 i % 2 == 0 ? stream : other)
                      .ok());
    }
    ASSERT_TRUE(stream.Synchronize().ok()) << comm.status();
    ASSERT_TRUE(other.Synchronize().ok()) << comm.status();
    for (int i = 0; i < kRounds; ++i) {
      for (int peer = 0; peer < comm.size(); ++peer) EXPECT_EQ(1000 * i + peer, all[i][peer]);
    }
  });
}

TEST_P(CommContract, VerifySameNamesTheRanksThatDiffer) {
  Ranks ranks = Make();
  OnEveryRank(ranks, [](Communicator& comm, kernels::Stream&) {
    const auto device = *kernels::HostDevice::Create({.arena_bytes = 4096}, nullptr);
    const auto stream = device->CreateStream("compute");
    const auto scratch =
        *device->allocator().Allocate(kernels::MemoryTag::kComm, comm.size() * 8, *stream);
    const auto verify = [&](uint64_t value) {
      return VerifySameOnAllRanks(comm, value, "schedule", scratch.data(), *device, *stream);
    };
    EXPECT_TRUE(verify(0xABCD).ok());
    if (comm.size() == 1) return;
    const absl::Status status = verify(comm.rank() == 1 ? 0x77 : 0xABCD);
    EXPECT_EQ(absl::StatusCode::kFailedPrecondition, status.code());
    EXPECT_NE(std::string::npos, status.message().find("rank 1 (77)")) << status;
    EXPECT_TRUE(comm.status().ok());
  });
}

INSTANTIATE_TEST_SUITE_P(All, CommContract,
                         testing::Combine(testing::ValuesIn(AllGroupKinds()),
                                          testing::Values(1, 2, 3, 5, 8)),
                         [](const auto& info) {
                           return absl::StrCat(std::get<0>(info.param).name, "_",
                                               std::get<1>(info.param));
                         });

TEST(DryCommunicatorTest, TouchesNoMemoryAndKeepsTheContractOfErrors) {
  DryCommunicator dry(1, 4);
  kernels::HostStream stream = NewStream();
  void* nowhere = reinterpret_cast<void*>(uintptr_t{4096});
  EXPECT_TRUE(dry.AllGather(dry.everyone(), nowhere, nowhere, 1 << 20, stream).ok());
  EXPECT_TRUE(dry.AllToAllV({{{0, nowhere, 64}}, {{2, nowhere, 64}}}, stream).ok());
  EXPECT_TRUE(stream.Synchronize().ok());
  EXPECT_EQ(absl::StatusCode::kInvalidArgument,
            dry.AllToAllV({{{4, nowhere, 64}}, {}}, stream).code());
  EXPECT_EQ(absl::StatusCode::kInvalidArgument, dry.Barrier(stream).code());
  EXPECT_EQ(absl::StatusCode::kInvalidArgument, stream.Synchronize().code());
}

}  // namespace
}  // namespace upipe::comm
