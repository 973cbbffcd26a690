#include "engine/comm/dry/dry_communicator.h"

#include <utility>

#include "common/check.h"

namespace upipe::comm {

DryCommunicator::DryCommunicator(int rank, int size, const Options& options)
    : Communicator(size), options_(options), traffic_(rank, size), before_(traffic_.stats()) {}

absl::Status DryCommunicator::Finish(const absl::Status& validity, TrafficKind kind,
                                     kernels::Stream& stream) {
  if (!validity.ok()) error_.Set(validity);
  absl::Status result = status();
  if (!result.ok()) stream.Wait(EventWithStatus(result));
  Count(kind, stream);
  return result;
}

void DryCommunicator::Count(TrafficKind kind, const kernels::Stream& stream) {
  CommStats now = traffic_.stats();
  const int node_ranks = options_.ranks_per_node > 0 ? options_.ranks_per_node : size();
  TrafficCount count{.collectives = now.num_collectives() - before_.num_collectives()};
  for (int peer = 0; peer < size(); ++peer) {
    const int64_t bytes = now.bytes_sent_to_peer[peer] - before_.bytes_sent_to_peer[peer];
    const bool same_node = peer / node_ranks == rank() / node_ranks;
    (same_node ? count.bytes_in_node : count.bytes_between_nodes) += bytes;
  }
  before_ = std::move(now);
  if (counted_ == nullptr) return;
  counted_
      ->at({.kind = kind,
            .beside_compute = options_.compute != nullptr && &stream != options_.compute,
            .leaves_node = count.bytes_between_nodes > 0})
      .AddTimes(count, 1);
}

absl::Status DryCommunicator::AllToAllV(const AllToAllVParams& params, kernels::Stream& stream) {
  return Finish(traffic_.AddAllToAllV(params), TrafficKind::kExchange, stream);
}

absl::Status DryCommunicator::AllGather(const RankGroup& group, const void* send, void* receive,
                                        int64_t bytes, kernels::Stream& stream) {
  return Finish(traffic_.AddAllGather(group, send, receive, bytes), TrafficKind::kGather, stream);
}

absl::Status DryCommunicator::ReduceScatter(const RankGroup& group, const float* send,
                                            float* receive, int64_t count, void* scratch,
                                            kernels::Stream& stream) {
  return Finish(traffic_.AddReduceScatter(group, send, receive, count, scratch),
                TrafficKind::kReduce, stream);
}

int64_t DryCommunicator::ReduceScatterScratchBytes(int group_size, int64_t count) const {
  return ReduceScatterScratchBytesFor(options_.reduce_room, group_size, count);
}

absl::Status DryCommunicator::AllReduce(double* values, int64_t count, ReduceOp, void* scratch,
                                        kernels::Stream& stream) {
  return Finish(traffic_.AddAllReduce(values, count, scratch), TrafficKind::kAgree, stream);
}

int64_t DryCommunicator::AllReduceScratchBytes(int64_t count) const {
  return AllReduceScratchBytesFor(size(), count);
}

absl::Status DryCommunicator::Barrier(kernels::Stream& stream) {
  return Finish(traffic_.AddBarrier(), TrafficKind::kAgree, stream);
}

void DryCommunicator::Abort(absl::Status cause) {
  UPIPE_CHECK(!cause.ok()) << "an abort needs a cause";
  error_.Set(cause);
}

absl::Status DryCommunicator::status() const { return error_.Get(); }

CommStats DryCommunicator::stats() const { return traffic_.stats(); }

}  // namespace upipe::comm
