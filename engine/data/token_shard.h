// A token shard: one file of tokens with the starts of its documents, memory-mapped and read-only.
// Owns the on-disk format (written by shard_writer.h) and every check of its untrusted bytes.
//
// Format version 1, little-endian, in this order and with nothing after it:
//   header     64 bytes, see ShardHeader
//   tokens     num_tokens x uint16, then zero bytes up to a multiple of 8
//   documents  num_documents x uint64: index of each document's first token, ascending from 0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace upipe::data {

// The files of a packed folder (pack.h).
inline constexpr char kTrainShardName[] = "train.tokens";
inline constexpr char kHeldOutShardName[] = "held_out.tokens";
inline constexpr char kManifestName[] = "manifest.json";

inline constexpr char kShardMagic[8] = {'U', 'P', 'T', 'O', 'K', 'E', 'N', 'S'};
inline constexpr uint32_t kShardVersion = 1;

// The first 64 bytes of a shard, exactly as they lie on disk.
struct ShardHeader {
  char magic[8];           // kShardMagic
  uint32_t version;        // kShardVersion
  uint32_t vocab_size;     // every token is below it; 1 .. 65,536
  uint32_t token_bytes;    // 2
  uint32_t reserved;       // 0
  uint64_t num_tokens;     // document markers included; at least 1
  uint64_t num_documents;  // 1 .. num_tokens
  uint64_t payload_xxh64;  // xxHash64, seed 0, of every byte after the header
  uint64_t header_xxh64;   // xxHash64, seed 0, of the header bytes before this field
  uint64_t reserved2;      // 0
};
static_assert(sizeof(ShardHeader) == 64);

// Bytes of the whole file that `header` describes. `header` must have passed ParseShardHeader,
// which excludes overflow, or hold counts of tokens that exist in memory.
uint64_t ShardFileBytes(const ShardHeader& header);

// Checks the first bytes of a file that is `file_bytes` long; pure. `name` is used in messages
// only. InvalidArgument: not a shard, or a version, vocabulary or token width this build does not
// read. DataLoss: a shard whose header is damaged or whose size differs from what its header says.
absl::StatusOr<ShardHeader> ParseShardHeader(absl::Span<const uint8_t> prefix, uint64_t file_bytes,
                                             absl::string_view name);

// A shard open for reading. Copies share one mapping, which lives as long as the last copy.
// Immutable, so every method may be called from any thread. The file must not be shortened while it
// is mapped (`upipe-data pack` never writes into an existing shard).
class TokenShard {
 public:
  // Maps `path` and checks header and size, not the payload: constant time for any size.
  // NotFound and PermissionDenied from the file system; the errors of ParseShardHeader.
  static absl::StatusOr<TokenShard> Open(const std::string& path);

  // The same over `num_bytes` bytes already in memory, aligned to 8. `path` is used in messages
  // only.
  static absl::StatusOr<TokenShard> FromBytes(std::shared_ptr<const uint8_t> bytes,
                                              size_t num_bytes, std::string path);

  // Reads the whole file: checksum, tokens below the vocabulary, document starts ascending from 0.
  // DataLoss naming the first number that is wrong.
  absl::Status Verify() const;

  const std::string& path() const { return path_; }
  uint32_t vocab_size() const { return header_.vocab_size; }
  int64_t num_tokens() const { return static_cast<int64_t>(header_.num_tokens); }
  int64_t num_documents() const { return static_cast<int64_t>(header_.num_documents); }
  uint64_t payload_xxh64() const { return header_.payload_xxh64; }

  // [num_tokens]. Values are as on disk: unless Verify() has passed, one may be >= vocab_size().
  absl::Span<const uint16_t> tokens() const;
  // [num_documents]. As on disk: unless Verify() has passed, one may lie outside the tokens.
  absl::Span<const uint64_t> document_starts() const;

 private:
  TokenShard() = default;

  std::shared_ptr<const uint8_t> bytes_;
  ShardHeader header_ = {};
  std::string path_;
};

}  // namespace upipe::data
