// This rank's end of an NCCL communicator: its life and its groups of calls. Knows nothing of
// collectives.
#pragma once

#include <functional>
#include <memory>
#include <mutex>

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
  // Blocks until all ranks have come, or `deadline`.
  static absl::StatusOr<std::unique_ptr<NcclLink>> Connect(std::shared_ptr<NcclApi> api,
                                                           const NcclConfig& config,
                                                           std::shared_ptr<NcclLedger> ledger,
                                                           SteadyTime deadline);
  // Aborts unless closed.
  ~NcclLink();

  // `calls` as one group. When it returns OK all of it is on its stream. Not after the first error.
  // Blocks while NCCL works on it, until `deadline`.
  absl::Status Group(const std::function<NcclResult(NcclApi& api, NcclComm* comm)>& calls,
                     SteadyTime deadline);

  // Any thread. What NCCL has found out meanwhile.
  absl::Status AsyncError();
  // Any thread, any number of times; NCCL is told once. The ledger's error is set before.
  void Abort();
  // Leaves in order, with all ranks; aborts at `deadline`.
  void Close(SteadyTime deadline);

 private:
  NcclLink(std::shared_ptr<NcclApi> api, std::shared_ptr<NcclLedger> ledger)
      : api_(std::move(api)), ledger_(std::move(ledger)) {}
  // Until NCCL is no longer in progress.
  absl::Status Settle(SteadyTime deadline);
  absl::Status StatusOf(NcclResult result, const char* call);

  const std::shared_ptr<NcclApi> api_;
  const std::shared_ptr<NcclLedger> ledger_;
  std::mutex calls_;   // held by whoever is inside NCCL, AsyncError apart
  std::mutex handle_;  // of comm_: it is freed under both
  NcclComm* comm_ = nullptr;
};

}  // namespace upipe::comm
