// Ranks on two hosts of a network that is cut without a word: the connection is found dead within
// its bound, short cuts and slow ranks are not taken for it, and nobody hangs at an end.
#include <signal.h>

#include <atomic>
#include <thread>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "tests/contract/engine/comm_groups.h"
#include "tests/contract/engine/rank_processes.h"
#include "tests/support/network/network_lab.h"

namespace upipe::comm {
namespace {

using ::testing::HasSubstr;
using testing::NetworkLab;

constexpr absl::Duration kPeerSilence = absl::Seconds(2);
constexpr absl::Duration kConnectDeadline = absl::Seconds(3);
constexpr absl::Duration kCloseDeadline = absl::Seconds(1);
constexpr int64_t kExchangeBytes = 100000;  // between each pair

// ---- The rank process: exchanges until something ends it. Orders: "count" is answered with the
// exchanges so far; "end" lets all finish after the same exchange, "leave" ends the communicator.

class Exchanges {
 public:
  Exchanges(const RankCase& self, Communicator& comm) : self_(self), comm_(comm) {}

  void Run() {
    std::thread orders([this] { ObeyOrders(); });
    kernels::HostStream stream = NewStream();
    std::vector<char> out(kExchangeBytes * comm_.size()), in(kExchangeBytes * comm_.size());
    absl::Status status;
    while (status.ok() && !AllWantToEnd(stream)) {
      status = ExchangeOnce(comm_, stream, kExchangeBytes, &out, &in);
      ++count_;
    }
    status.Update(comm_.status());
    SendFrame(self_.fd, absl::StrCat("done after ", status.ToString()));
    orders.join();
  }

 private:
  bool AllWantToEnd(kernels::Stream& stream) {
    double wish = ending_ ? 1 : 0;
    std::vector<double> scratch(comm_.size());
    comm_.AllReduce(&wish, 1, ReduceOp::kSum, scratch.data(), stream).IgnoreError();
    return stream.Synchronize().ok() && wish == comm_.size();
  }
  void ObeyOrders() {
    for (;;) {
      const std::optional<std::string> order = ReceiveFrame(self_.fd);
      if (!order.has_value() || *order == "end") break;
      SendFrame(self_.fd, absl::StrCat("count ", count_.load()));
    }
    ending_ = true;
  }

  const RankCase& self_;
  Communicator& comm_;
  std::atomic<int64_t> count_{0};
  std::atomic<bool> ending_{false};
};

int RunRank(const RankCase& self) {
  auto context = UcxContext::Create({.tcp_devices = self.scenario,
                                     .peer_silence = kPeerSilence,
                                     .connect_deadline = kConnectDeadline,
                                     .close_deadline = kCloseDeadline});
  if (!context.ok()) return SendFrame(self.fd, context.status().ToString()), 1;
  auto comm = MeetPeers(**context, self, {.deadline = kPeerSilence * 5, .observer = {}});
  if (!comm.ok())
    return SendFrame(self.fd, absl::StrCat("done after ", comm.status().ToString())), 1;
  Exchanges(self, **comm).Run();
  ReceiveFrame(self.fd);  // "leave"
  const absl::Time begin = absl::Now();
  comm->reset();
  SendFrame(self.fd, absl::StrCat("closed ", absl::ToDoubleSeconds(absl::Now() - begin)));
  return 0;
}

// ---- The tests. Ranks 0 and 1 on host 0, ranks 2 and 3 on host 1.

class CommNetwork : public ::testing::Test {
 protected:
  void SetUp() override {
    auto lab = NetworkLab::Create(2, /*num_networks=*/2);
    if (!lab.ok()) GTEST_SKIP() << lab.status().message();
    lab_ = *std::move(lab);
  }

  void Start(const std::string& devices) {
    ranks_.emplace(devices, std::vector<std::string>{"a", "a", "b", "b"},
                   [this](int rank) { return lab_->On(HostOf(rank)); });
  }
  static int HostOf(int rank) { return rank / 2; }

