// What every communicator does before anything moves: checks the parameters and counts the bytes
// that will leave for each peer. Shared by the real ones and the dry one, so their numbers cannot
// drift.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>

#include "absl/status/status.h"
#include "engine/comm/communicator.h"

namespace upipe::comm {

// What a call of AllToAllV is counted as.
inline CommOperation OperationOf(const AllToAllVParams& params) {
  return params.ring ? CommOperation::kRing : CommOperation::kAllToAll;
}

// Keeps the first error it is given. Thread-safe.
class FirstError {
 public:
  // True when `error` (not OK) was the first.
  bool Set(const absl::Status& error);
  absl::Status Get() const;
  bool failed() const { return failed_.load(std::memory_order_acquire); }

 private:
  std::atomic<bool> failed_{false};
  mutable std::mutex mutex_;
  absl::Status error_;  // under mutex_
};

// A completed point with a fixed outcome: making a stream wait for a failed one puts that stream in
// error.
kernels::Event EventWithStatus(const absl::Status& status);

// `error` with the collective it came from in front.
absl::Status InCollective(const absl::Status& error, const char* name, int64_t number, int rank,
                          int size);

// Where `rank` is in the group.
int IndexIn(const RankGroup& group, int rank);

// A reduction's blocks are cut into pieces, so that its scratch is bounded.
int64_t ReduceScatterScratchBytesFor(const ReduceRoom& room, int group_size, int64_t count);
int64_t AllReduceScratchBytesFor(int size, int64_t count);

// Each Add* refuses bad parameters with InvalidArgument, and counts otherwise. Null memory is
// refused where bytes would move. Thread-safe.
class Traffic {
 public:
  Traffic(int rank, int size);
  int rank() const { return rank_; }
  int size() const { return size_; }

  absl::Status AddAllToAllV(const AllToAllVParams& params);
  absl::Status AddAllGather(const RankGroup& group, const void* send, void* receive, int64_t bytes);
  absl::Status AddReduceScatter(const RankGroup& group, const float* send, float* receive,
                                int64_t count, void* scratch);
  absl::Status AddAllReduce(double* values, int64_t count, void* scratch);
  // Carries no data and counts no bytes.
  absl::Status AddBarrier();

  void AddSeconds(CommOperation operation, double seconds);
  CommStats stats() const;

 private:
  // InvalidArgument unless `group` is ascending, of ranks of the whole, with the own one.
  absl::Status CheckGroup(const char* op, const RankGroup& group) const;
  void CountToEach(CommOperation operation, const RankGroup& group, int64_t bytes);
  void CountBytes(CommOperation operation, int peer, int64_t bytes);  // under mutex_

  const int rank_;
  const int size_;
  const RankGroup everyone_;
  mutable std::mutex mutex_;
  CommStats stats_;  // under mutex_
};

}  // namespace upipe::comm
