// What a communicator does when a peer does not come, sends something else, or someone aborts: one
// error, kept, carried by every stream, and never a hang.
#include <atomic>
#include <functional>

#include "gmock/gmock.h"
#include "tests/contract/engine/comm_groups.h"

namespace upipe::comm {
namespace {

using testing::HasSubstr;

class CommFailure : public testing::TestWithParam<GroupKind> {
 protected:
  static Ranks Make(int size, absl::Duration deadline = absl::Seconds(30)) {
    CommOptions options;
    options.deadline = deadline;
    return GetParam().Make(std::vector<CommOptions>(size, options));
  }
};

TEST_P(CommFailure, DeadlineWhenAPeerDoesNotCome) {
  // The ranks that wait notice at nearly one time: the first one's end may reach the other first.
  std::atomic<int> noticed = 0;
  Ranks ranks = Make(3, absl::Milliseconds(300));
  OnEveryRank(ranks, [&](Communicator& comm, kernels::Stream& stream) {
    if (comm.rank() == 1) return;  // stays away
    std::vector<char> all(3 * 100000);
    ASSERT_TRUE(comm.AllGather(comm.everyone(), all.data(), all.data(), 100000, stream).ok());
    const absl::Status status = stream.Synchronize();
    EXPECT_THAT(status.message(), HasSubstr("collective 1 (all-gather)"));
    if (absl::IsUnavailable(status)) {
      EXPECT_THAT(status.message(), HasSubstr(absl::StrCat("rank ", 2 - comm.rank(), " on node")));
      return;
    }
    ++noticed;
    EXPECT_EQ(absl::StatusCode::kDeadlineExceeded, status.code()) << status;
    if (GetParam().names_peers) {
      EXPECT_THAT(std::string(status.message()),
                  testing::ContainsRegex("rank 1 (on node [a-z0-9]+ )?did not"));
    }
  });
  EXPECT_GE(noticed, 1);
}

TEST_P(CommFailure, DeadAfterTheFirstError) {
  Ranks ranks = Make(2);
  OnEveryRank(ranks, [](Communicator& comm, kernels::Stream& stream) {
    comm.Abort(absl::CancelledError("first"));
    comm.Abort(absl::UnknownError("second"));
    const absl::Status first = comm.status();
    EXPECT_EQ(absl::StatusCode::kCancelled, first.code());
    double value = 0, scratch[2];
    std::vector<std::function<absl::Status(kernels::Stream&)>> calls = {
        [&](kernels::Stream& s) { return comm.Barrier(s); },
        [&](kernels::Stream& s) { return comm.AllToAllV({}, s); },
        [&](kernels::Stream& s) { return comm.AllGather(comm.everyone(), &value, scratch, 8, s); },
        [&](kernels::Stream& s) { return comm.AllReduce(&value, 1, ReduceOp::kSum, scratch, s); },
    };
    for (auto& call : calls) {
      kernels::HostStream fresh = NewStream();
      EXPECT_EQ(first, call(fresh));
      EXPECT_EQ(first, fresh.Synchronize());
    }
    EXPECT_TRUE(stream.Synchronize().ok());
  });
}

TEST_P(CommFailure, AbortEndsTheOperationInFlight) {
  Ranks ranks = Make(3);
  std::vector<std::unique_ptr<kernels::Stream>> streams;
  std::vector<char> all(3 * 3 * 100000);
  for (int rank : {0, 2}) {
    streams.push_back(std::unique_ptr<kernels::Stream>(new kernels::HostStream(NewStream())));
    char* own = all.data() + rank * 300000;
    ASSERT_TRUE(
        ranks[rank]->AllGather(ranks[rank]->everyone(), own, own, 100000, *streams.back()).ok());
  }
  for (int rank : {0, 2}) ranks[rank]->Abort(absl::CancelledError("user cancelled"));
  for (auto& stream : streams) {
    const absl::Status status = stream->Synchronize();
    EXPECT_EQ(absl::StatusCode::kCancelled, status.code()) << status;
    EXPECT_THAT(status.message(), HasSubstr("user cancelled"));
  }
}

TEST_P(CommFailure, UnlikeSizesAreAnErrorAndNoHang) {
  for (const int64_t other : {999, 1001, 200000}) {
    Ranks ranks = Make(2, absl::Milliseconds(500));
    OnEveryRank(ranks, [other](Communicator& comm, kernels::Stream& stream) {
      std::vector<char> out(200000), in(200000);
      const int peer = 1 - comm.rank();
      const int64_t bytes = comm.rank() == 0 ? other : 1000;
      ASSERT_TRUE(
          comm.AllToAllV({{{peer, out.data(), bytes}}, {{peer, in.data(), bytes}}}, stream).ok());
      const absl::Status status = stream.Synchronize();
      EXPECT_FALSE(status.ok());
      EXPECT_THAT(status.message(),
                  testing::AnyOf(HasSubstr("different schedules"), HasSubstr("deadline")));
      EXPECT_EQ(status, comm.status());
    });
  }
}

TEST_P(CommFailure, MoreBlocksThanThePeerExpectsIsNoHang) {
  Ranks ranks = Make(2, absl::Milliseconds(300));
  OnEveryRank(ranks, [](Communicator& comm, kernels::Stream& stream) {
    std::vector<char> out(200000), in(200000);
    const int peer = 1 - comm.rank();
    AllToAllVParams params{{{peer, out.data(), 100000}}, {{peer, in.data(), 100000}}};
    if (comm.rank() == 0) params.receives.push_back({peer, in.data() + 100000, 100000});
    ASSERT_TRUE(comm.AllToAllV(params, stream).ok());
    const absl::Status status = stream.Synchronize();
    if (comm.rank() == 0) {
      EXPECT_FALSE(status.ok());
    }
  });
}

// A small surplus block is taken by UCX at once, so its sender cannot notice; other senders wait in
// vain.
TEST_P(CommFailure, ABlockNobodyExpectsIsFoundByTheNextCollective) {
  const bool sender_waits = GetParam().sends_wait;
  Ranks ranks = Make(2, sender_waits ? absl::Milliseconds(300) : absl::Seconds(30));
  OnEveryRank(ranks, [&](Communicator& comm, kernels::Stream& stream) {
    char out[2] = {}, in[2] = {};
    const int peer = 1 - comm.rank();
    AllToAllVParams params{{{peer, out, 1}}, {{peer, in, 1}}};
    if (comm.rank() == 0) params.sends.push_back({peer, out + 1, 1});
    ASSERT_TRUE(comm.AllToAllV(params, stream).ok());
    comm.Barrier(stream).IgnoreError();
    const absl::Status status = stream.Synchronize();
    if (comm.rank() == 1) {
      EXPECT_FALSE(status.ok());
    }
    if (comm.rank() == 1 && !sender_waits) {
      EXPECT_EQ(absl::StatusCode::kInternal, status.code());
      EXPECT_THAT(status.message(), HasSubstr("rank 0 sent block 1 of 1 bytes in collective 1"));
    }
  });
}

TEST_P(CommFailure, AStreamInErrorEndsTheCommunicator) {
  Ranks ranks = Make(2, absl::Seconds(1));
  OnEveryRank(ranks, [](Communicator& comm, kernels::Stream& stream) {
    if (comm.rank() == 0) {
      stream.Submit([](kernels::ExecContext&) { return absl::DataLossError("bad kernel"); });
    }
    double value = 1, scratch[2];
    // Refused at once when the peer has told us already.
    comm.AllReduce(&value, 1, ReduceOp::kSum, scratch, stream).IgnoreError();
    EXPECT_FALSE(stream.Synchronize().ok());
    kernels::HostStream healthy = NewStream();
    comm.Barrier(healthy).IgnoreError();
    const absl::Status status = healthy.Synchronize();
    EXPECT_FALSE(status.ok());
    if (comm.rank() == 0) {
      EXPECT_EQ(absl::StatusCode::kDataLoss, status.code()) << status;
    }
  });
}

TEST_P(CommFailure, WrongParametersAreRefusedAndFinal) {
  Ranks ranks = Make(1);
  kernels::HostStream stream = NewStream();
  char byte = 0;
  const auto refuse = [&](const AllToAllVParams& params) {
    Ranks fresh = Make(1);
    kernels::HostStream own = NewStream();
    EXPECT_EQ(absl::StatusCode::kInvalidArgument, fresh[0]->AllToAllV(params, own).code());
    EXPECT_EQ(absl::StatusCode::kInvalidArgument, own.Synchronize().code());
    EXPECT_EQ(absl::StatusCode::kInvalidArgument, fresh[0]->status().code());
  };
  refuse({{{1, &byte, 1}}, {}});
  refuse({{}, {{-1, &byte, 1}}});
  refuse({{{0, &byte, -1}}, {}});
  refuse({{{0, nullptr, 1}}, {{0, &byte, 1}}});
  refuse({{{0, &byte, 1}}, {}});
  EXPECT_EQ(absl::StatusCode::kInvalidArgument,
            ranks[0]->AllGather(ranks[0]->everyone(), nullptr, &byte, 1, stream).code());
}

INSTANTIATE_TEST_SUITE_P(All, CommFailure, testing::ValuesIn(AllGroupKinds()),
                         [](const auto& info) { return info.param.name; });

// What only threads can promise: one rank's abort or departure ends the others' waits at once.
TEST(InprocFailure, AbortAndDepartureReachThePeers) {
  for (const bool abort : {true, false}) {
    CommOptions options;
    Ranks ranks = AllGroupKinds()[0].Make(std::vector<CommOptions>(2, options));
    kernels::HostStream stream = NewStream();
    std::vector<char> all(20);
    ASSERT_TRUE(ranks[0]->AllGather(ranks[0]->everyone(), all.data(), all.data(), 10, stream).ok());
    if (abort) {
      ranks[1]->Abort(absl::CancelledError("enough"));
    } else {
      ranks[1].reset();
    }
    const absl::Status status = stream.Synchronize();
    EXPECT_EQ(abort ? absl::StatusCode::kCancelled : absl::StatusCode::kUnavailable, status.code())
        << status;
  }
}

}  // namespace
}  // namespace upipe::comm
