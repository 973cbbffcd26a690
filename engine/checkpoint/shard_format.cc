#include "engine/checkpoint/shard_format.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "common/sha256.h"
#include "common/status.h"

namespace upipe::checkpoint {
namespace {

static_assert(std::endian::native == std::endian::little,
              "shards are written as they lie in memory");

// Keeps every sum and product below within 64 bits.
constexpr int64_t kMaxElements = int64_t{1} << 56;
constexpr int64_t kMaxIndexBytes = int64_t{1} << 30;

absl::string_view SumOf(const ShardHeader& header) { return {header.index_sha256, kSumBytes}; }

absl::Status CheckPiece(const v1::ShardPiece& piece, int64_t begin, int64_t end,
                        absl::string_view name) {
  const auto damaged = [&](auto&&... what) {
    return absl::DataLossError(
        absl::StrCat(name, ": ", Describe(piece.kind(), piece.tensor()), ": ", what...));
  };
  if (piece.tensor().empty() || piece.kind() < v1::VALUE_KIND_WEIGHT ||
      piece.kind() > v1::VALUE_KIND_SECOND_MOMENT) {
    return damaged("a piece of no tensor or no kind");
  }
  if (piece.offset() < 0 || piece.count() < 1 || piece.offset() > kMaxElements ||
      piece.count() > kMaxElements) {
    return damaged("a piece of ", piece.count(), " elements at ", piece.offset());
  }
  const int64_t bytes = piece.count() * static_cast<int64_t>(sizeof(float));
  if (piece.file_offset() < begin || piece.file_offset() % kPieceAlignmentBytes != 0 ||
      piece.file_offset() > end || bytes > end - piece.file_offset()) {
    return damaged("bytes ", piece.file_offset(), " to ", piece.file_offset() + bytes,
                   " do not lie between ", begin, " and ", end);
  }
  if (static_cast<int64_t>(piece.block_sums().size()) != NumBlocks(piece) * kSumBytes) {
    return damaged(piece.block_sums().size(), " bytes of sums for ", NumBlocks(piece), " blocks");
  }
  return absl::OkStatus();
}

}  // namespace

int64_t NumBlocks(const v1::ShardPiece& piece) {
  const int64_t first = piece.offset() / kBlockElements;
  return (piece.offset() + piece.count() - 1) / kBlockElements - first + 1;
}

BlockPart PartOf(const v1::ShardPiece& piece, int64_t index) {
  const int64_t block = piece.offset() / kBlockElements + index;
  return {.begin = std::max(piece.offset(), block * kBlockElements),
          .end = std::min(piece.offset() + piece.count(), (block + 1) * kBlockElements)};
}

std::string EncodeShardHeader(absl::string_view index, int64_t index_offset) {
  ShardHeader header = {.version = kShardVersion,
                        .reserved = 0,
                        .index_offset = static_cast<uint64_t>(index_offset),
                        .index_bytes = index.size()};
  std::memcpy(header.magic, kShardMagic, sizeof(kShardMagic));
  Sha256 sum;
  sum.Update(index);
  std::memcpy(header.index_sha256, sum.Digest().data(), kSumBytes);
  return std::string(reinterpret_cast<const char*>(&header), sizeof(header));
}

absl::StatusOr<ShardHeader> ParseShardHeader(absl::string_view bytes, int64_t file_bytes,
                                             absl::string_view name) {
  ShardHeader header;
  if (bytes.size() < sizeof(header)) {
    return absl::DataLossError(
        absl::StrCat(name, " has ", file_bytes, " bytes, a shard's header ", sizeof(header)));
  }
  std::memcpy(&header, bytes.data(), sizeof(header));
  if (std::memcmp(header.magic, kShardMagic, sizeof(kShardMagic)) != 0) {
    return absl::InvalidArgumentError(absl::StrCat(name, " is no checkpoint shard"));
  }
  if (header.version != kShardVersion) {
    return absl::InvalidArgumentError(absl::StrCat(name, " is a checkpoint shard of version ",
                                                   header.version, ", this build reads version ",
                                                   kShardVersion));
  }
  const auto size = static_cast<uint64_t>(file_bytes);
  if (header.reserved != 0 || header.index_bytes > static_cast<uint64_t>(kMaxIndexBytes) ||
      header.index_offset < sizeof(header) || header.index_offset > size ||
      header.index_bytes != size - header.index_offset) {
    return absl::DataLossError(absl::StrCat(name, " has ", file_bytes,
                                            " bytes; its header says an index of ",
                                            header.index_bytes, " bytes at ", header.index_offset));
  }
  return header;
}

absl::StatusOr<v1::ShardIndex> ParseShardIndex(absl::string_view bytes, const ShardHeader& header,
                                               absl::string_view name) {
  Sha256 sum;
  sum.Update(bytes);
  if (sum.Digest() != SumOf(header)) {
    return absl::DataLossError(absl::StrCat(name,
                                            " has a damaged index: its SHA-256 is not the one "
                                            "in its header"));
  }
  v1::ShardIndex index;
  if (!index.ParseFromArray(bytes.data(), static_cast<int>(bytes.size()))) {
    return absl::DataLossError(absl::StrCat(name, " has an index that cannot be read"));
  }
  int64_t at = sizeof(ShardHeader);
  for (const v1::ShardPiece& piece : index.pieces()) {
    UPIPE_RETURN_IF_ERROR(CheckPiece(piece, at, static_cast<int64_t>(header.index_offset), name));
    at = piece.file_offset() + piece.count() * static_cast<int64_t>(sizeof(float));
  }
  return index;
}

std::string Describe(v1::ValueKind kind, absl::string_view tensor) {
  const char* what = kind == v1::VALUE_KIND_WEIGHT          ? "weights"
                     : kind == v1::VALUE_KIND_FIRST_MOMENT  ? "first moments"
                     : kind == v1::VALUE_KIND_SECOND_MOMENT ? "second moments"
                                                            : "values of no kind";
  return absl::StrCat(what, " of ", tensor);
}

}  // namespace upipe::checkpoint
