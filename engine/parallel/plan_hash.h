// The hash by which ranks, workers and coordinator know that they speak of the same plan.
#pragma once

#include <cstdint>

#include "upipe/v1/plan.pb.h"

namespace upipe::parallel {

// 64-bit hash of everything in the plan but plan_hash itself, unknown fields included. Equal
// between processes of one release: RunPlan has no map fields, so protobuf writes its fields in one
// order.
uint64_t HashOf(const v1::RunPlan& plan);

}  // namespace upipe::parallel