  // What a rank says next that begins with `word`, without it.
  std::string Hear(int rank, const std::string& word) {
    for (;;) {
      const std::string said = ranks_->Result(rank);
      absl::string_view rest = said;
      if (absl::ConsumePrefix(&rest, word + " ")) return std::string(rest);
      if (!absl::StartsWith(said, "count") && !absl::StartsWith(said, "done after OK"))
        return absl::StrCat("instead: ", said);
    }
  }
  int64_t Count(int rank) {
    ranks_->Tell(rank, "count");
    int64_t count = -1;
    const std::string said = Hear(rank, "count");
    EXPECT_TRUE(absl::SimpleAtoi(said, &count)) << "rank " << rank << " " << said;
    return count;
  }
  // Every rank is `more` exchanges further; false when one failed.
  bool AwaitExchanges(int64_t more) {
    for (int rank = 0; rank < 4; ++rank) {
      const int64_t begin = Count(rank);
      for (int64_t now = begin; now < begin + more; now = Count(rank)) {
        if (now < 0) return false;
        absl::SleepFor(absl::Milliseconds(5));
      }
    }
    return true;
  }
  void Order(const std::string& order) {
    for (int rank = 0; rank < 4; ++rank) ranks_->Tell(rank, order);
  }
  // They end, or have ended, their exchanges and leave: in time, well and without a word.
  void Finish() {
    Order("end");
    Order("leave");
    ExpectQuietEnd(kCloseDeadline);
  }
  void ExpectQuietEnd(absl::Duration close_limit) {
    for (int rank = 0; rank < 4; ++rank) {
      double seconds = 0;
      const std::string said = Hear(rank, "closed");
      EXPECT_TRUE(absl::SimpleAtod(said, &seconds)) << "rank " << rank << " " << said;
      EXPECT_LT(absl::Seconds(seconds), close_limit) << "rank " << rank;
      EXPECT_EQ(0, ranks_->Reap(rank)) << "rank " << rank;
      EXPECT_EQ("", ranks_->Output(rank)) << "rank " << rank;
    }
    ranks_->ExpectNothingLeft();
  }

  // Bytes that have left the hosts, by host and network.
  std::array<std::array<int64_t, 2>, 2> Sent() const {
    return {{{lab_->BytesSent(0, 0), lab_->BytesSent(0, 1)},
             {lab_->BytesSent(1, 0), lab_->BytesSent(1, 1)}}};
  }

