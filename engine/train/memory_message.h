// The allocator's numbers as messages carry them: of a real run, and of a dry one.
#pragma once

#include "kernels/api/allocator.h"
#include "upipe/v1/plan.pb.h"

namespace upipe::train {

v1::MemoryUsage ToMessage(const kernels::MemoryStats& stats);

}  // namespace upipe::train
