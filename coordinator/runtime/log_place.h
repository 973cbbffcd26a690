// Which worker keeps the log of one rank of one attempt. A pure function of the state.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "coordinator/core/state.h"
#include "upipe/v1/job_service.pb.h"
#include "upipe/v1/worker_service.pb.h"

namespace upipe::coordinator {

struct LogPlace {
  std::string worker;
  SessionId session = 0;
  v1::RankRef ref;  // what the worker is asked for
};

// JOB_NOT_FOUND; JOB_NOT_STARTED before the first attempt; REQUEST_INVALID for a rank or generation
// the job has not; LOG_NOT_FOUND for an attempt too old to be known; WORKER_LOST,
// WORKER_DISCONNECTED when who keeps it is away.
absl::StatusOr<LogPlace> FindLog(const State& state, const v1::LogsRequest& request);

}  // namespace upipe::coordinator
