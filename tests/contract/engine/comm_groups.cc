#include "tests/contract/engine/comm_groups.h"

#include "absl/time/clock.h"
#include "engine/comm/inproc/inproc_communicator.h"
#include "engine/comm/transport.h"
#include "tests/support/cuda_runtime/fake_runtime.h"
#ifdef UPIPE_TEST_UCX
#include "engine/comm/ucx/ucx_communicator.h"
#endif

namespace upipe::comm {
namespace {

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

kernels::HostStream NewStream() { return NewHostStream("test"); }

std::vector<GroupKind> AllGroupKinds() {
  std::vector<GroupKind> kinds;
  kinds.push_back(
      {.name = "inproc",
       .Make = [](const std::vector<CommOptions>& by_rank) { return InprocGroup::Create(by_rank); },
       .sends_wait = true});
  kinds.push_back({.name = "inproc_on_device",
                   .Make =
                       [](const std::vector<CommOptions>& by_rank) {
                         auto device = std::make_shared<HostCommDevice>("GPU-0");
                         return InprocGroup::Create(by_rank, device);
                       },
                   .sends_wait = true});
  for (const bool cuda_streams : {false, true}) {
    const auto make = [cuda_streams](const std::vector<CommOptions>& by_rank) {
      std::shared_ptr<kernels::CudaRuntime> runtime;
      if (cuda_streams) runtime = std::make_shared<kernels::testing::FakeCudaRuntime>();
      auto contexts = MakeNcclContexts(static_cast<int>(by_rank.size()), {}, runtime);
      return ConnectNccl(contexts, by_rank);
    };
    kinds.push_back({.name = cuda_streams ? "nccl_on_cuda_streams" : "nccl",
                     .Make = make,
                     .names_peers = false,
                     .sends_wait = true});
  }
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
  clear();
  if (at_end) std::exchange(at_end, nullptr)();
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

std::vector<NcclRank> MakeNcclContexts(int size, const NcclOptions& options,
                                       std::shared_ptr<kernels::CudaRuntime> runtime) {
  const auto world = NewFakeNcclWorld();
  std::vector<NcclRank> ranks;
  for (int rank = 0; rank < size; ++rank) {
    auto nccl = std::make_shared<FakeNccl>(world);
    auto device = std::make_shared<HostCommDevice>(absl::StrCat("GPU-", rank), runtime);
    auto context = NcclContext::Create(nccl, device, rank, options);
    EXPECT_TRUE(context.ok()) << context.status();
    if (!context.ok()) return {};
    ranks.push_back({std::move(nccl), std::move(device), *std::move(context)});
  }
  return ranks;
}

Ranks ConnectNccl(std::vector<NcclRank>& contexts, const std::vector<CommOptions>& by_rank) {
  PeerGroup group;
  std::vector<std::shared_ptr<FakeNccl>> tables;
  for (const NcclRank& rank : contexts) {
    group.addresses.push_back(rank.context->address());
    group.node_ids.push_back("node");
    tables.push_back(rank.nccl);
  }
  Ranks ranks(contexts.size());
  std::vector<std::thread> threads;
  for (size_t rank = 0; rank < contexts.size(); ++rank) {
    threads.emplace_back([&, rank, own = group]() mutable {
      own.rank = static_cast<int>(rank);
      auto comm = contexts[rank].context->Connect(own, by_rank[rank]);
      EXPECT_TRUE(comm.ok()) << comm.status();
      if (comm.ok()) ranks[rank] = *std::move(comm);
    });
  }
  for (std::thread& thread : threads) thread.join();
  ranks.at_end = [tables] {
    for (const auto& table : tables) EXPECT_EQ(std::vector<std::string>(), table->Violations());
  };
  return ranks;
}

#ifdef UPIPE_TEST_UCX
Ranks MakeUcxRanks(const std::vector<CommOptions>& by_rank, std::vector<std::string> node_of_rank) {
  const int size = static_cast<int>(by_rank.size());
  if (node_of_rank.empty()) node_of_rank.assign(size, "node");
  UcxOptions options;
  options.tcp_devices = "lo";
  options.close_deadline = absl::Milliseconds(500);
  std::vector<std::unique_ptr<UcxContext>> contexts;
  PeerGroup group{.node_ids = node_of_rank, .identity = {"job", 1, 0x1234, "nonce"}};
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
