// What the parallel and memory sections of a job mean: defaults by method, how ranks, heads and
// places go together, and what is legal but costly. Apart from job_spec because these two sections
// together name one point of the space of schedules and policies.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "common/spec/spec_checker.h"
#include "upipe/v1/job.pb.h"

namespace upipe {

// Something is left to the planner: parallel.method auto, heads_per_stage or ring_ranks auto (0),
// or memory.policy auto.
bool HasAuto(const v1::JobSpec& spec);

// "upipe", "ulysses", "ring", "usp", "fpdt", "auto" or "unspecified".
std::string MethodName(v1::Method method);

// Every absent field at the default job.proto writes at it for the method. parallel.ring_ranks of
// ring becomes all context ranks; of usp and auto, and heads_per_stage, which have no default, stay
// absent. Of memory, where the planner chooses the method or the policy, all stay absent but
// policy.
v1::ParallelSpec WithParallelDefaults(const v1::ParallelSpec& parallel);
v1::MemorySpec WithMemoryDefaults(const v1::MemorySpec& memory, v1::Method method);

// The ranks of one sequence.
struct ContextRanks {
  int64_t ulysses = 1;  // C
  int64_t ring = 1;     // R

  int64_t total() const { return ulysses * ring; }
};
// Of a section with defaults; nothing when its ranks cannot be split as it says, or the planner
// splits them.
std::optional<ContextRanks> ContextRanksOf(const v1::ParallelSpec& parallel);

// What a context is padded to a multiple of: C x R x query_chunks, and 2R when R > 1.
int64_t PaddingUnit(const ContextRanks& ranks, int64_t query_chunks);

// The violations of the sections of `spec`, which has defaults.
void CheckParallel(const v1::JobSpec& spec, SpecChecker& checker);
void CheckMemory(const v1::JobSpec& spec, SpecChecker& checker);

// Idle and uneven ranks, padding, rings out of balance, overlap of nothing. `spec` has defaults, no
// violations and nothing auto.
std::vector<std::string> ParallelWarnings(const v1::JobSpec& spec);

}  // namespace upipe
