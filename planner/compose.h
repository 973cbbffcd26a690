// The dry runs of a plan from shorter ones. Layers in the middle of a model do what their
// neighbours do, a rank does what another of its list shape does, a micro-step after the first what
// the one before did: each is run once and written down (recording.h), and what was written is put
// together and played to fresh allocators. The numbers are those of the whole run, the arena's
// high-water mark among them.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "planner/dry_run.h"
#include "planner/recording.h"

namespace upipe::planner {

// Ranks that do the same work: as many heads fetched, attended with and released at every stage, as
// many tokens in every run of positions, products of the same sizes. They differ in which peers
// they send to, and in the pieces of tensors that the optimizer updates. Groups ascend by their
// first rank. `plan` needs spec (with defaults) and schedule.
std::vector<std::vector<int>> AlikeRanks(const v1::RunPlan& plan);

// Ranks with as many heads as each other at every stage. All that else tells ranks apart, a
// balanced token map keeps small: to an estimate they are alike. Groups ascend by their first rank.
std::vector<std::vector<int>> RanksOfSameHeads(const v1::RunPlan& plan);

// DryRunRank(plan, rank, attention_kernel), byte for byte and FLOP for FLOP (sums of 2^53 and more
// are rounded in another order), from a run of three checkpoint segments, the last as long as the
// model's last, and of at most two micro-steps. What is not the layers' work (parameters,
// optimizer) comes from a run of all layers over a few tokens, which also proves each time that
// composing gives what running gives: where it does not, the rank is run whole.
absl::StatusOr<RankDryRun> ComposeRank(const v1::RunPlan& plan, int rank,
                                       const std::string& attention_kernel = "own");

// Of all ranks, in order: one long run per group of AlikeRanks, on up to `num_threads` threads.
absl::StatusOr<std::vector<RankDryRun>> ComposeRanks(const v1::RunPlan& plan,
                                                     const std::string& attention_kernel,
                                                     int num_threads);

// Outlines of one rank's runs, of plans that differ in nothing but the context: what does not
// depend on it is run once, and nothing is proven.
absl::StatusOr<std::vector<Outline>> OutlinesOf(const std::vector<v1::RunPlan>& plans, int rank,
                                                const std::string& attention_kernel);

// Of some ranks of one group, and never from whole runs: FailedPrecondition where composing does
// not give what running gives.
absl::StatusOr<std::vector<RankDryRun>> ComposeAlike(const v1::RunPlan& plan,
                                                     const std::vector<int>& ranks,
                                                     const std::string& attention_kernel = "own");

}  // namespace upipe::planner
