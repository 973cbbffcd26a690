// This rank's end of an NCCL communicator, and of those split off it for parts of the ranks: their
// life, which is one, and their groups of calls. Knows nothing of collectives.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/comm/nccl/nccl_api.h"
#include "engine/comm/traffic.h"
#include "engine/comm/transport.h"

namespace upipe::comm {

// What a rank's communicator and its operations share; they may outlive it.
struct NcclLedger {
  NcclLedger(int rank, int size) : traffic(rank, size) {}
  Traffic traffic;
  FirstError error;
};

class NcclLink {
 public:
  // Blocks until all ranks have come, or `deadline`. `parts` as CommOptions has them, which all
  // ranks of the whole name alike.
  static absl::StatusOr<std::unique_ptr<NcclLink>> Connect(std::shared_ptr<NcclApi> api,
                                                           const NcclConfig& config,
                                                           const std::vector<RankGroup>& parts,
                                                           std::shared_ptr<NcclLedger> ledger,
                                                           SteadyTime deadline);
  // Aborts unless closed.
  ~NcclLink();

  // `calls` as one group, among all ranks or those of part number `part`. When it returns OK all of
  // it is on its stream. Not after the first error. Blocks while NCCL works on it, until
  // `deadline`.
  using Calls = std::function<NcclResult(NcclApi& api, NcclComm* comm)>;
  absl::Status Group(const Calls& calls, SteadyTime deadline) {
    return GroupOf(0, calls, deadline);
  }
  absl::Status GroupIn(size_t part, const Calls& calls, SteadyTime deadline) {
    return GroupOf(part + 1, calls, deadline);
  }

  // Any thread. What NCCL has found out meanwhile.
  absl::Status AsyncError();
  // Any thread, any number of times; NCCL is told once. The ledger's error is set before.
  void Abort();
  // Leaves in order, with all ranks; aborts at `deadline`.
  void Close(SteadyTime deadline);

 private:
  NcclLink(std::shared_ptr<NcclApi> api, std::shared_ptr<NcclLedger> ledger)
      : api_(std::move(api)), ledger_(std::move(ledger)) {}
  absl::Status Connect(const NcclConfig& config, const std::vector<RankGroup>& parts,
                       SteadyTime deadline);
  absl::Status GroupOf(size_t index, const Calls& calls, SteadyTime deadline);
  // Until NCCL is no longer in progress with it.
  absl::Status Settle(NcclComm* comm, SteadyTime deadline);
  absl::Status StatusOf(NcclResult result, const char* call, NcclComm* comm);

  const std::shared_ptr<NcclApi> api_;
  const std::shared_ptr<NcclLedger> ledger_;
  std::mutex calls_;              // held by whoever is inside NCCL, AsyncError apart
  std::mutex handle_;             // of comms_: they are freed under both
  std::vector<NcclComm*> comms_;  // of all ranks, then of the parts; null = not there
};

}  // namespace upipe::comm
