// What clients see of the state. Pure functions.
#pragma once

#include <string>

#include "coordinator/core/state.h"
#include "upipe/v1/job_service.pb.h"
#include "upipe/v1/node_service.pb.h"

namespace upipe::coordinator {

enum class JobDetail {
  kSummary,  // without plan, events, log tails and reports of ranks
  kFull,
};
v1::Job ViewJob(const Job& job, JobDetail detail);

absl::Status JobNotFound(const std::string& id);

// NotFound names the id.
absl::StatusOr<v1::Job> GetJob(const State& state, const std::string& id);

// Newest first; a page ends early once its jobs take 2 MiB. InvalidArgument, with field paths, for
// a page size above 1,000, a token this function did not make for these filters, states that do not
// exist, an id_prefix over 70 characters or an empty span of time.
absl::StatusOr<v1::ListJobsResponse> ListJobs(const State& state,
                                              const v1::ListJobsRequest& request);

// Why a job does not run, or does not run on: the most pressing reason in one sentence with the
// numbers, and its place in the queue. NotFound names the id.
absl::StatusOr<v1::WhyResponse> Why(const State& state, const std::string& id, Moment now);

v1::Node ViewNode(const State& state, const Node& node, BootTime now);

v1::ListNodesResponse ListNodes(const State& state, BootTime now);

}  // namespace upipe::coordinator
