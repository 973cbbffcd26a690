// UCX between real processes: this binary starts itself once per rank. What only processes can
// show: a rank killed inside a collective, memory UCX takes behind our back, processor time of a
// waiting rank, what stays behind.
#include <fcntl.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <optional>
#include <sstream>
#include <thread>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "engine/comm/ucx/ucx_communicator.h"
#include "gmock/gmock.h"
#include "tests/contract/engine/comm_groups.h"

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

// ---- Framed strings over a socket pair: how a rank and its supervisor talk.

bool SendFrame(int fd, const std::string& text) {
  const uint32_t length = text.size();
  const std::string frame =
      std::string(reinterpret_cast<const char*>(&length), sizeof length) + text;
  return send(fd, frame.data(), frame.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(frame.size());
}

// Nothing when the other end is gone.
std::optional<std::string> ReceiveFrame(int fd) {
  uint32_t length = 0;
  if (recv(fd, &length, sizeof length, MSG_WAITALL) != sizeof length) return std::nullopt;
  std::string text(length, '\0');
  if (length > 0 && recv(fd, text.data(), length, MSG_WAITALL) != static_cast<ssize_t>(length))
    return std::nullopt;
  return text;
}

// ---- The rank process.

constexpr int64_t kVictimCollective = 3;

struct RankCase {
  std::string scenario;
  int rank = 0;
  int size = 0;
  int fd = -1;
};

double ProcessSeconds() {
  timespec now = {};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return now.tv_sec + now.tv_nsec * 1e-9;
}

double WallSeconds() { return absl::ToDoubleSeconds(absl::Now() - absl::UnixEpoch()); }

// `bytes` to and from everyone; the status of the operation, or DataLoss when a byte is wrong.
absl::Status ExchangeOnce(Communicator& comm, kernels::Stream& stream, int64_t bytes,
                          std::vector<char>* out, std::vector<char>* in) {
  AllToAllVParams params;
  for (int peer = 0; peer < comm.size(); ++peer) {
    std::memset(out->data() + peer * bytes, 1 + comm.rank() * comm.size() + peer, bytes);
    params.sends.push_back({peer, out->data() + peer * bytes, bytes});
    params.receives.push_back({peer, in->data() + peer * bytes, bytes});
  }
  comm.AllToAllV(params, stream).IgnoreError();
  if (absl::Status status = stream.Synchronize(); !status.ok()) return status;
  for (int peer = 0; peer < comm.size(); ++peer) {
    const char expected = static_cast<char>(1 + peer * comm.size() + comm.rank());
    for (int64_t i = 0; i < bytes; ++i) {
      if ((*in)[peer * bytes + i] != expected)
        return absl::DataLossError(absl::StrCat("byte ", i, " from ", peer));
    }
  }
  return absl::OkStatus();
}

// Says the largest allocation made after the first step, and the median seconds of one exchange of
// a MiB.
std::string RunExchanges(Communicator& comm, kernels::Stream& stream) {
  constexpr int64_t kBytes = 1 << 20;
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

std::string RunScenario(const RankCase& self, Communicator& comm) {
  kernels::HostStream stream = NewStream();
  if (self.scenario == "exchange") return RunExchanges(comm, stream);
  if (self.scenario == "idle") return RunIdleWait(comm, stream);
  return RunUntilError(comm, stream);
}

int RunRank(const RankCase& self) {
  auto context =
      UcxContext::Create({.tcp_devices = "lo", .close_deadline = absl::Milliseconds(500)});
  if (!context.ok()) return SendFrame(self.fd, context.status().ToString()), 1;
#ifndef __SANITIZE_ADDRESS__  // which has handlers of its own
  struct sigaction now = {};
  sigaction(SIGSEGV, nullptr, &now);
  if (now.sa_handler != SIG_DFL)
    return SendFrame(self.fd, "a signal handler of UCX is installed"), 1;
#endif
  SendFrame(self.fd, (*context)->address());
  UcxGroup group{.rank = self.rank, .identity = {"job", 1, 0xF00D, "nonce"}};
  for (int rank = 0; rank < self.size; ++rank)
    group.addresses.push_back(ReceiveFrame(self.fd).value());
  for (int rank = 0; rank < self.size; ++rank)
    group.node_ids.push_back(ReceiveFrame(self.fd).value());
  CommOptions options;
  options.deadline = self.scenario == "victim_deadline" || self.scenario == "idle"
                         ? absl::Seconds(1)
                         : absl::Minutes(2);
  if (absl::StrContains(self.scenario, "victim") && self.rank == 1) {
    options.observer.entered = [](int64_t number) {
      if (number == kVictimCollective) kill(getpid(), SIGKILL);
    };
  }
  auto comm = (*context)->Connect(group, options);
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

// ---- The supervisor.

class RankProcesses {
 public:
  RankProcesses(const std::string& scenario, const std::vector<std::string>& node_of_rank) {
    const int size = static_cast<int>(node_of_rank.size());
    for (int rank = 0; rank < size; ++rank) Start(scenario, rank, size);
    std::vector<std::string> addresses;
    for (int fd : fds_) addresses.push_back(ReceiveFrame(fd).value_or(""));
    for (int fd : fds_) {
      for (const std::string& address : addresses) SendFrame(fd, address);
      for (const std::string& node : node_of_rank) SendFrame(fd, node);
    }
  }

  ~RankProcesses() {
    for (size_t rank = 0; rank < pids_.size(); ++rank) {
      if (pids_[rank] != 0) kill(pids_[rank], SIGKILL);
      Reap(rank);
      close(fds_[rank]);
    }
  }

  std::string Result(int rank) { return ReceiveFrame(fds_[rank]).value_or("died"); }
  void Tell(int rank, const std::string& order) { SendFrame(fds_[rank], order); }
  // Blocks until the process has ended; its wait status.
  int Reap(int rank) {
    int status = 0;
    if (pids_[rank] != 0) waitpid(pids_[rank], &status, 0);
    ended_.push_back(pids_[rank]);
    pids_[rank] = 0;
    return status;
  }
  // Healthy ranks are told to leave and must do so with code 0.
  void EndAll() {
    for (size_t rank = 0; rank < pids_.size(); ++rank) Tell(rank, "end");
    for (size_t rank = 0; rank < pids_.size(); ++rank) {
      if (pids_[rank] == 0) continue;
      EXPECT_EQ(0, Reap(rank)) << "rank " << rank;
    }
  }

  // System V segments made by our ranks, and files UCX might leave.
  void ExpectNothingLeft() const {
    std::ifstream segments("/proc/sysvipc/shm");
    std::string line;
    while (std::getline(segments, line)) {
      std::istringstream fields(line);
      int64_t key = 0, id = 0, bytes = 0, creator = 0;
      std::string permissions;
      if (!(fields >> key >> id >> permissions >> bytes >> creator)) continue;
      EXPECT_EQ(0, std::count(ended_.begin(), ended_.end(), creator))
          << "segment " << id << " of " << bytes;
    }
    for (const auto& entry : std::filesystem::directory_iterator("/dev/shm")) {
      EXPECT_FALSE(absl::StartsWith(entry.path().filename().string(), "ucx_shm")) << entry.path();
    }
  }

 private:
  void Start(const std::string& scenario, int rank, int size) {
    int pair[2];
    ASSERT_EQ(0, socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair));
    std::vector<std::string> words = {"/proc/self/exe",   "--rank-process",
                                      scenario,           absl::StrCat(rank),
                                      absl::StrCat(size), absl::StrCat(pair[1])};
    std::vector<char*> argv;
    for (std::string& word : words) argv.push_back(word.data());
    argv.push_back(nullptr);
    const pid_t pid = fork();
    if (pid == 0) {
      fcntl(pair[1], F_SETFD, 0);
      if (rank == 0) unsetenv("UCX_HANDLE_ERRORS");  // one rank lets UCX install its handlers
      execv(argv[0], argv.data());
      _exit(127);
    }
    close(pair[1]);
    pids_.push_back(pid);
    fds_.push_back(pair[0]);
  }

  std::vector<pid_t> pids_;  // 0: reaped
  std::vector<pid_t> ended_;
  std::vector<int> fds_;
};

const std::vector<std::string> kOneNode(4, "a");
const std::vector<std::string> kTwoNodes = {"a", "b", "b", "a"};
const std::vector<std::string> kFourNodes = {"a", "b", "c", "d"};

TEST(UcxProcesses, ExchangeWithoutLargeAllocations) {
  for (const auto& nodes : {kOneNode, kTwoNodes, kFourNodes}) {
    RankProcesses ranks("exchange", nodes);
    for (int rank = 0; rank < 4; ++rank) {
      const std::string result = ranks.Result(rank);
      const std::vector<std::string> words = absl::StrSplit(result, ' ');
      ASSERT_EQ("ok", words[0]) << result;
      int64_t largest_bytes = 0;
      ASSERT_TRUE(absl::SimpleAtoi(words[1], &largest_bytes));
      EXPECT_LE(largest_bytes, 64 << 10) << "rank " << rank;
      if (rank == 0) std::printf("1 MiB all-to-all of 4 ranks: median %s s\n", words[2].c_str());
    }
    ranks.EndAll();
    ranks.ExpectNothingLeft();
  }
}

TEST(UcxProcesses, KilledRankAndTheSupervisorsAbort) {
  RankProcesses ranks("victim", kOneNode);
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
  for (int rank : {0, 2, 3}) {
    EXPECT_THAT(ranks.Result(rank),
                testing::AllOf(HasSubstr("DEADLINE_EXCEEDED"), HasSubstr("rank ")));
  }
  ranks.Reap(1);
  ranks.EndAll();
  ranks.ExpectNothingLeft();
}

TEST(UcxProcesses, KilledRankBetweenNodesIsNoticedByTcp) {
  RankProcesses ranks("victim", kFourNodes);
  for (int rank : {0, 2, 3})
    EXPECT_THAT(ranks.Result(rank), HasSubstr("lost the connection to rank"));
  ranks.Reap(1);
  ranks.EndAll();
}

TEST(UcxProcesses, WaitingRankLeavesTheProcessorAlone) {
  for (const auto& nodes :
       {std::vector<std::string>{"a", "a"}, std::vector<std::string>{"a", "b"}}) {
    RankProcesses ranks("idle", nodes);
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
  if (argc == 6 && std::string(argv[1]) == "--rank-process") {
    return upipe::comm::RunRank(
        {argv[2], std::atoi(argv[3]), std::atoi(argv[4]), std::atoi(argv[5])});
  }
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
