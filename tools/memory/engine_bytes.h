// How many bytes a rank of this engine holds by context, for documents: dry runs of the real
// step with few layers, composed to all of them, and the line through two of them beyond.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "upipe/v1/job.pb.h"

namespace upipe::memory {

struct EngineSetup {
  v1::ModelSpec model;  // layers: an even number from 4
  v1::Method method = v1::METHOD_UPIPE;
  int ulysses_ranks = 1;
  int ring_ranks = 1;
  v1::MemorySpec memory;  // layer inputs on the host, so that a layer more adds parameters only
};

struct EngineBytes {
  int64_t device = 0;  // live peak
  int64_t host = 0;    // live peak of host memory
};

// Longest context that is run; beyond, bytes grow as on the way from kLineFrom to it.
inline constexpr int64_t kLineFrom = int64_t{3} << 20;
inline constexpr int64_t kLongestRun = int64_t{4} << 20;

// Of `rank`, by the whole step with all layers as it is planned: the proof that composing is exact.
absl::StatusOr<EngineBytes> WholeStep(const EngineSetup& setup, int64_t context, int rank = 0);

// Of rank 0, from steps of 2 and 4 layers, at each of `contexts`. Where C divides H and K the other
// ranks hold as much.
absl::StatusOr<std::vector<EngineBytes>> ComposedSteps(const EngineSetup& setup,
                                                       const std::vector<int64_t>& contexts);

}  // namespace upipe::memory
