// `upipe report`: a job as one HTML page, from what coordinator and workers keep of it.
#pragma once

#include <string>

#include "client/commands.h"

namespace upipe::client {

struct ReportOptions {
  std::string job;
  std::string path;  // of the page; empty: <job id>.html
};
// Reads the steps of rank 0 from the coordinator and those of the fullest rank, with a timeline,
// from the workers that keep them, over all attempts. What cannot be read is named on the page and
// on `err`, and is no failure.
int JobReport(Console& console, const ReportOptions& options);

}  // namespace upipe::client
