// Scratch memory of one op call.
#pragma once

#include <cstdint>

namespace upipe::kernels {

// From the tagged Allocator. Alive until the stream passes the op.
struct Workspace {
  void* data = nullptr;
  int64_t size_bytes = 0;
};

}  // namespace upipe::kernels
