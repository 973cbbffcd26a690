// Ranks as threads of this process that do the same work at the same time, because the ranks of a
// node share its memory and its CPUs: what is timed is the team, never one rank alone.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/comm/communicator.h"
#include "engine/rank_context.h"
#include "kernels/api/allocator.h"
#include "kernels/api/device.h"

namespace upipe::planner {

// One rank: a CPU device and what the engine enqueues through. Used by one thread at a time.
class TeamRank {
 public:
  engine::RankContext& context() { return *context_; }

  // A tensor of normal random numbers times `scale` in device memory, alive until Clear. Rows are
  // gapless. Blocks.
  kernels::TensorView Random(kernels::DType dtype, const std::vector<int64_t>& shape,
                             float scale = 1);
  // The same with every element `value`; a vector in host memory.
  kernels::TensorView Filled(kernels::DType dtype, const std::vector<int64_t>& shape, double value);
  kernels::TensorView FilledOnHost(kernels::DType dtype, int64_t elements, double value);
  // Frees every tensor.
  void Clear();

 private:
  friend class RankTeam;
  kernels::Buffer Allocate(int64_t bytes);
  std::unique_ptr<kernels::Device> device_;
  std::unique_ptr<comm::Communicator> comm_;
  engine::RankStreams streams_;
  std::optional<engine::RankContext> context_;
  std::deque<kernels::Buffer> buffers_;
  uint64_t seed_ = 1;
};

struct TeamOptions {
  int threads_per_rank = 1;
  int64_t arena_bytes = 0;  // of each rank's device memory
  int64_t host_bytes = 0;
  std::vector<std::vector<int>> cpus;  // [ranks], or none: anywhere
};

class RankTeam {
 public:
  // One rank for each of `comms`.
  static absl::StatusOr<std::unique_ptr<RankTeam>> Create(
      std::vector<std::unique_ptr<comm::Communicator>> comms, const TeamOptions& options);
  ~RankTeam();

  int size() const { return static_cast<int>(ranks_.size()); }
  TeamRank& rank(int index) { return *ranks_[index]; }

  // Runs `body` on a thread of every rank at once. The seconds from the first start to the last
  // end, or the first failure; the other ranks' collectives are then aborted.
  absl::StatusOr<double> Time(const std::function<absl::Status(TeamRank&)>& body);

 private:
  RankTeam() = default;
  std::vector<std::unique_ptr<TeamRank>> ranks_;
  std::vector<std::vector<int>> cpus_;
};

}  // namespace upipe::planner
