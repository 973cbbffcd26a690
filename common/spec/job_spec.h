// What a JobSpec means: its defaults, and what makes one acceptable. Pure functions shared by
// client, coordinator and planner, so that a job is refused in the same words wherever it is looked
// at first.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "common/spec/parallel_rules.h"
#include "common/spec/violation.h"
#include "upipe/v1/job.pb.h"

namespace upipe {

// `spec` with every absent optional field at the default job.proto writes at it, and the model laid
// over its preset (`preset` stays, so that the plan tells where the shape came from). Absent stays
// what has no default here: train.memory_per_rank (what the worker offers), parallel.ranks_per_node
// (what the device description says), parallel.heads_per_stage (required for upipe),
// parallel.ring_ranks of usp, model.window, model.max_position, and what the planner chooses.
v1::JobSpec WithDefaults(const v1::JobSpec& spec);

// Every violation of `spec`, in field order; empty when it can be planned. Takes specs with and
// without defaults. A rule over several fields is looked at only when each of them is in range.
// The ranges keep every product of sizes that the engine forms below 2^62.
std::vector<Violation> ValidateJobSpec(const v1::JobSpec& spec);

// Legal but costly or unlikely to be meant: a context beyond the positions the model was trained
// for, a mask that shows what is to be predicted, heads that do not divide by ranks, idle ranks,
// padding, rings out of balance. One sentence each, with the numbers. Call for specs without
// violations, with or without defaults.
std::vector<std::string> JobSpecWarnings(const v1::JobSpec& spec);

// Tokens the context ranks really process: context rounded up to a multiple of R x C x n, and of 2R
// when R > 1 (SCHEDULE "Tokens"). Call for specs without violations.
int64_t PaddedContext(const v1::JobSpec& spec);

}  // namespace upipe
