// Collectives over NCCL. They run on one stream of the communicator's own, in the order of issue;
// NCCL only moves bytes, and sums are made here, in ascending rank order. Parts of the ranks that
// gather weights are split off, sharing the memory of the whole; any others talk by grouped sends
// and receives within the one communicator of all. One order, one abort.
#pragma once

#include <functional>
#include <memory>
#include <optional>

#include "engine/comm/comm_device.h"
#include "engine/comm/communicator.h"
#include "engine/comm/nccl/nccl_link.h"
#include "engine/comm/nccl/nccl_watch.h"

namespace upipe::comm {

// How the contributions to a sum come in: those of `peers` ranks at a time, `piece` elements of
// each, into the scratch there is for it. The same on every rank of a group.
struct NcclReducePieces {
  int peers = 1;
  int64_t piece = 0;
};
NcclReducePieces PiecesOf(const ReduceRoom& room, int group_size, int64_t count);

class NcclCommunicator final : public Communicator {
 public:
  struct Parts {
    std::shared_ptr<CommDevice> device;
    std::unique_ptr<NcclLink> link;
    std::shared_ptr<NcclLedger> ledger;
    CommOptions options;
    absl::Duration connect_deadline;
    absl::Duration close_deadline;
  };
  // Blocks until every pair of ranks has exchanged a few bytes: NCCL takes its memory now.
  static absl::StatusOr<std::unique_ptr<NcclCommunicator>> Create(Parts parts);
  // Finishes what was issued, then leaves with all ranks, unless dead.
  ~NcclCommunicator() override;

  int rank() const override { return ledger_->traffic.rank(); }
  int size() const override { return ledger_->traffic.size(); }
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
  absl::Status status() const override { return ledger_->error.Get(); }
  CommStats stats() const override { return ledger_->traffic.stats(); }

 private:
  struct Reduction {
    const RankGroup& group;
    const float* send;
    float* receive;
    int64_t count;
    float* scratch;
  };

  explicit NcclCommunicator(Parts parts);
  absl::Status WarmUp(absl::Duration deadline);
  // What `enqueue` gives to stream_, as one operation that waits for `start`; the warm-up
  // has no kind.
  std::shared_ptr<NcclOperation> Run(std::optional<CommOperation> kind, int64_t number,
                                     const kernels::Event& start,
                                     const std::function<absl::Status()>& enqueue);
  // Puts what `enqueue` gives to stream_ between the point of `stream` and its later work.
  absl::Status Issue(CommOperation operation, const absl::Status& validity,
                     const std::function<absl::Status()>& enqueue, kernels::Stream& stream);
  // One group of NCCL's calls, on stream_.
  absl::Status Group(const NcclLink::Calls& calls);
  absl::Status Exchange(const AllToAllVParams& params);
  absl::Status Gather(const RankGroup& group, const void* send, void* receive, int64_t bytes);
  absl::Status Reduce(const Reduction& reduction);
  absl::Status ReducePiece(const Reduction& reduction, const NcclReducePieces& pieces,
                           int64_t begin);
  void CopyHere(void* to, const void* from, int64_t bytes);

  const CommOptions options_;
  const absl::Duration close_deadline_;
  const std::shared_ptr<CommDevice> device_;
  const std::shared_ptr<NcclLedger> ledger_;
  std::shared_ptr<void> memory_;  // of the warm-up and of barriers: [size + 1] blocks
  std::unique_ptr<NcclLink> link_;
  std::unique_ptr<kernels::Stream> stream_;
  int64_t num_issued_ = 0;
  std::unique_ptr<NcclWatch> watch_;
};

}  // namespace upipe::comm
