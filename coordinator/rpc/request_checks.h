// What a client's request must look like before the deciding thread sees it: sizes and characters.
// Pure functions; what depends on the state (does the job exist, has it that rank) is decided
// later.
#pragma once

#include "absl/status/status.h"
#include "upipe/v1/job_service.pb.h"
#include "upipe/v1/node_service.pb.h"

namespace upipe::coordinator {

// InvalidArgument with a field path for every violation.
absl::Status CheckRequest(const v1::SubmitRequest& request);
absl::Status CheckRequest(const v1::GetJobRequest& request);
absl::Status CheckRequest(const v1::CancelRequest& request);
absl::Status CheckRequest(const v1::HoldRequest& request);
absl::Status CheckRequest(const v1::ReleaseRequest& request);
absl::Status CheckRequest(const v1::WhyRequest& request);
absl::Status CheckRequest(const v1::WatchRequest& request);
absl::Status CheckRequest(const v1::LogsRequest& request);
absl::Status CheckRequest(const v1::CordonRequest& request);
absl::Status CheckRequest(const v1::DrainRequest& request);
absl::Status CheckRequest(const v1::UncordonRequest& request);
absl::Status CheckRequest(const v1::FenceNodeRequest& request);
absl::Status CheckRequest(const v1::ForgetNodeRequest& request);

}  // namespace upipe::coordinator
