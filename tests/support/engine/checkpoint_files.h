// Small checkpoints of made-up tensors, cut over ranks at will: for tests of the format, the job's
// folder and the writer that need no model.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "engine/checkpoint/job_folder.h"
#include "engine/checkpoint/shard_file.h"

namespace upipe::testing {

// "a" [3, 5], "b" [40000] (three blocks), "c" [16384] (one).
v1::CheckpointManifest TestFacts();
v1::TrainingState TestState(int64_t step);
v1::CheckpointOwner TestOwner(int64_t generation);

// Values of the tensors of TestFacts, different for every seed.
class TestTensors {
 public:
  explicit TestTensors(uint64_t seed);
  // The rank's pieces where each tensor is cut into `ranks` runs, none of them aligned to blocks.
  // Borrows the values.
  std::vector<checkpoint::MemoryPiece> Pieces(int rank, int ranks) const;
  const std::vector<float>& values(const std::string& tensor, v1::ValueKind kind) const;

 private:
  std::map<std::pair<std::string, v1::ValueKind>, std::vector<float>> values_;
};

// Writes a whole checkpoint of TestState(step) by writers, one per rank; its reference.
v1::CheckpointRef WriteTestCheckpoint(const checkpoint::JobFolder& folder, int64_t generation,
                                      int64_t step, int ranks, uint64_t seed);

}  // namespace upipe::testing
