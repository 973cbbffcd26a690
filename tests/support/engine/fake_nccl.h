// NCCL played between threads of one process: every rank has a table of its own, which does what
// NCCL promises on host streams, records every call, and notes what NCCL would take ill. Stricter
// than NCCL where that may be lucky: messages meet only in the same group of calls on both sides,
// and with the same size.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "engine/comm/nccl/nccl_api.h"

namespace upipe::comm {

// What the ranks share.
class FakeNcclWorld;
std::shared_ptr<FakeNcclWorld> NewFakeNcclWorld();

struct NcclCall {
  std::string name;  // as in NcclApi
  int peer = -1;
  int64_t bytes = 0;
  int depth = 0;  // of groups that are open

  friend bool operator==(const NcclCall&, const NcclCall&) = default;
};

class FakeNccl final : public NcclApi {
 public:
  struct Options {
    int version = 22809;
    // Times AsyncError says in progress before what a group holds is on its stream.
    int looks_in_progress = 2;
  };
  FakeNccl(std::shared_ptr<FakeNcclWorld> world, const Options& options);
  explicit FakeNccl(std::shared_ptr<FakeNcclWorld> world) : FakeNccl(std::move(world), Options{}) {}
  ~FakeNccl() override;

  int Version() override { return options_.version; }
  NcclResult GetUniqueId(std::string* id) override;
  NcclResult CommInit(const NcclConfig& config, NcclComm** comm) override;
  NcclResult AsyncError(NcclComm* comm, NcclResult* error) override;
  std::string LastError(NcclComm* comm) override;
  NcclResult CommAbort(NcclComm* comm) override;
  NcclResult CommFinalize(NcclComm* comm) override;
  NcclResult CommDestroy(NcclComm* comm) override;
  NcclResult GroupStart() override;
  NcclResult GroupEnd() override;
  NcclResult Send(const void* data, int64_t bytes, int peer, NcclComm* comm,
                  kernels::Stream& stream) override;
  NcclResult Recv(void* data, int64_t bytes, int peer, NcclComm* comm,
                  kernels::Stream& stream) override;
  NcclResult AllGather(const void* send, void* receive, int64_t bytes, NcclComm* comm,
                       kernels::Stream& stream) override;

  // Any thread, all of these. From the next look on AsyncError finds it, and CommInit returns it.
  void Fail(NcclResult error) { injected_ = error; }
  // The next Send, Recv or AllGather returns it.
  void FailNextCall(NcclResult error) { next_call_ = error; }
  // Without AsyncError, whose number is a matter of time.
  std::vector<NcclCall> calls() const;
  int num_looks() const { return num_looks_; }
  int Count(const std::string& name) const;
  // What NCCL forbids and was done, communicators that are left included.
  std::vector<std::string> Violations() const;

 private:
  struct Transfer;
  class Entered;

  NcclResult Add(const char* name, Transfer transfer, NcclComm* comm, kernels::Stream& stream);
  void Record(const char* name, int peer = -1, int64_t bytes = 0);
  void Forbid(const std::string& what);
  void CheckUsable(NcclComm* comm, const char* call);

  const std::shared_ptr<FakeNcclWorld> world_;
  const Options options_;
  std::atomic<NcclResult> injected_{NcclResult::kSuccess};
  std::atomic<NcclResult> next_call_{NcclResult::kSuccess};
  std::atomic<int> num_looks_{0};
  std::atomic<int> callers_{0};
  mutable std::mutex mutex_;  // of the rest
  std::vector<NcclCall> calls_;
  std::vector<std::string> violations_;
  int depth_ = 0;
  std::vector<std::unique_ptr<NcclComm>> comms_;  // freed ones too: a use of them is found
};

}  // namespace upipe::comm
