// What a set of shards holds together: that every element of every tensor is there exactly once,
// where it lies, and the sum by which equal bits are known whoever wrote them.
#pragma once

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/checkpoint/shard_file.h"

namespace upipe::checkpoint {

class Content {
 public:
  // DataLoss naming the tensor of which elements are missing, there twice, or not of the model.
  // `shards` are kept.
  static absl::StatusOr<Content> Create(
      const google::protobuf::RepeatedPtrField<v1::TensorExtent>& tensors,
      std::vector<ShardFile> shards);

  // SHA-256, hex, of the state and, in order of names, of every tensor's name, shape and blocks.
  // Reads the blocks that two shards share.
  absl::StatusOr<std::string> Sum(const v1::TrainingState& state) const;
  // Elements [offset, offset + count) of a tensor of the model, checked.
  absl::Status Read(const std::string& tensor, v1::ValueKind kind, int64_t offset, int64_t count,
                    float* to) const;
  // Reads every value of every shard.
  absl::Status Verify() const;

 private:
  struct Place {
    const ShardFile* shard;
    const v1::ShardPiece* piece;
  };
  using Places = std::vector<Place>;  // of one tensor and kind, ascending, without holes
  Content() = default;
  absl::StatusOr<std::string> TensorSum(const Places& places) const;

  std::vector<ShardFile> shards_;
  std::map<std::string, v1::TensorExtent> tensors_;
  std::map<std::pair<std::string, v1::ValueKind>, Places> places_;
};

// Of a tensor.
int64_t NumElements(const v1::TensorExtent& tensor);

}  // namespace upipe::checkpoint
