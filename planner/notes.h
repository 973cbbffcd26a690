// What a plan says about itself in words, beside its numbers: how ranks, masks and memory are used,
// and what is costly about it.
#pragma once

#include <string>
#include <vector>

#include "upipe/v1/device.pb.h"
#include "upipe/v1/plan.pb.h"

namespace upipe::planner {

// "C 4 x R 2 x fsdp 1 x dp 1".
std::string MeshText(const v1::ParallelSpec& parallel);

// "causal within 4,096 positions, inside each document".
std::string MaskText(const v1::JobSpec& spec);

// Where things live and how often they are computed, every field of the policy that differs from
// the plainest one: "attention outputs computed again; layer inputs on the host".
std::string PolicyText(const v1::MemorySpec& memory);

// One sentence each, in the order people read them. `plan` needs spec (with defaults), ranks,
// attention_kernel and bit_identical.
std::vector<std::string> PlanNotes(const v1::RunPlan& plan, const v1::DeviceFile& device);

}  // namespace upipe::planner
