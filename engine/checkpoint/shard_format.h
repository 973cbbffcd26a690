// The shard file: one rank's part of a checkpoint. Pure; owns the format and every check of its
// untrusted bytes. Version 1, little-endian, in this order and with nothing after it:
//   header   64 bytes, see ShardHeader
//   pieces   fp32 values, each piece at a multiple of 64 bytes
//   index    v1.ShardIndex: which elements of which tensor each piece holds, and their sums
// Sums are of blocks of a tensor, wherever a piece begins, so that the sum over all pieces
// (content.h) does not depend on how a tensor is cut, and part of a piece can be checked by itself.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "upipe/v1/checkpoint.pb.h"

namespace upipe::checkpoint {

inline constexpr int64_t kBlockElements = 16384;
inline constexpr int64_t kPieceAlignmentBytes = 64;
inline constexpr int64_t kSumBytes = 32;  // of a SHA-256
inline constexpr uint32_t kShardVersion = 1;
inline constexpr char kShardMagic[8] = {'U', 'P', 'S', 'H', 'A', 'R', 'D', '\n'};

struct ShardHeader {
  char magic[8];  // kShardMagic
  uint32_t version;
  uint32_t reserved;  // 0
  uint64_t index_offset;
  uint64_t index_bytes;  // index_offset + index_bytes is the file's size
  char index_sha256[kSumBytes];
};
static_assert(sizeof(ShardHeader) == 64);

// [begin, end) elements of the tensor that block `index`, counted from the block the piece begins
// in, has in common with the piece.
struct BlockPart {
  int64_t begin = 0;
  int64_t end = 0;
};
int64_t NumBlocks(const v1::ShardPiece& piece);
BlockPart PartOf(const v1::ShardPiece& piece, int64_t index);

// Bytes of the header of a shard whose index is `index`, at `index_offset`.
std::string EncodeShardHeader(absl::string_view index, int64_t index_offset);

// The first bytes of a file that is `file_bytes` long. `name` is used in messages. InvalidArgument:
// no shard, or of a version this build does not read. DataLoss: damaged.
absl::StatusOr<ShardHeader> ParseShardHeader(absl::string_view bytes, int64_t file_bytes,
                                             absl::string_view name);

// Every piece lies inside the file behind the one before it, and has a sum for each of its blocks.
// DataLoss otherwise.
absl::StatusOr<v1::ShardIndex> ParseShardIndex(absl::string_view bytes, const ShardHeader& header,
                                               absl::string_view name);

// "weights of model.norm.weight", for messages.
std::string Describe(v1::ValueKind kind, absl::string_view tensor);

}  // namespace upipe::checkpoint
