// The files that are kept of a job's ranks, line by line: what `upipe report` and `upipe trace`
// read.
#pragma once

#include <functional>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "client/commands.h"

namespace upipe::client {

// Calls take(line) for every whole line of the file that `request` names, from its offset on,
// reconnecting in between. A last line that was cut off, and, with a negative offset, a first one,
// are left out. Blocks.
absl::Status ReadLines(Console& console, v1::LogsRequest request,
                       const std::function<void(absl::string_view line)>& take);

// Where the file of a request that failed is, in words for a page: "the steps of rank 3 in
// generation 2: worker w1 ..".
std::string Missing(const v1::LogsRequest& request, const absl::Status& status);

// Writes `text` to `path`, whole or not at all.
absl::Status WriteWhole(const std::string& path, const std::string& text);

}  // namespace upipe::client
