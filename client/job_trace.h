// `upipe trace`: measured steps of a job's ranks as a trace that Perfetto opens.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "client/commands.h"

namespace upipe::client {

struct TraceOptions {
  std::string job;
  std::string path;             // of the trace; empty: <job id>-trace.json
  std::optional<int> rank;      // absent: all
  std::optional<int64_t> step;  // absent: the newest that most ranks have
  int64_t generation = 0;       // 0: the latest
};
// Reads the timelines from the workers that keep them. Ranks that cannot be read are named on
// `err`; none at all is a failure that says why, and so is a step that was not recorded, which
// lists those that were.
int JobTrace(Console& console, const TraceOptions& options);

}  // namespace upipe::client
