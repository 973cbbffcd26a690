// What attention asks of cuDNN's scaled dot-product attention, as a seam: plans, what they are
// keyed by, and the tensors they run on. No CUDA headers.
#pragma once

#include <array>
#include <compare>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/cuda/runtime_calls.h"
#include "kernels/cuda/sdpa_calls.h"

namespace upipe::kernels {

// Elements from head to head and from row to row.
struct SdpaStrides {
  int64_t head = 0;
  int64_t row = 0;
  auto operator<=>(const SdpaStrides&) const = default;
};

struct SdpaPlanKey {
  bool backward = false;
  SdpaMask mask;
  int64_t batch = 1;  // documents; lengths are then bounds
  bool ragged = false;
  int64_t heads = 1;
  int64_t kv_heads = 1;
  int64_t queries = 0;
  int64_t keys = 0;
  int64_t head_dim = 0;
  float scale = 1;
  SdpaStrides q, k, v, o, dout, dq, dk, dv;
  int64_t stats_head = 0;     // row stride 1
  int64_t total_queries = 0;  // rows of the tensors; ragged only
  int64_t total_keys = 0;

  auto operator<=>(const SdpaPlanKey&) const = default;
};

// Tensors by what they are to the plan; also the identifiers that cuDNN knows them by.
enum class SdpaTensor : int64_t {
  kQ = 1,
  kK,
  kV,
  kO,
  kStats,
  kDout,
  kDq,
  kDk,
  kDv,
  kQueryLengths,
  kKeyLengths,
  kQOffsets,
  kKOffsets,
  kVOffsets,
  kOOffsets,
  kStatsOffsets,
  kDoutOffsets,
  kDqOffsets,
  kDkOffsets,
  kDvOffsets,
};
inline constexpr int kSdpaTensors = static_cast<int>(SdpaTensor::kDvOffsets) + 1;

// A plan's key with the memory of its tensors; null where it has none.
struct SdpaBound {
  SdpaPlanKey key;
  std::array<void*, kSdpaTensors> tensors = {};

  void*& operator[](SdpaTensor tensor) { return tensors[static_cast<size_t>(tensor)]; }
  void* operator[](SdpaTensor tensor) const { return tensors[static_cast<size_t>(tensor)]; }
};

class SdpaPlan {
 public:
  virtual ~SdpaPlan() = default;
  virtual int64_t workspace_bytes() const = 0;
  // On memory of the device. `bound.key` is the one it was made for.
  virtual absl::Status Execute(const SdpaBound& bound, void* workspace,
                               CudaStreamHandle stream) = 0;
};

// cuDNN, or a fake of it. One host thread calls it.
class SdpaLibrary {
 public:
  virtual ~SdpaLibrary() = default;
  // FailedPrecondition with the library's words and the shape when it has none. Takes a second or
  // so: cuDNN compiles the kernel.
  virtual absl::StatusOr<std::unique_ptr<SdpaPlan>> Make(const SdpaPlanKey& key) = 0;
  // Device memory of kSdpaTableBytes for calls on this stream, and the copy of a table into it:
  // ordered by the stream; `table` may go when it returns.
  virtual absl::StatusOr<char*> TableOf(CudaStreamHandle stream) = 0;
  virtual absl::Status Upload(const std::vector<char>& table, CudaStreamHandle stream) = 0;
};

}  // namespace upipe::kernels
