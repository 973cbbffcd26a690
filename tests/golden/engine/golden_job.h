// The job that trains a golden file's model as the file's training section says.
#pragma once

#include <cstdint>
#include <string>

#include "tests/golden/engine/golden_file.h"
#include "upipe/v1/job.pb.h"

namespace upipe::golden {

// Where tests/golden/data/NAME.golden lies in the source tree that ctest runs.
std::string DataFile(const std::string& name);

// How to run it; none of this changes what the file says within the bounds.
struct GoldenRun {
  int ranks = 1;
  int64_t heads_per_rank = 1;
  std::string backend = "cpu";
  bool bf16 = false;
  bool hf_parity = false;
};
v1::JobSpec SpecOf(const GoldenFile& file, const GoldenRun& run);

}  // namespace upipe::golden
