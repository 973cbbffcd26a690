// Hands the bytes to the parsers of manifests, summaries, owners, shard headers and indices, as
// they are and with their sums made right, for without those nothing comes past the first. What is
// accepted must hold what it promises.

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>

#include "common/check.h"
#include "common/sha256.h"
#include "engine/checkpoint/content.h"
#include "engine/checkpoint/record.h"
#include "engine/checkpoint/shard_format.h"

namespace upipe::checkpoint {
namespace {

std::string Resummed(absl::string_view bytes) {
  if (bytes.size() < kSumBytes) return std::string(bytes);
  const absl::string_view summed = bytes.substr(0, bytes.size() - kSumBytes);
  Sha256 sum;
  sum.Update(summed);
  return std::string(summed) + sum.Digest();
}

void ReadRecords(absl::string_view bytes) {
  DecodeOwner(bytes, "fuzzed").IgnoreError();
  DecodeSummary(bytes, "fuzzed").IgnoreError();
  const auto manifest = DecodeManifest(bytes, "fuzzed");
  if (!manifest.ok()) return;
  for (const v1::TensorExtent& tensor : manifest->tensors()) {
    UPIPE_CHECK(NumElements(tensor) >= 1) << tensor.ShortDebugString();
  }
  for (int rank = 0; rank < manifest->shards_size(); ++rank) {
    UPIPE_CHECK(manifest->shards(rank).rank() == rank);
  }
}

// The bytes as a whole shard file, whose index has the sum it should when `resum`.
void ReadShard(absl::string_view bytes, bool resum) {
  const auto size = static_cast<int64_t>(bytes.size());
  auto header = ParseShardHeader(bytes.substr(0, sizeof(ShardHeader)), size, "fuzzed");
  if (!header.ok()) return;
  const absl::string_view index_bytes = bytes.substr(header->index_offset);
  UPIPE_CHECK(index_bytes.size() == header->index_bytes);
  if (resum) {
    Sha256 sum;
    sum.Update(index_bytes);
    std::memcpy(header->index_sha256, sum.Digest().data(), kSumBytes);
  }
  const auto index = ParseShardIndex(index_bytes, *header, "fuzzed");
  if (!index.ok()) return;
  for (const v1::ShardPiece& piece : index->pieces()) {
    UPIPE_CHECK(piece.file_offset() >= 64 && piece.count() >= 1 &&
                piece.file_offset() + 4 * piece.count() <=
                    static_cast<int64_t>(header->index_offset));
    UPIPE_CHECK(PartOf(piece, 0).begin == piece.offset());
    UPIPE_CHECK(PartOf(piece, NumBlocks(piece) - 1).end == piece.offset() + piece.count());
  }
}

void Fuzz(const uint8_t* data, size_t size) {
  // A heap block of exactly the size: one byte past its end is for a sanitizer to find.
  const auto copy = std::make_unique<char[]>(size);
  if (size > 0) std::memcpy(copy.get(), data, size);
  const absl::string_view bytes(copy.get(), size);
  ReadRecords(bytes);
  ReadRecords(Resummed(bytes));
  ReadShard(bytes, /*resum=*/false);
  ReadShard(bytes, /*resum=*/true);
}

}  // namespace
}  // namespace upipe::checkpoint

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  upipe::checkpoint::Fuzz(data, size);
  return 0;
}
