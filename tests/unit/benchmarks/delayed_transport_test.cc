// The network of a stated speed: how long transfers take, both ways at once and one after another,
// that bits stay, that a late peer starts the clock, that an abort ends a journey and that waiting
// for one costs no processor.
#include "benchmarks/support/delayed_transport.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <ctime>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "absl/time/clock.h"
#include "kernels/host/host_stream.h"

namespace upipe::bench {
namespace {

using comm::AllToAllVParams;
using comm::Communicator;

constexpr double kSpeed = 20e6;  // bytes per second
constexpr int64_t kBytes = 4000000;
constexpr double kSeconds = kBytes / kSpeed;
const LinkSpeed kLinks{.bytes_per_second = kSpeed};
constexpr double kSlack = 0.05;  // of a busy machine

class OneThread final : public kernels::ParallelFor {
 public:
  int num_threads() const override { return 1; }
  void Run(int64_t count, const std::function<void(int64_t, int64_t, int)>& body) override {
    if (count > 0) body(0, count, 0);
  }
};

kernels::HostStream NewStream() {
  return kernels::HostStream("test", std::make_shared<OneThread>(), std::nullopt, {});
}

// Lets time go by.
void LetPass(absl::Duration duration) {
  const absl::Time end = absl::Now() + duration;
  while (absl::Now() < end) absl::SleepFor(absl::Milliseconds(20));
}

double SecondsOf(const std::function<void()>& work) {
  const absl::Time begin = absl::Now();
  work();
  return absl::ToDoubleSeconds(absl::Now() - begin);
}

// What one rank sends and receives: `bytes` to and from each peer, itself not.
struct Blocks {
  std::vector<std::vector<char>> out, in;
  AllToAllVParams params;

