#include "engine/comm/dry/dry_communicator.h"

#include "common/check.h"

namespace upipe::comm {

DryCommunicator::DryCommunicator(int rank, int size) : Communicator(size), traffic_(rank, size) {}

absl::Status DryCommunicator::Finish(const absl::Status& validity, kernels::Stream& stream) {
  if (!validity.ok()) error_.Set(validity);
  absl::Status result = status();
  if (!result.ok()) stream.Wait(EventWithStatus(result));
  return result;
}

absl::Status DryCommunicator::AllToAllV(const AllToAllVParams& params, kernels::Stream& stream) {
  return Finish(traffic_.AddAllToAllV(params), stream);
}

absl::Status DryCommunicator::AllGather(const RankGroup& group, const void* send, void* receive,
                                        int64_t bytes, kernels::Stream& stream) {
  return Finish(traffic_.AddAllGather(group, send, receive, bytes), stream);
}

absl::Status DryCommunicator::ReduceScatter(const RankGroup& group, const float* send,
                                            float* receive, int64_t count, void* scratch,
                                            kernels::Stream& stream) {
  return Finish(traffic_.AddReduceScatter(group, send, receive, count, scratch), stream);
}

int64_t DryCommunicator::ReduceScatterScratchBytes(int group_size, int64_t count) const {
  return ReduceScatterScratchBytesFor(group_size, count);
}

absl::Status DryCommunicator::AllReduce(double* values, int64_t count, ReduceOp, void* scratch,
                                        kernels::Stream& stream) {
  return Finish(traffic_.AddAllReduce(values, count, scratch), stream);
}

int64_t DryCommunicator::AllReduceScratchBytes(int64_t count) const {
  return AllReduceScratchBytesFor(size(), count);
}

absl::Status DryCommunicator::Barrier(kernels::Stream& stream) {
  return Finish(traffic_.AddBarrier(), stream);
}

void DryCommunicator::Abort(absl::Status cause) {
  UPIPE_CHECK(!cause.ok()) << "an abort needs a cause";
  error_.Set(cause);
}

absl::Status DryCommunicator::status() const { return error_.Get(); }

CommStats DryCommunicator::stats() const { return traffic_.stats(); }

}  // namespace upipe::comm
