// What the communicator's contract tests share: streams, the groups under test, and one thread per
// rank.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "engine/comm/communicator.h"
#include "engine/comm/nccl/nccl_context.h"
#include "gtest/gtest.h"
#include "kernels/host/host_stream.h"
#include "tests/support/engine/fake_nccl.h"
#include "tests/support/engine/host_comm_device.h"

namespace upipe::comm {

// A stream whose tasks run on its own thread only.
kernels::HostStream NewStream();

// The ranks of one group; destroyed all at once, each on a thread, as processes would end.
class Ranks : public std::vector<std::unique_ptr<Communicator>> {
 public:
  using vector::vector;
  Ranks(std::vector<std::unique_ptr<Communicator>> ranks) : vector(std::move(ranks)) {}
  Ranks(Ranks&&) = default;
  ~Ranks() { Destroy(); }
  void Destroy();

  std::function<void()> at_end;  // called once they are gone
};

// An implementation under test. `Make` builds a group whose ranks are threads of this process.
struct GroupKind {
  std::string name;
  std::function<Ranks(const std::vector<CommOptions>&)> Make;
  bool names_peers = true;  // when one of them does not come
  bool sends_wait = false;  // until they are received, however small
};

std::vector<GroupKind> AllGroupKinds();

// Runs body(comm, stream) on one thread per rank, each with a stream of its own, and joins them.
void OnEveryRank(Ranks& ranks, const std::function<void(Communicator&, kernels::Stream&)>& body);

// Lets time go by, where its length is what a test is about.
void LetPass(absl::Duration duration);

// Bytes that tell sender, receiver, block and place apart.
std::vector<unsigned char> Message(int from, int to, int block, int64_t bytes);

// Values whose sum depends on the order in which they are added.
float Contribution(int rank, int64_t index);

// A connected group over NCCL's fake, every rank with a device and a table of its own.
struct NcclRank {
  std::shared_ptr<FakeNccl> nccl;
  std::shared_ptr<HostCommDevice> device;
  std::unique_ptr<NcclContext> context;
};
// With `runtime` the communicators' streams are CUDA streams.
std::vector<NcclRank> MakeNcclContexts(int size, const NcclOptions& options = {},
                                       std::shared_ptr<kernels::CudaRuntime> runtime = nullptr);
Ranks ConnectNccl(std::vector<NcclRank>& contexts, const std::vector<CommOptions>& by_rank);

#ifdef UPIPE_TEST_UCX
// A connected group over UCX, every rank with a context of its own. `node_of_rank` empty: one node.
Ranks MakeUcxRanks(const std::vector<CommOptions>& by_rank,
                   std::vector<std::string> node_of_rank = {});
#endif

}  // namespace upipe::comm
