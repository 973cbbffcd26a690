// The texts of deploy/devices/*.yaml, written into the binary when it is built
// (planner/CMakeLists.txt), so that planning needs no file but the job's.
#pragma once

#include "absl/types/span.h"

namespace upipe::planner {

struct KnownDeviceFile {
  const char* filename;
  const char* text;
};

// In the order of their file names.
absl::Span<const KnownDeviceFile> KnownDeviceFiles();

}  // namespace upipe::planner
