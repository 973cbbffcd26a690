// The space a search goes through: ways to split ranks and heads, and for each of them the knobs of
// the memory policy. Pure; what is written in the job is never changed.
#pragma once

#include <google/protobuf/descriptor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "upipe/v1/job.pb.h"

namespace upipe::planner {

// Every split of ranks and heads that `spec` (with defaults, without violations) leaves open, its
// own where it leaves none: method, heads_per_stage and ring_ranks named, memory as it is. Each
// point of the schedule space once: one stage of all heads is called ulysses, ring or usp, anything
// narrower upipe; u runs over the powers of two. Ulysses ranks beyond the heads would idle: left
// out where there is another split.
std::vector<v1::JobSpec> SplitsOf(const v1::JobSpec& spec);

// One field of the memory policy that the job leaves to the planner.
struct Knob {
  const google::protobuf::FieldDescriptor* field = nullptr;
  std::vector<int64_t> values;  // from the leanest in device memory to the fastest
};

// Those of a split, in the order of job.proto; none where the policy is written.
std::vector<Knob> KnobsOf(const v1::JobSpec& split);

// `split` with every knob at its leanest, or at its fastest, value that is legal beside what is
// written, and nothing auto any more.
v1::JobSpec Leanest(const v1::JobSpec& split, const std::vector<Knob>& knobs);
v1::JobSpec Fastest(const v1::JobSpec& split, const std::vector<Knob>& knobs);

// A legal spec that differs from another in one knob.
struct Move {
  v1::JobSpec spec;
  std::string what;  // "memory.overlap: true"
};
std::vector<Move> MovesOf(const v1::JobSpec& point, const std::vector<Knob>& knobs);

}  // namespace upipe::planner