  Blocks(const Communicator& comm, int64_t bytes) {
    for (int peer = 0; peer < comm.size(); ++peer) {
      out.emplace_back(bytes, static_cast<char>(10 * comm.rank() + peer));
      in.emplace_back(bytes, 0);
    }
    for (int i = 1; i < comm.size(); ++i) {
      const int peer = (comm.rank() + i) % comm.size();
      params.sends.push_back({peer, out[peer].data(), bytes});
      params.receives.push_back({peer, in[peer].data(), bytes});
    }
  }
  void ExpectArrived(int rank) const {
    for (size_t peer = 0; peer < in.size(); ++peer) {
      if (static_cast<int>(peer) == rank) continue;
      const char expected = static_cast<char>(10 * peer + rank);
      EXPECT_EQ(in[peer], std::vector<char>(in[peer].size(), expected)) << "of rank " << peer;
    }
  }
};

// At least `expected` every time, and in the best of some tries, on a machine with other things to
// do, not half as much again.
void ExpectAbout(double expected, const std::function<double()>& seconds_of_a_try) {
  double least = 0;
  for (int i = 0; i < 5; ++i) {
    const double seconds = seconds_of_a_try();
    ASSERT_GE(seconds, expected);
    least = i == 0 ? seconds : std::min(least, seconds);
    if (least < 1.5 * expected + kSlack) return;
  }
  ADD_FAILURE() << least << " s instead of about " << expected;
}

// Issues on one thread and stream per rank; seconds until every stream has passed.
double SecondsOnEveryRank(
    const std::vector<std::unique_ptr<Communicator>>& ranks,
    const std::function<absl::Status(Communicator&, kernels::Stream&)>& issue) {
  return SecondsOf([&] {
    std::vector<std::thread> threads;
    for (const auto& comm : ranks) {
      threads.emplace_back([&] {
        kernels::HostStream stream = NewStream();
        EXPECT_TRUE(issue(*comm, stream).ok()) << comm->status();
        EXPECT_TRUE(stream.Synchronize().ok()) << comm->status();
      });
    }
    for (std::thread& thread : threads) thread.join();
  });
}

// `repeats` exchanges, one after another.
double ExchangeSeconds(int size, const LinkSpeed& speed, int64_t bytes, int repeats) {
  const auto ranks = CreateDelayedGroup(size, speed, {});
  std::vector<std::unique_ptr<Blocks>> blocks;
  for (const auto& comm : ranks) blocks.push_back(std::make_unique<Blocks>(*comm, bytes));
  const double seconds =
      SecondsOnEveryRank(ranks, [&](Communicator& comm, kernels::Stream& stream) {
        absl::Status status;
        for (int i = 0; i < repeats; ++i)
          status.Update(comm.AllToAllV(blocks[comm.rank()]->params, stream));
        return status;
      });
  for (int rank = 0; rank < size; ++rank) blocks[rank]->ExpectArrived(rank);
  return seconds;
}

TEST(DelayedTransport, BothDirectionsTakeTheTimeOfOne) {
  ExpectAbout(kSeconds, [] { return ExchangeSeconds(2, kLinks, kBytes, 1); });
}

TEST(DelayedTransport, ALinkServesOnePeerAfterAnother) {
  ExpectAbout(kSeconds, [] { return ExchangeSeconds(3, kLinks, kBytes / 2, 1); });
}

TEST(DelayedTransport, CollectivesComeOneAfterAnother) {
  ExpectAbout(kSeconds, [] { return ExchangeSeconds(2, kLinks, kBytes / 4, 4); });
}

TEST(DelayedTransport, LatencyIsPaidPerCollective) {
  const LinkSpeed speed{.bytes_per_second = 1e12, .latency = absl::Milliseconds(40)};
  ExpectAbout(5 * 0.040, [&] { return ExchangeSeconds(2, speed, 1000, 5); });
}

TEST(DelayedTransport, AReduceScatterInPiecesMovesEachByteOnce) {
  const int64_t count = kBytes / sizeof(float);
  const std::vector<float> send(2 * count, 1.5f);
  ExpectAbout(kSeconds, [&] {
    const auto ranks = CreateDelayedGroup(2, kLinks, {});
    std::vector<std::vector<float>> sums(2, std::vector<float>(count)), scratch(2);
    for (auto& memory : scratch)
      memory.resize(ranks[0]->ReduceScatterScratchBytes(2, count) / sizeof(float));
    const double seconds =
        SecondsOnEveryRank(ranks, [&](Communicator& comm, kernels::Stream& stream) {
          const int rank = comm.rank();
          return comm.ReduceScatter(comm.everyone(), send.data(), sums[rank].data(), count,
                                    scratch[rank].data(), stream);
        });
    for (const auto& sum : sums) EXPECT_EQ(sum, std::vector<float>(count, 3.0f));
    return seconds;
  });
}

TEST(DelayedTransport, AMessageLeavesWhenBothEndsAreThere) {
  ExpectAbout(kSeconds, [] {
    const auto ranks = CreateDelayedGroup(2, kLinks, {});
    Blocks early(*ranks[0], kBytes), late(*ranks[1], kBytes);
    kernels::HostStream early_stream = NewStream(), late_stream = NewStream();
    EXPECT_TRUE(ranks[0]->AllToAllV(early.params, early_stream).ok());
    // Rank 0's messages could have crossed by now.
    LetPass(absl::Seconds(1.2 * kSeconds));
    const double seconds = SecondsOf([&] {
      EXPECT_TRUE(ranks[1]->AllToAllV(late.params, late_stream).ok());
      EXPECT_TRUE(early_stream.Synchronize().ok());
      EXPECT_TRUE(late_stream.Synchronize().ok());
    });
    early.ExpectArrived(0);
    late.ExpectArrived(1);
    return seconds;
  });
}

double ProcessSeconds() {
  timespec now = {};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return now.tv_sec + now.tv_nsec * 1e-9;
}

TEST(DelayedTransport, AnAbortEndsAJourneyAndUntilThenNobodySpins) {
  const auto ranks = CreateDelayedGroup(2, {.bytes_per_second = 1}, {});  // takes weeks
  Blocks first(*ranks[0], kBytes), second(*ranks[1], kBytes);
  kernels::HostStream first_stream = NewStream(), second_stream = NewStream();
  ASSERT_TRUE(ranks[0]->AllToAllV(first.params, first_stream).ok());
  ASSERT_TRUE(ranks[1]->AllToAllV(second.params, second_stream).ok());
  absl::SleepFor(absl::Milliseconds(20));
  const double before = ProcessSeconds();
  LetPass(absl::Milliseconds(300));
  EXPECT_LT(ProcessSeconds() - before, 0.05 * 0.3);
  const double seconds = SecondsOf([&] {
    ranks[0]->Abort(absl::CancelledError("enough"));
    for (auto* stream : {&first_stream, &second_stream}) {
      EXPECT_EQ(stream->Synchronize().code(), absl::StatusCode::kCancelled);
    }
  });
  EXPECT_LT(seconds, 1);
}

TEST(DelayedTransport, AMessageStillOnTheWiresAtTheDeadlineIsAnError) {
  const auto ranks =
      CreateDelayedGroup(2, {.bytes_per_second = 1}, {.deadline = absl::Milliseconds(100)});
  Blocks first(*ranks[0], kBytes), second(*ranks[1], kBytes);
  kernels::HostStream first_stream = NewStream(), second_stream = NewStream();
  ASSERT_TRUE(ranks[0]->AllToAllV(first.params, first_stream).ok());
  ASSERT_TRUE(ranks[1]->AllToAllV(second.params, second_stream).ok());
  EXPECT_EQ(first_stream.Synchronize().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_FALSE(second_stream.Synchronize().ok());
}

}  // namespace
}  // namespace upipe::bench
