#include "engine/checkpoint/shard_file.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "common/check.h"
#include "common/failpoint.h"
#include "common/rounding.h"
#include "common/sha256.h"
#include "common/status.h"

namespace upipe::checkpoint {
namespace {

absl::string_view BytesOf(const float* data, int64_t count) {
  return {reinterpret_cast<const char*>(data), static_cast<size_t>(count) * sizeof(float)};
}

absl::string_view SumOf(const v1::ShardPiece& piece, int64_t block) {
  return absl::string_view(piece.block_sums()).substr(block * kSumBytes, kSumBytes);
}

}  // namespace

std::string ShardName(int rank) { return absl::StrCat("rank-", rank, ".shard"); }
std::string SummaryName(int rank) { return absl::StrCat("rank-", rank, ".summary"); }

absl::StatusOr<v1::ShardSummary> WriteShard(const Folder& folder, const std::string& name,
                                            const std::vector<MemoryPiece>& pieces,
                                            const std::function<absl::Status()>& go_on) {
  UPIPE_ASSIGN_OR_RETURN(File file, folder.Create(name));
  v1::ShardIndex index;
  int64_t at = sizeof(ShardHeader);
  for (const MemoryPiece& memory : pieces) {
    v1::ShardPiece& piece = *index.add_pieces();
    at = RoundUp(at, kPieceAlignmentBytes);
    piece.set_tensor(memory.tensor);
    piece.set_kind(memory.kind);
    piece.set_offset(memory.offset);
    piece.set_count(memory.count);
    piece.set_file_offset(at);
    for (int64_t block = 0; block < NumBlocks(piece); ++block) {
      UPIPE_RETURN_IF_ERROR(go_on());
      UPIPE_RETURN_IF_ERROR(Failpoint(failpoints::kCheckpointShardPart));
      const BlockPart part = PartOf(piece, block);
      const absl::string_view bytes =
          BytesOf(memory.data + part.begin - memory.offset, part.end - part.begin);
      Sha256 sum;
      sum.Update(bytes);
      piece.mutable_block_sums()->append(sum.Digest());
      UPIPE_RETURN_IF_ERROR(file.WriteAt(at, bytes));
      at += static_cast<int64_t>(bytes.size());
    }
  }
  const std::string encoded = index.SerializeAsString();
  const std::string header = EncodeShardHeader(encoded, at);
  UPIPE_RETURN_IF_ERROR(file.WriteAt(at, encoded));
  UPIPE_RETURN_IF_ERROR(file.WriteAt(0, header));
  UPIPE_RETURN_IF_ERROR(file.Sync());
  v1::ShardSummary summary;
  summary.set_bytes(at + static_cast<int64_t>(encoded.size()));
  summary.set_index_sha256(header.substr(header.size() - kSumBytes));
  return summary;
}

absl::StatusOr<ShardFile> ShardFile::Open(const Folder& folder, const v1::ShardSummary& summary) {
  const std::string name = ShardName(summary.rank());
  UPIPE_ASSIGN_OR_RETURN(const File file, folder.OpenFile(name));
  UPIPE_ASSIGN_OR_RETURN(const int64_t bytes, file.Size());
  if (bytes != summary.bytes()) {
    return absl::DataLossError(
        absl::StrCat(file.path(), " has ", bytes, " bytes, ", summary.bytes(), " were written"));
  }
  std::string header_bytes(std::min<int64_t>(bytes, sizeof(ShardHeader)), '\0');
  UPIPE_RETURN_IF_ERROR(
      file.ReadAt(0, static_cast<int64_t>(header_bytes.size()), header_bytes.data()));
  UPIPE_ASSIGN_OR_RETURN(const ShardHeader header,
                         ParseShardHeader(header_bytes, bytes, file.path()));
  if (absl::string_view(header.index_sha256, kSumBytes) != summary.index_sha256()) {
    return absl::DataLossError(absl::StrCat(file.path(),
                                            " is not the shard that was written: its "
                                            "header names another index"));
  }
  std::string index_bytes(header.index_bytes, '\0');
  UPIPE_RETURN_IF_ERROR(file.ReadAt(static_cast<int64_t>(header.index_offset),
                                    static_cast<int64_t>(header.index_bytes), index_bytes.data()));
  UPIPE_ASSIGN_OR_RETURN(v1::ShardIndex index, ParseShardIndex(index_bytes, header, file.path()));
  return ShardFile(folder, name, std::move(index));
}

absl::Status ShardFile::ReadBlock(const File& file, const v1::ShardPiece& piece, int64_t index,
                                  std::vector<float>& block) const {
  const BlockPart part = PartOf(piece, index);
  block.resize(part.end - part.begin);
  const auto size = static_cast<int64_t>(sizeof(float));
  UPIPE_RETURN_IF_ERROR(file.ReadAt(piece.file_offset() + (part.begin - piece.offset()) * size,
                                    (part.end - part.begin) * size, block.data()));
  Sha256 sum;
  sum.Update(BytesOf(block.data(), part.end - part.begin));
  if (sum.Digest() == SumOf(piece, index)) return absl::OkStatus();
  return absl::DataLossError(absl::StrCat(
      file.path(), " is damaged: elements ", part.begin, " to ", part.end, " of the ",
      Describe(piece.kind(), piece.tensor()), " do not have the SHA-256 that was written"));
}

absl::Status ShardFile::Read(const v1::ShardPiece& piece, int64_t begin, int64_t end,
                             float* to) const {
  UPIPE_CHECK(begin >= piece.offset() && begin < end && end <= piece.offset() + piece.count())
      << "elements " << begin << " to " << end << " of a piece from " << piece.offset() << " to "
      << piece.offset() + piece.count();
  UPIPE_ASSIGN_OR_RETURN(const File file, folder_->OpenFile(name_));
  std::vector<float> block;
  block.reserve(kBlockElements);
  const int64_t first = piece.offset() / kBlockElements;
  for (int64_t index = begin / kBlockElements - first; index <= (end - 1) / kBlockElements - first;
       ++index) {
    UPIPE_RETURN_IF_ERROR(ReadBlock(file, piece, index, block));
    const BlockPart part = PartOf(piece, index);
    const int64_t from = std::max(begin, part.begin);
    const int64_t until = std::min(end, part.end);
    std::memcpy(to + from - begin, block.data() + from - part.begin,
                static_cast<size_t>(until - from) * sizeof(float));
  }
  return absl::OkStatus();
}

absl::Status ShardFile::Verify() const {
  UPIPE_ASSIGN_OR_RETURN(const File file, folder_->OpenFile(name_));
  std::vector<float> block;
  block.reserve(kBlockElements);
  for (const v1::ShardPiece& piece : index_.pieces()) {
    for (int64_t index = 0; index < NumBlocks(piece); ++index) {
      UPIPE_RETURN_IF_ERROR(ReadBlock(file, piece, index, block));
    }
  }
  return absl::OkStatus();
}

}  // namespace upipe::checkpoint
