// How `upipe top` looks: from what the coordinator told to lines that fit a terminal. Pure.
#pragma once

#include <cstddef>
#include <map>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "client/commands.h"
#include "client/progress.h"
#include "upipe/v1/job_service.pb.h"
#include "upipe/v1/node_service.pb.h"

namespace upipe::client {

// What is shown of the cluster.
struct TopCluster {
  v1::ListNodesResponse nodes;
  std::vector<v1::Job> jobs;  // live ones, then some that ended, as they are to be shown
  std::map<std::string, Progress> paces;  // by job, of those that run
};

// Lines no wider and no more than the size allows: what does not fit is counted in the last one.
// `notice` is shown first, when there is one.
std::vector<std::string> RenderTop(const TopCluster& cluster, const std::string& notice,
                                   absl::Time now, TerminalSize size);

// One job with its ranks: where each is in the step, what it holds by category against plan and
// limit, its own seconds.
std::vector<std::string> RenderTopJob(const v1::Job& job, const Progress& pace,
                                      const std::string& notice, absl::Time now, TerminalSize size);

}  // namespace upipe::client
