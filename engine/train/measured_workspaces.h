// What a worker's libraries take as scratch, as a message and as the table devices count by.
#pragma once

#include "kernels/api/scratch_table.h"
#include "upipe/v1/plan.pb.h"

namespace upipe::train {

// Of a plan that was made once more; else empty.
kernels::ScratchTable ScratchTableOf(const v1::RunPlan& plan);

// At most kMeasuredOpsMax entries, those of ops of which some shape takes more than was counted.
inline constexpr int kMeasuredOpsMax = 256;
v1::MeasuredWorkspaces ToMessage(const kernels::ScratchTable& table, std::string libraries);

}  // namespace upipe::train
