#include "tests/support/engine/recording_communicator.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace upipe::testing {
namespace {

std::vector<int64_t> BytesByPeer(const std::vector<comm::Block>& blocks, int size, int own) {
  std::vector<int64_t> bytes(size, 0);
  for (const comm::Block& block : blocks) {
    if (block.peer != own) bytes[block.peer] += block.bytes;
  }
  return bytes;
}

template <typename T>
void OnStream(const std::function<void(const T*, int64_t)>& hook, const T* values, int64_t count,
              kernels::Stream& stream) {
  if (!hook) return;
  stream.Submit([&hook, values, count](kernels::ExecContext&) {
    hook(values, count);
    return absl::OkStatus();
  });
}

}  // namespace

std::string ToString(const RecordedCollective& collective) {
  constexpr const char* kNames[] = {"all-to-all", "all-gather", "reduce-scatter", "all-reduce",
                                    "barrier"};
  return absl::StrCat(kNames[static_cast<int>(collective.kind)], " sent [",
                      absl::StrJoin(collective.sent, " "), "] received [",
                      absl::StrJoin(collective.received, " "), "]");
}

std::vector<int64_t> RecordingCommunicator::ToEach(const comm::RankGroup& group,
                                                   int64_t bytes) const {
  std::vector<int64_t> by_peer(size(), 0);
  for (int peer : group) by_peer[peer] = peer == rank() ? 0 : bytes;
  return by_peer;
}

absl::Status RecordingCommunicator::AllToAllV(const comm::AllToAllVParams& params,
                                              kernels::Stream& stream) {
  recorded_.push_back({CollectiveKind::kAllToAllV, BytesByPeer(params.sends, size(), rank()),
                       BytesByPeer(params.receives, size(), rank())});
  return wrapped_.AllToAllV(params, stream);
}

absl::Status RecordingCommunicator::AllGather(const comm::RankGroup& group, const void* send,
                                              void* receive, int64_t bytes,
                                              kernels::Stream& stream) {
  recorded_.push_back({CollectiveKind::kAllGather, ToEach(group, bytes), ToEach(group, bytes)});
  return wrapped_.AllGather(group, send, receive, bytes, stream);
}

absl::Status RecordingCommunicator::ReduceScatter(const comm::RankGroup& group, const float* send,
                                                  float* receive, int64_t count, void* scratch,
                                                  kernels::Stream& stream) {
  recorded_.push_back({CollectiveKind::kReduceScatter,
                       ToEach(group, count * static_cast<int64_t>(sizeof(float))),
                       {}});
  OnStream(before_reduce_scatter, send, count * static_cast<int64_t>(group.size()), stream);
  return wrapped_.ReduceScatter(group, send, receive, count, scratch, stream);
}

absl::Status RecordingCommunicator::AllReduce(double* values, int64_t count, comm::ReduceOp op,
                                              void* scratch, kernels::Stream& stream) {
  recorded_.push_back({CollectiveKind::kAllReduce,
                       ToEach(everyone(), count * static_cast<int64_t>(sizeof(double))),
                       {}});
  OnStream<double>(before_all_reduce, values, count, stream);
  absl::Status status = wrapped_.AllReduce(values, count, op, scratch, stream);
  OnStream<double>(after_all_reduce, values, count, stream);
  return status;
}

absl::Status RecordingCommunicator::Barrier(kernels::Stream& stream) {
  recorded_.push_back({CollectiveKind::kBarrier, ToEach(everyone(), 0), {}});
  return wrapped_.Barrier(stream);
}

}  // namespace upipe::testing
