// UCX between real processes: this binary starts itself once per rank. What only processes can
// show: a rank killed inside a collective, memory UCX takes behind our back, processor time of a
// waiting rank, what stays behind.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <ctime>
#include <optional>
#include <thread>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "engine/comm/ucx/ucx_communicator.h"
#include "gmock/gmock.h"
#include "tests/contract/engine/comm_groups.h"
#include "tests/contract/engine/rank_processes.h"

// Watches every allocation of this process, UCX's included. glibc only; sanitizers bring their own
// malloc.
namespace {
std::atomic<bool> watching{false};
std::atomic<size_t> largest{0};
}  // namespace
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
namespace {
void Note(size_t bytes) {
  if (!watching.load(std::memory_order_relaxed)) return;
  size_t seen = largest.load();
  while (bytes > seen && !largest.compare_exchange_weak(seen, bytes)) {
  }
}
}  // namespace
extern "C" {
void* __libc_malloc(size_t);
void* __libc_calloc(size_t, size_t);
void* __libc_realloc(void*, size_t);
void* __libc_memalign(size_t, size_t);
void* malloc(size_t n) { return Note(n), __libc_malloc(n); }
void* calloc(size_t n, size_t size) { return Note(n * size), __libc_calloc(n, size); }
void* realloc(void* p, size_t n) { return Note(n), __libc_realloc(p, n); }
void* memalign(size_t a, size_t n) { return Note(n), __libc_memalign(a, n); }
void* aligned_alloc(size_t a, size_t n) { return Note(n), __libc_memalign(a, n); }
int posix_memalign(void** out, size_t a, size_t n) {
  Note(n);
  *out = __libc_memalign(a, n);
  return *out == nullptr ? ENOMEM : 0;
}
}
#endif

