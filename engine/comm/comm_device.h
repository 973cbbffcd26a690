// What a communicator needs of a device whose memory the host cannot touch: a stream of its own,
// copies and ordered sums on it, and the time between two points of it. CUDA implements it, and a
// fake over host memory does for tests.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/comm/communicator.h"
#include "kernels/api/stream.h"

namespace upipe::comm {

// gathered: [num_ranks, count] fp64; values: [count] fp64.
struct Combination {
  ReduceOp op = ReduceOp::kSum;
  const double* gathered = nullptr;
  int num_ranks = 0;
  int64_t count = 0;
  double* values = nullptr;
};

// sum[i] = (accumulate ? sum[i] : 0) + terms[0][i] + terms[1][i] + .., one after the other; without
// accumulate the first term is taken as it is. fp32. A term may be `sum` only without accumulate
// and as the first.
struct OrderedSum {
  std::vector<const float*> terms;
  bool accumulate = false;
  int64_t count = 0;
  float* sum = nullptr;
};

class CommDevice {
 public:
  virtual ~CommDevice() = default;
  // The same in every process that uses the device, of no other device anywhere.
  virtual std::string id() const = 0;
  virtual absl::StatusOr<int64_t> FreeBytes() = 0;
  // Memory of the device. Freed with the last holder, after the streams that use it.
  virtual absl::StatusOr<std::shared_ptr<void>> Allocate(int64_t bytes) = 0;

  virtual std::unique_ptr<kernels::Stream> CreateStream(std::string name) = 0;
  // On a stream of CreateStream; as with Stream::Submit, what fails surfaces on events.
  virtual void Copy(void* to, const void* from, int64_t bytes, kernels::Stream& stream) = 0;
  virtual void Sum(const OrderedSum& sum, kernels::Stream& stream) = 0;
  virtual void Combine(const Combination& combination, kernels::Stream& stream) = 0;

  // A point of a stream that knows when it was passed.
  class Mark {
   public:
    virtual ~Mark() = default;
    // Both were passed.
    virtual double SecondsSince(const Mark& earlier) const = 0;
  };
  virtual std::unique_ptr<Mark> RecordMark(kernels::Stream& stream) = 0;
};

}  // namespace upipe::comm
