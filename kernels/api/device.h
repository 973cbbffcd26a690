// One accelerator (or one rank's share of a CPU): memory, streams, ops. The engine sees only this,
// so the dry device can stand in for a real one without a branch in engine/.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "kernels/api/allocator.h"
#include "kernels/api/op_table.h"
#include "kernels/api/stream.h"

namespace upipe::kernels {

class Device {
 public:
  virtual ~Device() = default;
  virtual std::string name() const = 0;  // "cpu", "reference", "dry(cpu)"
  virtual Allocator& allocator() = 0;
  virtual OpTable& ops() = 0;
  virtual std::unique_ptr<Stream> CreateStream(std::string name) = 0;
  // Stream-ordered copies between device memory and ordinary host memory, which must stay alive
  // until the stream passes the copy. The dry device counts bytes and leaves `host` untouched.
  virtual void CopyToHost(void* host, const void* device, int64_t bytes, Stream& stream) = 0;
  virtual void CopyFromHost(void* device, const void* host, int64_t bytes, Stream& stream) = 0;
};

}  // namespace upipe::kernels
