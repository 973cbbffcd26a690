// A plan as text for people.
#pragma once

#include <string>
#include <vector>

#include "planner/explore.h"
#include "upipe/v1/device.pb.h"
#include "upipe/v1/plan.pb.h"

namespace upipe::planner {

// What a plan takes, by the fullest rank and the fullest node.
struct Taken {
  int64_t device_bytes = 0;  // the arena
  int64_t host_bytes = 0;    // the pools of a node's ranks together
};
Taken TakenOf(const v1::RunPlan& plan);

// Method and mesh, stages and chunks, bytes by category of the fullest rank and where its peak is,
// those in host memory where there are any, what there was to fit into, the step's time by part,
// FLOPs, traffic, what else was looked at and why it lost, notes.
std::string RenderPlan(const v1::RunPlan& plan);

// More of the same plan: every rank's bytes, traffic and FLOPs, the policy field by field, and the
// numbers of the device description with their sources.
std::string ExplainPlan(const v1::RunPlan& plan, const v1::DeviceFile& device);

// The curve of a sweep as a table.
std::string RenderSweep(const std::vector<SweepPlan>& points);

}  // namespace upipe::planner
