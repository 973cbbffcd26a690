// Writes and reads shard files (format: shard_format.h).
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/checkpoint/files.h"
#include "engine/checkpoint/shard_format.h"

namespace upipe::checkpoint {

// Elements of one tensor, in host memory.
struct MemoryPiece {
  std::string tensor;
  v1::ValueKind kind = v1::VALUE_KIND_UNSPECIFIED;
  int64_t offset = 0;  // elements into the tensor
  int64_t count = 0;
  const float* data = nullptr;
};

// "rank-3.shard", "rank-3.summary".
std::string ShardName(int rank);
std::string SummaryName(int rank);

// Writes and syncs a shard; sets bytes and index_sha256 alone of what it returns. Between blocks it
// asks `go_on`, and returns its error.
absl::StatusOr<v1::ShardSummary> WriteShard(const Folder& folder, const std::string& name,
                                            const std::vector<MemoryPiece>& pieces,
                                            const std::function<absl::Status()>& go_on);

// A shard whose header and index are checked against its summary. Copyable: the file is opened
// where it is read.
class ShardFile {
 public:
  // NotFound, InvalidArgument or DataLoss, naming the file.
  static absl::StatusOr<ShardFile> Open(const Folder& folder, const v1::ShardSummary& summary);

  const v1::ShardIndex& index() const { return index_; }
  // Elements [begin, end) of the piece's tensor, which the piece holds. Blocks are checked before
  // any of their values is given out: DataLoss names the first that is damaged.
  absl::Status Read(const v1::ShardPiece& piece, int64_t begin, int64_t end, float* to) const;
  // Reads everything.
  absl::Status Verify() const;

 private:
  ShardFile(const Folder& folder, std::string name, v1::ShardIndex index)
      : folder_(&folder), name_(std::move(name)), index_(std::move(index)) {}
  absl::Status ReadBlock(const File& file, const v1::ShardPiece& piece, int64_t index,
                         std::vector<float>& block) const;

  const Folder* folder_;
  std::string name_;
  v1::ShardIndex index_;
};

}  // namespace upipe::checkpoint
