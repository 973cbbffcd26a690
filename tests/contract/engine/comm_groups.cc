#include "tests/contract/engine/comm_groups.h"

#include "absl/time/clock.h"
#include "engine/comm/inproc/inproc_communicator.h"
#include "engine/comm/transport.h"
#ifdef UPIPE_TEST_UCX
#include "engine/comm/ucx/ucx_communicator.h"
#endif

namespace upipe::comm {
namespace {

class SingleThread final : public kernels::ParallelFor {
 public:
  int num_threads() const override { return 1; }
  void Run(int64_t count, const std::function<void(int64_t, int64_t, int)>& body) override {
    if (count > 0) body(0, count, 0);
  }
};

unsigned char Expected(int from, int to, int block, int64_t offset) {
  uint64_t x = static_cast<uint64_t>(offset) * 0x9E3779B97F4A7C15u + from * 1000003u + to * 10007u +
               block * 101u;
  x ^= x >> 29;
  return static_cast<unsigned char>(x * 0xBF58476D1CE4E5B9u >> 56);
}

}  // namespace

void LetPass(absl::Duration duration) {
  const absl::Time end = absl::Now() + duration;
  while (absl::Now() < end) absl::SleepFor(absl::Milliseconds(20));
}

std::vector<unsigned char> Message(int from, int to, int block, int64_t bytes) {
  std::vector<unsigned char> data(bytes);
  for (int64_t i = 0; i < bytes; ++i) data[i] = Expected(from, to, block, i);
  return data;
}

float Contribution(int rank, int64_t index) {
  const int64_t h = (index * 2654435761u + rank * 40503u) % 20011 - 10005;
  return static_cast<float>(h) * (rank % 2 == 0 ? 1e-3f : 33.77f) +
         1.0f / static_cast<float>(rank + 3);
}

kernels::HostStream NewStream() {
  return kernels::HostStream("test", std::make_shared<SingleThread>(), std::nullopt, {});
}

std::vector<GroupKind> AllGroupKinds() {
  std::vector<GroupKind> kinds;
  kinds.push_back({"inproc", [](const std::vector<CommOptions>& by_rank) {
                     return InprocGroup::Create(by_rank);
                   }});
#ifdef UPIPE_TEST_UCX
  kinds.push_back(
      {"ucx", [](const std::vector<CommOptions>& by_rank) { return MakeUcxRanks(by_rank); }});
  // One rank a node, and two nodes of several.
  const std::pair<std::string, size_t> spread[] = {{"ucx_tcp", kMaxRanks}, {"ucx_two_nodes", 2}};
  for (const auto& [name, num_nodes] : spread) {
    kinds.push_back({name, [num_nodes](const std::vector<CommOptions>& by_rank) {
                       std::vector<std::string> nodes;
                       for (size_t i = 0; i < by_rank.size(); ++i)
                         nodes.push_back(absl::StrCat("node", i % num_nodes));
                       return MakeUcxRanks(by_rank, nodes);
                     }});
  }
#endif
  return kinds;
}

void Ranks::Destroy() {
  std::vector<std::thread> threads;
  for (auto& comm : *this) threads.emplace_back([&comm] { comm.reset(); });
  for (std::thread& thread : threads) thread.join();
}

void OnEveryRank(Ranks& ranks, const std::function<void(Communicator&, kernels::Stream&)>& body) {
  std::vector<std::thread> threads;
  for (auto& comm : ranks) {
    threads.emplace_back([&body, &comm] {
      kernels::HostStream stream = NewStream();
      body(*comm, stream);
      stream.Synchronize().IgnoreError();
    });
  }
  for (std::thread& thread : threads) thread.join();
}

#ifdef UPIPE_TEST_UCX
Ranks MakeUcxRanks(const std::vector<CommOptions>& by_rank, std::vector<std::string> node_of_rank) {
  const int size = static_cast<int>(by_rank.size());
  if (node_of_rank.empty()) node_of_rank.assign(size, "node");
  UcxOptions options;
  options.tcp_devices = "lo";
  options.close_deadline = absl::Milliseconds(500);
  std::vector<std::unique_ptr<UcxContext>> contexts;
  UcxGroup group{.node_ids = node_of_rank, .identity = {"job", 1, 0x1234, "nonce"}};
  for (int rank = 0; rank < size; ++rank) {
    auto context = UcxContext::Create(options);
    EXPECT_TRUE(context.ok()) << context.status();
    if (!context.ok()) return {};
    group.addresses.push_back((*context)->address());
    contexts.push_back(*std::move(context));
  }
  Ranks ranks(static_cast<size_t>(size));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank, own = group]() mutable {
      own.rank = rank;
      auto comm = contexts[rank]->Connect(own, by_rank[rank]);
      EXPECT_TRUE(comm.ok()) << comm.status();
      if (comm.ok()) ranks[rank] = *std::move(comm);
    });
  }
  for (std::thread& thread : threads) thread.join();
  return ranks;
}
#endif

}  // namespace upipe::comm
