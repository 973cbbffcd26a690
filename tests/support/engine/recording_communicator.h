// A communicator that passes everything on and writes down what each collective sends and receives,
// so that a test can compare the engine's messages with a schedule worked out by hand. Wraps the
// dry communicator or a real one.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "engine/comm/communicator.h"

namespace upipe::testing {

enum class CollectiveKind { kAllToAllV, kAllGather, kReduceScatter, kAllReduce, kBarrier };

// One collective of one rank. Bytes by peer; what stays on the rank is not counted.
struct RecordedCollective {
  CollectiveKind kind = CollectiveKind::kAllToAllV;
  std::vector<int64_t> sent;      // [ranks]
  std::vector<int64_t> received;  // [ranks]; empty for reductions

  friend bool operator==(const RecordedCollective&, const RecordedCollective&) = default;
};
std::string ToString(const RecordedCollective& collective);

class RecordingCommunicator final : public comm::Communicator {
 public:
  explicit RecordingCommunicator(comm::Communicator& wrapped)
      : Communicator(wrapped.size()), wrapped_(wrapped) {}

  const std::vector<RecordedCollective>& recorded() const { return recorded_; }
  void Clear() { recorded_.clear(); }

  // Called on the stream just before each reduce-scatter sends, and just after each all-reduce has
  // ended.
  std::function<void(const float* send, int64_t count)> before_reduce_scatter;
  std::function<void(const double*values, int64_t count)> before_all_reduce, after_all_reduce;

  int rank() const override { return wrapped_.rank(); }
  int size() const override { return wrapped_.size(); }
  absl::Status AllToAllV(const comm::AllToAllVParams& params, kernels::Stream& stream) override;
  absl::Status AllGather(const comm::RankGroup& group, const void* send, void* receive,
                         int64_t bytes, kernels::Stream& stream) override;
  absl::Status ReduceScatter(const comm::RankGroup& group, const float* send, float* receive,
                             int64_t count, void* scratch, kernels::Stream& stream) override;
  int64_t ReduceScatterScratchBytes(int group_size, int64_t count) const override {
    return wrapped_.ReduceScatterScratchBytes(group_size, count);
  }
  absl::Status AllReduce(double* values, int64_t count, comm::ReduceOp op, void* scratch,
                         kernels::Stream& stream) override;
  int64_t AllReduceScratchBytes(int64_t count) const override {
    return wrapped_.AllReduceScratchBytes(count);
  }
  absl::Status Barrier(kernels::Stream& stream) override;
  void Abort(absl::Status cause) override { wrapped_.Abort(std::move(cause)); }
  absl::Status status() const override { return wrapped_.status(); }
  comm::CommStats stats() const override { return wrapped_.stats(); }

 private:
  std::vector<int64_t> ToEach(const comm::RankGroup& group, int64_t bytes) const;

  comm::Communicator& wrapped_;
  std::vector<RecordedCollective> recorded_;
};

}  // namespace upipe::testing
