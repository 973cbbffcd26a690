// A job's ranks as threads of this process, which keep their weights from one step to the next and
// idle in between: what benchmarks measure whole training steps with. Tokens are reproducible, the
// same whatever the method, so equal jobs have equal losses.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "benchmarks/step/timed_device.h"
#include "engine/comm/communicator.h"
#include "kernels/api/allocator.h"
#include "upipe/v1/plan.pb.h"

namespace upipe::bench {

// One training step of all ranks together.
struct GangStep {
  double wall_seconds = 0;
  double cpu_seconds = 0;  // of this process: every thread of every rank, communication included
  double loss = 0;
  // Processor time of the ranks' streams, summed over ranks; a stream's name is without its rank.
  std::map<OpKey, OpTime> ops;
};

class RankGang {
 public:
  // Makes devices as the plan sizes them, streams and training steps; blocking. `comms`: one per
  // rank. The plan is borrowed.
  static absl::StatusOr<std::unique_ptr<RankGang>> Create(
      const v1::RunPlan& plan, std::vector<std::unique_ptr<comm::Communicator>> comms);
  ~RankGang();

  // Runs the next optimizer step. After an error a gang is good for destruction only.
  absl::StatusOr<GangStep> Step();

  // As measured since the ranks were made.
  kernels::MemoryStats memory(int rank) const;
  kernels::MemoryStats host_memory(int rank) const;

 private:
  struct Rank;
  RankGang(const v1::RunPlan& plan, std::vector<std::unique_ptr<comm::Communicator>> comms);
  // The first failure; the other ranks are then aborted.
  absl::Status OnEveryRank(const std::function<absl::Status(Rank&)>& body);

  const v1::RunPlan& plan_;
  std::vector<std::unique_ptr<Rank>> ranks_;
  int64_t steps_done_ = 0;
};

}  // namespace upipe::bench
