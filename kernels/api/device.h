// One accelerator (or one rank's share of a CPU): memory, streams, ops. The engine sees only this,
// so the dry device can stand in for a real one without a branch in engine/.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "common/check.h"
#include "kernels/api/allocator.h"
#include "kernels/api/op_table.h"
#include "kernels/api/stream.h"

namespace upipe::kernels {

// `rows` runs of `row_bytes` bytes, that far apart in bytes on either side, which is row_bytes at
// least (any number when there is one row).
struct RowsCopy {
  void* dst = nullptr;
  int64_t dst_stride = 0;
  const void* src = nullptr;
  int64_t src_stride = 0;
  int64_t row_bytes = 0;
  int64_t rows = 1;

  int64_t bytes() const { return rows * row_bytes; }
};

// That the rows do not overlap.
inline void CheckRows(const RowsCopy& copy) {
  UPIPE_CHECK(copy.rows >= 0 && copy.row_bytes >= 0)
      << copy.rows << " rows of " << copy.row_bytes << " bytes";
  UPIPE_CHECK(copy.rows <= 1 || std::min(copy.dst_stride, copy.src_stride) >= copy.row_bytes)
      << "rows of " << copy.row_bytes << " bytes, " << copy.src_stride << " apart to "
      << copy.dst_stride << " apart";
}

class Device {
 public:
  virtual ~Device() = default;
  virtual std::string name() const = 0;  // "cpu", "reference", "dry(cpu)"
  // What the bits of its results depend on beside the host's instruction set and libraries: "NVIDIA
  // H200, cuBLASLt 13.1.0, cuDNN 9.19.0"; empty: nothing.
  virtual std::string hardware() const { return ""; }
  virtual Allocator& allocator() = 0;
  virtual OpTable& ops() = 0;
  virtual std::unique_ptr<Stream> CreateStream(std::string name) = 0;

  // Pinned host memory: a second pool with its own numbers, never device memory by another name.
  // Its buffers may be given to streams of either side.
  virtual Allocator& host_allocator() = 0;
  // Ops over host memory, and streams that run them. On a CPU they are the same code.
  virtual OpTable& host_ops() = 0;
  virtual std::unique_ptr<Stream> CreateHostStream(std::string name) = 0;

  // Stream-ordered copies between device memory and host memory (of the pool, or ordinary memory
  // that stays alive until the stream passes the copy). The stream fails with InvalidArgument when
  // the device's side is not device memory, or the host's side is. The dry device counts bytes and
  // touches neither.
  virtual void CopyRowsToHost(const RowsCopy& copy, Stream& stream) = 0;
  virtual void CopyRowsFromHost(const RowsCopy& copy, Stream& stream) = 0;
  void CopyToHost(void* host, const void* device, int64_t bytes, Stream& stream) {
    CopyRowsToHost({.dst = host, .src = device, .row_bytes = bytes}, stream);
  }
  void CopyFromHost(void* device, const void* host, int64_t bytes, Stream& stream) {
    CopyRowsFromHost({.dst = device, .src = host, .row_bytes = bytes}, stream);
  }
};

}  // namespace upipe::kernels
