// Our CUDA kernels as an op table of a host device: each call runs on the emulator before its task
// ends. Matrix products, which are a library's on a GPU, are the reference's.
#pragma once

#include <memory>

#include "kernels/api/op_table.h"

namespace upipe::kernels {

// Calls on a stream with several loop threads give the threads of a block their turns in descending
// order, others in ascending order.
std::unique_ptr<OpTable> CreateEmulatedCudaOpTable();

}  // namespace upipe::kernels
