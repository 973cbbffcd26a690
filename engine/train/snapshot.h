// This rank's part of a checkpoint in the host pool: a copy of weights and moments that stays as it
// is while the writer's thread reads it and the next steps change the originals. Replicas (dp) hold
// the same bits, so each copies and writes its part of them.
#pragma once

#include <atomic>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/checkpoint/content.h"
#include "engine/checkpoint/shard_file.h"
#include "engine/model/sharded_parameters.h"

namespace upipe::train {

class Snapshot {
 public:
  // Takes its memory from the host pool (tag checkpoint), for good.
  static absl::StatusOr<Snapshot> Create(const engine::RankContext& context,
                                         const model::ShardedParameters& parameters);

  // Copies what the shards hold when the compute stream gets here. Blocking. Nobody may be reading
  // the pieces.
  absl::Status Take(const engine::RankContext& context, const model::ShardedParameters& parameters);
  // Where each run of elements lies in the copy.
  const std::vector<checkpoint::MemoryPiece>& pieces() const { return pieces_; }

 private:
  struct Copy {
    int64_t shard_begin = 0;  // elements into the rank's shard
    int64_t begin = 0;        // elements into each kind's part of the memory
    int64_t count = 0;
  };
  kernels::Buffer memory_;
  int64_t elements_ = 0;  // of each kind
  std::vector<Copy> copies_;
  std::vector<checkpoint::MemoryPiece> pieces_;
};

// Fills this rank's shards from a checkpoint of any layout. Blocking. DataLoss when a block it
// needs is damaged, Cancelled when `stop` (may be null) becomes true.
absl::Status RestoreShards(const engine::RankContext& context,
                           const model::ShardedParameters& parameters,
                           const checkpoint::Content& content, const std::atomic<bool>* stop);

}  // namespace upipe::train
