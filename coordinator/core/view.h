// What clients see of the state. Pure functions.
#pragma once

#include <string>

#include "coordinator/core/state.h"
#include "upipe/v1/job_service.pb.h"
#include "upipe/v1/node_service.pb.h"

namespace upipe::coordinator {

enum class JobDetail {
  kSummary,  // without plan, events and log tails
  kFull,
};
v1::Job ViewJob(const Job& job, JobDetail detail);

// NotFound names the id.
absl::StatusOr<v1::Job> GetJob(const State& state, const std::string& id);

// Newest first. InvalidArgument for a page size above 1,000 or a token this function did not make.
absl::StatusOr<v1::ListJobsResponse> ListJobs(const State& state,
                                              const v1::ListJobsRequest& request);

v1::ListNodesResponse ListNodes(const State& state, BootTime now);

}  // namespace upipe::coordinator
