// Every collective, written once over point-to-point messages. An operation waits on the
// communicator's own thread for the caller's stream to reach it, runs there, and is then waited for
// by that stream.
#pragma once

#include <functional>
#include <memory>

#include "engine/comm/communicator.h"
#include "engine/comm/local_work.h"
#include "engine/comm/serial_thread.h"
#include "engine/comm/traffic.h"
#include "engine/comm/transport.h"

namespace upipe::comm {

class TransportCommunicator final : public Communicator {
 public:
  // From here on `transport` is used, closed and destroyed on `thread` only (Abort and status
  // apart). `work`: how memory of the rank is copied and added up, used on `thread` too; null: by
  // the host.
  TransportCommunicator(std::unique_ptr<SerialThread> thread, std::unique_ptr<Transport> transport,
                        const CommOptions& options, std::shared_ptr<LocalWork> work = nullptr);
  // Finishes what was issued, then closes the transport unless it is dead.
  ~TransportCommunicator() override;

  int rank() const override { return traffic_.rank(); }
  int size() const override { return traffic_.size(); }
  absl::Status AllToAllV(const AllToAllVParams& params, kernels::Stream& stream) override;
  absl::Status AllGather(const RankGroup& group, const void* send, void* receive, int64_t bytes,
                         kernels::Stream& stream) override;
  absl::Status ReduceScatter(const RankGroup& group, const float* send, float* receive,
                             int64_t count, void* scratch, kernels::Stream& stream) override;
  int64_t ReduceScatterScratchBytes(int group_size, int64_t count) const override;
  absl::Status AllReduce(double* values, int64_t count, ReduceOp op, void* scratch,
                         kernels::Stream& stream) override;
  int64_t AllReduceScratchBytes(int64_t count) const override;
  absl::Status Barrier(kernels::Stream& stream) override;
  void Abort(absl::Status cause) override;
  absl::Status status() const override;
  CommStats stats() const override;

 private:
  // What an operation does on the communicator's thread.
  struct Call {
    Transport& transport;
    LocalWork& work;
    uint32_t collective;
    SteadyTime deadline;
  };
  using Exchange = std::function<absl::Status(const Call&)>;
  // A reduce-scatter's parameters.
  struct Reduction {
    RankGroup group;
    const float* send;
    float* receive;
    int64_t count;
    float* scratch;
  };

  absl::Status Issue(CommOperation operation, const absl::Status& validity, Exchange exchange,
                     kernels::Stream& stream);
  absl::Status RunOnThread(CommOperation operation, int64_t number, const kernels::Event& start,
                           const Exchange& exchange);
  // Keeps the first error as the communicator's, tells the peers, and returns the one kept.
  absl::Status Die(const absl::Status& error);

  static absl::Status ExchangeBlocks(const Call& call, const AllToAllVParams& params);
  static absl::Status Gather(const Call& call, const RankGroup& group, const void* send,
                             void* receive, int64_t bytes);
  static absl::Status Reduce(const Call& call, const Reduction& reduction);
  static absl::Status ReducePiece(const Call& call, const Reduction& reduction, int64_t begin);

  const CommOptions options_;
  Traffic traffic_;
  int64_t num_issued_ = 0;
  const std::shared_ptr<LocalWork> work_;
  std::unique_ptr<Transport> transport_;
  std::unique_ptr<SerialThread> thread_;
};

}  // namespace upipe::comm
