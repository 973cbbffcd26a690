// The communicator of a dry run: validates and counts as the real ones do, moves nothing, touches
// no memory and completes at once. Never fails because of a peer, for there is none.
#pragma once

#include <cstdint>

#include "engine/comm/communicator.h"
#include "engine/comm/dry/dry_traffic.h"
#include "engine/comm/traffic.h"

namespace upipe::comm {

class DryCommunicator final : public Communicator {
 public:
  struct Options {
    // What is enqueued on another stream is counted as beside it; null: nothing is.
    const kernels::Stream* compute = nullptr;
    int ranks_per_node = 0;  // consecutive ranks; 0: all share one node
    ReduceRoom reduce_room = {};
  };
  DryCommunicator(int rank, int size, const Options& options);
  DryCommunicator(int rank, int size) : DryCommunicator(rank, size, Options{}) {}

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

  // From here on traffic is counted there too, which must live as long; null: nowhere.
  void CountInto(DryTraffic* traffic) { counted_ = traffic; }

 private:
  absl::Status Finish(const absl::Status& validity, TrafficKind kind, kernels::Stream& stream);
  void Count(TrafficKind kind, const kernels::Stream& stream);

  const Options options_;
  Traffic traffic_;
  CommStats before_;  // what was sent before the collective that is being issued
  DryTraffic* counted_ = nullptr;
  FirstError error_;
};

}  // namespace upipe::comm