  std::unique_ptr<NetworkLab> lab_;
  std::optional<RankProcesses> ranks_;
};

// Two namespaces of one kernel could use shared memory: only counters tell.
TEST_F(CommNetwork, PayloadCrossesTheInterfacesThatAreNamed) {
  for (const std::string devices : {"net0", "net1", "all"}) {
    Start(devices);
    ranks_->Introduce();
    ASSERT_TRUE(AwaitExchanges(1));
    const auto before = Sent();
    const int64_t first = Count(0);
    ASSERT_TRUE(AwaitExchanges(50));
    // Each of a host's two ranks sends to the other host's two.
    const int64_t payload = (Count(0) - first - 2) * 4 * kExchangeBytes;
    EXPECT_GT(payload, 40 * 4 * kExchangeBytes);
    const auto after = Sent();
    for (const int host : {0, 1}) {
      int64_t sent = 0;
      for (const int network : {0, 1}) {
        const int64_t here = after[host][network] - before[host][network];
        sent += here;
        const bool unwanted = devices == absl::StrCat("net", 1 - network);
        EXPECT_LT(here, unwanted ? 10000 : 1 << 30) << devices << ", host " << host;
      }
      EXPECT_GE(sent, payload) << devices << ", host " << host;
    }
    Finish();
  }
}

TEST_F(CommNetwork, SilentCutIsFoundOnBothSides) {
  Start("net0");
  ranks_->Introduce();
  ASSERT_TRUE(AwaitExchanges(10));
  const absl::Time cut = absl::Now();
  ASSERT_TRUE(lab_->Cut(1).ok());
  for (int rank = 0; rank < 4; ++rank) {
    const std::string error = Hear(rank, "done");
    EXPECT_THAT(error, ::testing::AllOf(HasSubstr("UNAVAILABLE"), HasSubstr("has not answered for"),
                                        HasSubstr(HostOf(rank) == 0 ? "on node b" : "on node a")))
        << "rank " << rank;
    EXPECT_THAT(
        error, ::testing::ContainsRegex(HostOf(rank) == 0 ? "to rank [23] on" : "to rank [01] on"));
  }
  const absl::Duration took = absl::Now() - cut;
  EXPECT_GE(took, kPeerSilence * 0.9);
  EXPECT_LT(took, kPeerSilence * 1.5);
  std::printf("a silent cut was found after %s of %s\n", absl::FormatDuration(took).c_str(),
              absl::FormatDuration(kPeerSilence).c_str());
  Finish();
}

TEST_F(CommNetwork, ShortCutIsSurvived) {
  Start("net0");
  ranks_->Introduce();
  ASSERT_TRUE(AwaitExchanges(10));
  ASSERT_TRUE(lab_->Cut(0).ok());
  LetPass(kPeerSilence * 0.45);
  ASSERT_TRUE(lab_->Join(0).ok());
  EXPECT_TRUE(AwaitExchanges(50));
  Finish();
}

TEST_F(CommNetwork, StoppedProcessIsNotALostHost) {
  Start("net0");
  ranks_->Introduce();
  ASSERT_TRUE(AwaitExchanges(10));
  ranks_->Signal(2, SIGSTOP);
  LetPass(kPeerSilence * 1.6);
  ranks_->Signal(2, SIGCONT);
  EXPECT_TRUE(AwaitExchanges(50));
  Finish();
}

TEST_F(CommNetwork, CutBeforeTheyMeetEndsAtTheConnectDeadline) {
  Start("net0");
  ASSERT_TRUE(lab_->Cut(1).ok());
  const absl::Time begin = absl::Now();
  ranks_->Introduce();
  for (int rank = 0; rank < 4; ++rank) {
    EXPECT_THAT(Hear(rank, "done"),
                ::testing::AllOf(HasSubstr(absl::StrCat("connecting rank ", rank, " of 4")),
                                 HasSubstr(HostOf(rank) == 0 ? "on node b" : "on node a")));
  }
  EXPECT_LT(absl::Now() - begin, kConnectDeadline * 1.5);
  for (int rank = 0; rank < 4; ++rank) {
    ranks_->Reap(rank);
    EXPECT_EQ("", ranks_->Output(rank)) << "rank " << rank;
  }
  EXPECT_LT(absl::Now() - begin, kConnectDeadline * 1.5 + kCloseDeadline);
  ranks_->ExpectNothingLeft();
}

TEST_F(CommNetwork, CutAtTheFarewellCostsTheCloseDeadline) {
  Start("net0");
  ranks_->Introduce();
  ASSERT_TRUE(AwaitExchanges(10));
  Order("end");
  for (int rank = 0; rank < 4; ++rank) EXPECT_EQ("after OK", Hear(rank, "done"));
  ASSERT_TRUE(lab_->Cut(1).ok());
  Order("leave");
  ExpectQuietEnd(/*close_limit=*/kCloseDeadline * 2);
}

TEST_F(CommNetwork, UnknownInterfaceIsNamed) {
  Start("net7");
  for (int rank = 0; rank < 4; ++rank) {
    EXPECT_THAT(ranks_->Address(rank), HasSubstr("no network interface \"net7\" here for tcp "
                                                 "between nodes; there are: lo, net0, net1"));
    EXPECT_NE(0, ranks_->Reap(rank));
    EXPECT_EQ("", ranks_->Output(rank));
  }
}

}  // namespace
}  // namespace upipe::comm

int main(int argc, char** argv) {
  return upipe::comm::RankProcessMain(argc, argv, &upipe::comm::RunRank);
}
