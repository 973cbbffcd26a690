// Measures the node it runs on, through the CPU backend: a device description whose every number
// says how it came about. Blocks for up to a minute and keeps every CPU it is given busy.
#pragma once

#include <functional>
#include <string>

#include "absl/status/statusor.h"
#include "upipe/v1/device.pb.h"

namespace upipe::planner {

struct CalibrateOptions {
  std::string name = "cpu";  // of the description
  int ranks = 1;             // 1 to 64, that compute at once
  int threads_per_rank = 1;  // 1 to 64
  bool quick = false;        // a few seconds, shorter sequences, fewer repeats
  // The node does other work: computation is timed by processor time, the rest by fast samples.
  // With one thread a rank, and a CPU for each.
  bool busy = false;
  std::string version;  // of this build, for the notes
  // Told what is about to be measured, and each result; a line without its end.
  std::function<void(const std::string& line)> say;
};

// InvalidArgument for a name or number outside its range, ResourceExhausted when the node lacks the
// memory that the ranks take.
absl::StatusOr<v1::DeviceFile> Calibrate(const CalibrateOptions& options);

// The numbers of a description as a table for people, a line each; any description, measured or
// not.
std::string RenderDevice(const v1::DeviceFile& device);

}  // namespace upipe::planner
