// The device that parts of the check work on: tensors in its memory, ops run and timed. Written
// over Device, so that the same parts rehearse on a CPU at small sizes.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/api/device.h"

namespace upipe::gpu_check {

struct Settings {
  std::string backend = "cuda";
  bool small = false;  // sizes that a CPU gets through
};

// An op table to be checked, and what it is called.
struct NamedOps {
  std::string name;
  kernels::OpTable* ops = nullptr;
};

class CheckDevice {
 public:
  // With `arena_bytes` for tensors and scratch. The status of whatever cannot be had.
  static absl::StatusOr<std::unique_ptr<CheckDevice>> Create(const Settings& settings,
                                                             int64_t arena_bytes);

  kernels::Device& device() { return *device_; }
  kernels::Stream& stream() { return *stream_; }
  // Our own kernels, and cuDNN's where it can be had; over a CPU, the backend and the reference.
  const NamedOps& own() const { return own_; }
  const std::optional<NamedOps>& library() const { return library_; }
  // Why there is none.
  const std::string& no_library() const { return no_library_; }
  std::vector<NamedOps> all_ops() const;

  // Gapless, of 1 to 3 dims. Lives until Clear.
  absl::StatusOr<kernels::TensorView> Tensor(kernels::DType dtype,
                                             std::initializer_list<int64_t> dims);
  // Frees all tensors.
  absl::Status Clear();

  absl::Status Fill(const kernels::TensorView& view, double value);
  // Normal numbers; the same seed gives the same. Gapless views, fp32 or bf16.
  absl::Status FillNormal(const kernels::TensorView& view, uint64_t seed, double stddev = 1);
  absl::Status Upload(const kernels::TensorView& view, const void* host);
  // The bytes of a gapless view.
  absl::StatusOr<std::vector<char>> Bytes(const kernels::TensorView& view);
  // Row i of head 0 as doubles: of [tokens, heads, dim], or element i of head 0 of [heads, tokens].
  absl::StatusOr<std::vector<std::vector<double>>> Rows(const kernels::TensorView& view,
                                                        const std::vector<int64_t>& rows);
  // ||a - b|| / ||b|| over all elements, reckoned on the device with exact products by ones;
  // infinity where some element is not finite. Gapless [tokens, heads, dim] of one dtype.
  absl::StatusOr<double> Difference(const kernels::TensorView& a, const kernels::TensorView& b);

  // Submits the op with scratch of its own.
  absl::Status Run(const NamedOps& ops, const kernels::OpParams& params);
  // Runs it and waits.
  absl::Status RunToEnd(const NamedOps& ops, const kernels::OpParams& params);
  // Seconds of one run: the median of a few batches, after one run to warm up. In place ops go on
  // from what they wrote.
  absl::StatusOr<double> Seconds(const NamedOps& ops, const kernels::OpParams& params);
  // The same of CopyOnDevice.
  absl::StatusOr<double> CopySeconds(void* dst, const void* src, int64_t bytes);

 private:
  CheckDevice() = default;
  template <typename Submit>
  absl::StatusOr<double> Time(const Submit& submit);
  // Normal numbers are made, and differences taken, so many elements at a time.
  absl::StatusOr<double> SumOfSquares(const kernels::TensorView& vector);

  Settings settings_;
  std::unique_ptr<kernels::Device> device_, library_device_;
  std::unique_ptr<kernels::Stream> stream_;
  std::vector<kernels::Buffer> buffers_;
  NamedOps own_;
  std::optional<NamedOps> library_;
  std::string no_library_;
};

double Median(std::vector<double> values);

}  // namespace upipe::gpu_check
