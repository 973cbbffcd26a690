// A rank that waits for another leaves the processor alone: less than 5 % of a core, whatever it
// waits for, with operations queued on several streams and streams that wait for each other.
#include <ctime>
#include <future>

#include "absl/time/clock.h"
#include "tests/contract/engine/comm_groups.h"

namespace upipe::comm {
namespace {

double ProcessSeconds() {
  timespec now = {};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return now.tv_sec + now.tv_nsec * 1e-9;
}

// What the ranks wait in.
struct Payload {
  std::string name;
  int64_t bytes = 0;
  int blocks = 1;  // to each peer
};

class CommWait : public testing::TestWithParam<std::tuple<GroupKind, Payload>> {};

// Streams and memory of one rank. `front` exchanges what the test is about; `side` gathers at the
// same time; `back` waits for both before it reduces.
class WaitingRank {
 public:
  explicit WaitingRank(Communicator& comm) : comm_(comm) {}

  void HoldBack(std::shared_future<void> release) {
    front_.Submit([release](kernels::ExecContext&) {
      release.wait();
      return absl::OkStatus();
    });
  }
  void Issue(const Payload& payload) {
    const int64_t to_each = payload.bytes * payload.blocks;
    out_.assign(to_each * comm_.size(), static_cast<char>(comm_.rank()));
    in_.assign(to_each * comm_.size(), 0);
    AllToAllVParams params;
    for (int peer = 0; peer < comm_.size(); ++peer) {
      for (int block = 0; block < payload.blocks; ++block) {
        const int64_t at = peer * to_each + block * payload.bytes;
        params.sends.push_back({peer, out_.data() + at, payload.bytes});
        params.receives.push_back({peer, in_.data() + at, payload.bytes});
      }
    }
    EXPECT_TRUE(comm_.AllToAllV(params, front_).ok());
    gathered_.assign(comm_.size(), -1);
    gathered_[comm_.rank()] = comm_.rank();
    EXPECT_TRUE(comm_
                    .AllGather(comm_.everyone(), &gathered_[comm_.rank()], gathered_.data(),
                               sizeof(int64_t), side_)
                    .ok());
    back_.Wait(front_.Record());
    back_.Wait(side_.Record());
    EXPECT_TRUE(comm_.AllReduce(&sum_, 1, ReduceOp::kSum, scratch_.data(), back_).ok());
  }
  void ExpectItAllArrived() {
    for (kernels::HostStream* stream : {&front_, &side_, &back_})
      EXPECT_TRUE(stream->Synchronize().ok()) << comm_.status();
    const int64_t to_each = static_cast<int64_t>(in_.size()) / comm_.size();
    for (int peer = 0; peer < comm_.size(); ++peer) {
      EXPECT_EQ(in_[peer * to_each], static_cast<char>(peer));
      EXPECT_EQ(in_[(peer + 1) * to_each - 1], static_cast<char>(peer));
      EXPECT_EQ(gathered_[peer], peer);
    }
    EXPECT_EQ(sum_, comm_.size());
  }

 private:
  Communicator& comm_;
  std::vector<char> out_, in_;
  std::vector<int64_t> gathered_;
  double sum_ = 1;
  std::vector<double> scratch_ = std::vector<double>(comm_.size());
  kernels::HostStream front_ = NewStream(), side_ = NewStream(), back_ = NewStream();
};

TEST_P(CommWait, LeavesTheProcessorAloneWhileOneRankIsHeldBack) {
  constexpr int kRanks = 3;
  const auto& [kind, payload] = GetParam();
  std::vector<std::promise<void>> entered(kRanks);
  std::vector<CommOptions> by_rank(kRanks);
  for (int rank = 0; rank < kRanks; ++rank) {
    by_rank[rank].observer.entered = [&entered, rank](int64_t number) {
      if (number == 1) entered[rank].set_value();
    };
  }
  Ranks ranks = kind.Make(by_rank);
  ASSERT_EQ(ranks.size(), static_cast<size_t>(kRanks));
  std::promise<void> release;
  std::vector<std::unique_ptr<WaitingRank>> waiting;
  for (auto& comm : ranks) waiting.push_back(std::make_unique<WaitingRank>(*comm));
  waiting.back()->HoldBack(release.get_future().share());
  for (auto& rank : waiting) rank->Issue(payload);
  for (int rank = 0; rank < kRanks - 1; ++rank) entered[rank].get_future().wait();
  absl::SleepFor(absl::Milliseconds(20));  // what can move without the last rank has moved
  const double cpu_before = ProcessSeconds();
  const absl::Time begin = absl::Now();
  LetPass(absl::Milliseconds(500));
  const double cpu = ProcessSeconds() - cpu_before;
  const double share = cpu / absl::ToDoubleSeconds(absl::Now() - begin);
  release.set_value();
  for (auto& rank : waiting) rank->ExpectItAllArrived();
  std::printf("%.2f %% of a core for %d ranks\n", 100 * share, kRanks);
  EXPECT_LT(share / (kRanks - 1), 0.05) << "of each rank that waits";
}

INSTANTIATE_TEST_SUITE_P(All, CommWait,
                         testing::Combine(testing::ValuesIn(AllGroupKinds()),
                                          testing::Values(Payload{"OneByte", 1, 1},
                                                          Payload{"ManySmall", 8000, 300},
                                                          Payload{"OneLarge", 4 << 20, 1},
                                                          Payload{"ManyLarge", 100000, 40})),
                         [](const auto& info) {
                           return absl::StrCat(std::get<0>(info.param).name, "_",
                                               std::get<1>(info.param).name);
                         });

}  // namespace
}  // namespace upipe::comm
