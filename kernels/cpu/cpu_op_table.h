// The CPU backend. Pool threads need 512 KiB of stack: tiles live there, so that ops need
// next to no workspace and never call malloc for more than a few KiB.
#pragma once

#include <memory>

#include "kernels/api/op_table.h"

namespace upipe::kernels {

// Also limits OpenBLAS to the calling thread (parallelism comes from ExecContext.parallel only) and
// has it ready for `num_threads` threads at once; 0 when nothing will run.
std::unique_ptr<OpTable> CreateCpuOpTable(int num_threads);

}  // namespace upipe::kernels
