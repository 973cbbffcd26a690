// The oracle every other backend is tested against: scalar loops on the stream's thread, sums in
// fp64, rounded to storage once per call. Slow and obvious; never optimised.
#pragma once

#include <memory>

#include "kernels/api/op_table.h"

namespace upipe::kernels {

std::unique_ptr<OpTable> CreateReferenceOpTable();

}  // namespace upipe::kernels
