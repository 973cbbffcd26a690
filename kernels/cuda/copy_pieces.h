// Cuts a copy of rows into ones the CUDA runtime takes: a copy may not cross from one registered
// block of host memory into the next, nor have rows further apart than the device's limit.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/api/device.h"

namespace upipe::kernels {

// Where the host's side of a copy is cut: at base + i * block_bytes. Without a base, nowhere.
struct HostBlocks {
  const void* base = nullptr;
  int64_t block_bytes = 0;
};

// Copies that together are `copy`, in ascending rows. `host_is_dst` says which side lies in the
// blocks. A copy whose rows touch each other on both sides becomes a copy of one row.
std::vector<RowsCopy> CopyPieces(const RowsCopy& copy, bool host_is_dst, const HostBlocks& blocks,
                                 int64_t row_stride_bytes_max);

}  // namespace upipe::kernels
