// Where a listing goes on: opaque to clients, tied to the filters it was made for, checked before
// it is believed. Holds a submit number, so jobs that come or change meanwhile move no page.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "absl/strings/string_view.h"
#include "upipe/v1/job_service.pb.h"

namespace upipe::coordinator {

// A token that says: go on below `submit_number`, with the filters of `request`. 22 characters of
// A-Z, a-z, 0-9, '-' and '_'.
std::string MakePageToken(const v1::ListJobsRequest& request, int64_t submit_number);

// The submit number of a token made for the same filters; none for anything else.
std::optional<int64_t> ReadPageToken(const v1::ListJobsRequest& request, absl::string_view token);

}  // namespace upipe::coordinator