namespace upipe::comm {
namespace {

using testing::HasSubstr;

// ---- The rank process.

constexpr int64_t kVictimCollective = 3;
constexpr absl::Duration kPeerSilence = absl::Seconds(2);
constexpr int64_t kTimedBytes = 1 << 20;  // between each pair

double ProcessSeconds() {
  timespec now = {};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return now.tv_sec + now.tv_nsec * 1e-9;
}

double WallSeconds() { return absl::ToDoubleSeconds(absl::Now() - absl::UnixEpoch()); }

// Says the largest allocation made after the first step, and the median seconds of one exchange.
std::string RunExchanges(Communicator& comm, kernels::Stream& stream) {
  constexpr int64_t kBytes = kTimedBytes;
  const int64_t count = 50000;
  std::vector<char> out(kBytes * comm.size()), in(kBytes * comm.size());
  std::vector<float> send(count * comm.size(), 1.0f), sum(count);
  std::vector<char> scratch(comm.ReduceScatterScratchBytes(comm.size(), count));
  std::vector<double> seconds;
  seconds.reserve(30);
  watching = true;
  for (int step = 0; step < 30; ++step) {
    const double begin = WallSeconds();
    if (absl::Status status = ExchangeOnce(comm, stream, kBytes, &out, &in); !status.ok())
      return status.ToString();
    seconds.push_back(WallSeconds() - begin);
    comm.ReduceScatter(comm.everyone(), send.data(), sum.data(), count, scratch.data(), stream)
        .IgnoreError();
    if (absl::Status status = stream.Synchronize(); !status.ok()) return status.ToString();
    if (sum[step] != static_cast<float>(comm.size())) return "wrong sum";
  }
  watching = false;
  std::nth_element(seconds.begin(), seconds.begin() + 15, seconds.end());
  return absl::StrCat("ok ", largest.load(), " ", seconds[15]);
}

// Exchanges until something ends it.
std::string RunUntilError(Communicator& comm, kernels::Stream& stream) {
  constexpr int64_t kBytes = 300000;
  std::vector<char> out(kBytes * comm.size()), in(kBytes * comm.size());
  absl::Status status;
  while (status.ok()) status = ExchangeOnce(comm, stream, kBytes, &out, &in);
  return status.ToString();
}

// Waits for a peer that does not come; says how much processor time that took.
std::string RunIdleWait(Communicator& comm, kernels::Stream& stream) {
  if (comm.rank() == 0) {
    const double begin = ProcessSeconds();
    comm.Barrier(stream).IgnoreError();
    const absl::Status status = stream.Synchronize();
    return absl::StrCat(absl::StatusCodeToString(status.code()), " ", ProcessSeconds() - begin);
  }
  return "ok";
}

// Rank 1 computes for longer than a lost machine is given, while what the others send it fills
// every buffer on the way.
std::string RunSlow(Communicator& comm, kernels::Stream& stream) {
  constexpr int kBlocks = 400;
  constexpr int64_t kBytes = 15000;  // short enough for UCX to send it unasked
  if (comm.rank() == 1) LetPass(kPeerSilence * 1.5);
  std::vector<char> out(kBytes * kBlocks, 1), in(kBytes * kBlocks * comm.size());
  AllToAllVParams params;
  for (int peer = 0; peer < comm.size(); ++peer) {
    for (int block = 0; block < kBlocks; ++block) {
      params.sends.push_back({peer, out.data() + block * kBytes, kBytes});
      params.receives.push_back({peer, in.data() + (peer * kBlocks + block) * kBytes, kBytes});
    }
  }
  comm.AllToAllV(params, stream).IgnoreError();
  if (absl::Status status = stream.Synchronize(); !status.ok()) return status.ToString();
  return std::count(in.begin(), in.end(), 1) == static_cast<int64_t>(in.size()) ? "ok" : "wrong";
}

std::string RunScenario(const RankCase& self, Communicator& comm) {
  kernels::HostStream stream = NewStream();
  if (self.scenario == "exchange") return RunExchanges(comm, stream);
  if (self.scenario == "idle") return RunIdleWait(comm, stream);
  if (self.scenario == "slow") return RunSlow(comm, stream);
  return RunUntilError(comm, stream);
}

int RunRank(const RankCase& self) {
  auto context = UcxContext::Create({.tcp_devices = "lo",
                                     .peer_silence = kPeerSilence,
                                     .close_deadline = absl::Milliseconds(500)});
  if (!context.ok()) return SendFrame(self.fd, context.status().ToString()), 1;
#ifndef __SANITIZE_ADDRESS__  // which has handlers of its own
  struct sigaction now = {};
  sigaction(SIGSEGV, nullptr, &now);
  if (now.sa_handler != SIG_DFL)
    return SendFrame(self.fd, "a signal handler of UCX is installed"), 1;
#endif
  CommOptions options;
  options.deadline = self.scenario == "victim_deadline" || self.scenario == "idle"
                         ? absl::Seconds(1)
                         : absl::Minutes(2);
  if (absl::StrContains(self.scenario, "victim") && self.rank == 1) {
    options.observer.entered = [](int64_t number) {
      if (number == kVictimCollective) kill(getpid(), SIGKILL);
    };
  }
  auto comm = MeetPeers(**context, self, options);
  if (!comm.ok()) return SendFrame(self.fd, comm.status().ToString()), 1;
  std::thread supervision([&] {
    const std::optional<std::string> order = ReceiveFrame(self.fd);
    if (order == "abort") (*comm)->Abort(absl::UnavailableError("the supervisor saw rank 1 die"));
  });
  const std::string result = RunScenario(self, **comm);
  SendFrame(self.fd, result);
  supervision.join();  // the supervisor says "end", or is gone
  comm->reset();
  return 0;
}

// ---- The tests.

const std::vector<std::string> kOneNode(4, "a");
const std::vector<std::string> kTwoNodes = {"a", "b", "b", "a"};
const std::vector<std::string> kFourNodes = {"a", "b", "c", "d"};

TEST(UcxProcesses, ExchangeWithoutLargeAllocations) {
  const std::pair<std::string, std::vector<std::string>> cases[] = {
      {"over memory", kOneNode}, {"over memory and tcp", kTwoNodes}, {"over tcp", kFourNodes}};
  for (const auto& [wires, nodes] : cases) {
    RankProcesses ranks("exchange", nodes);
    ranks.Introduce();
    for (int rank = 0; rank < 4; ++rank) {
      const std::string result = ranks.Result(rank);
      const std::vector<std::string> words = absl::StrSplit(result, ' ');
      ASSERT_EQ("ok", words[0]) << result;
      int64_t largest_bytes = 0;
      ASSERT_TRUE(absl::SimpleAtoi(words[1], &largest_bytes));
      EXPECT_LE(largest_bytes, 64 << 10) << "rank " << rank;
      double seconds = 0;
      ASSERT_TRUE(absl::SimpleAtod(words[2], &seconds));
      if (rank == 0) {
        std::printf("all-to-all of 4 ranks %s: %.2f GB/s leave each rank\n", wires.c_str(),
                    3 * kTimedBytes / seconds / 1e9);
      }
    }
    ranks.EndAll();
    ranks.ExpectNothingLeft();
  }
}

TEST(UcxProcesses, KilledRankAndTheSupervisorsAbort) {
  RankProcesses ranks("victim", kOneNode);
  ranks.Introduce();
  const int ended = ranks.Reap(1);
  ASSERT_TRUE(WIFSIGNALED(ended) && WTERMSIG(ended) == SIGKILL);
  for (int rank : {0, 2, 3}) ranks.Tell(rank, "abort");
  for (int rank : {0, 2, 3})
    EXPECT_THAT(ranks.Result(rank), HasSubstr("the supervisor saw rank 1 die"));
  ranks.EndAll();
  ranks.ExpectNothingLeft();
}

TEST(UcxProcesses, KilledRankAndNobodyWhoTells) {
  RankProcesses ranks("victim_deadline", kOneNode);
  ranks.Introduce();
  for (int rank : {0, 2, 3}) {
    EXPECT_THAT(ranks.Result(rank),
                testing::AllOf(HasSubstr("DEADLINE_EXCEEDED"), HasSubstr("rank ")));
  }
  ranks.Reap(1);
  ranks.EndAll();
  ranks.ExpectNothingLeft();
}

// The neighbour of the dead one, over memory, hears of it from those that leave.
TEST(UcxProcesses, KilledRankBetweenNodesIsNoticedByTcp) {
  for (const auto& nodes : {kTwoNodes, kFourNodes}) {
    RankProcesses ranks("victim", nodes);
    ranks.Introduce();
    for (int rank : {0, 2, 3}) {
      EXPECT_THAT(ranks.Result(rank),
                  testing::AllOf(testing::StartsWith("UNAVAILABLE"),
                                 testing::ContainsRegex("to rank [0-3] on node [a-d] ")));
    }
    ranks.Reap(1);
    ranks.EndAll();
    for (int rank : {0, 2, 3}) EXPECT_EQ("", ranks.Output(rank)) << "rank " << rank;
    ranks.ExpectNothingLeft();
  }
}

TEST(UcxProcesses, RankThatDiedBeforeTheyMet) {
  RankProcesses ranks("exchange", kFourNodes);
  ranks.Signal(1, SIGKILL);
  ranks.Reap(1);
  ranks.Introduce();
  for (int rank : {0, 2, 3}) {
    EXPECT_THAT(ranks.Result(rank),
                testing::AllOf(testing::StartsWith("UNAVAILABLE"), HasSubstr("on node")));
    EXPECT_NE(0, ranks.Reap(rank));
  }
}

TEST(UcxProcesses, SlowRankIsNotALostOne) {
  RankProcesses ranks("slow", kFourNodes);
  ranks.Introduce();
  for (int rank = 0; rank < 4; ++rank) EXPECT_EQ("ok", ranks.Result(rank)) << "rank " << rank;
  ranks.EndAll();
}

TEST(UcxProcesses, WaitingRankLeavesTheProcessorAlone) {
  for (const auto& nodes :
       {std::vector<std::string>{"a", "a"}, std::vector<std::string>{"a", "b"}}) {
    RankProcesses ranks("idle", nodes);
    ranks.Introduce();
    const std::string result = ranks.Result(0);
    const std::vector<std::string> words = absl::StrSplit(result, ' ');
    ASSERT_EQ("DEADLINE_EXCEEDED", words[0]) << result;
    double seconds = 1;
    ASSERT_TRUE(absl::SimpleAtod(words[1], &seconds)) << result;
    EXPECT_LT(seconds, 0.05) << "of one second";
    ranks.EndAll();
  }
}

}  // namespace
}  // namespace upipe::comm

int main(int argc, char** argv) {
  return upipe::comm::RankProcessMain(argc, argv, &upipe::comm::RunRank);
}
