// What a client's request must look like before the deciding thread sees it: sizes and characters.
// Pure functions; what depends on the state (does the job exist, has it that rank) is decided
// later.
#pragma once

#include "absl/status/status.h"
#include "upipe/v1/job_service.pb.h"

namespace upipe::coordinator {

// InvalidArgument with a field path for every violation.
absl::Status CheckRequest(const v1::SubmitRequest& request);
absl::Status CheckRequest(const v1::GetJobRequest& request);
absl::Status CheckRequest(const v1::CancelRequest& request);
absl::Status CheckRequest(const v1::WatchRequest& request);
absl::Status CheckRequest(const v1::LogsRequest& request);

}  // namespace upipe::coordinator
