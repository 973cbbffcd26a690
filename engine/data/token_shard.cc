#include "engine/data/token_shard.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include <bit>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_format.h"
#include "common/check.h"
#include "common/status.h"

namespace upipe::data {
namespace {

static_assert(std::endian::native == std::endian::little, "shards are mapped as they lie on disk");

constexpr uint32_t kTokenBytes = sizeof(uint16_t);
constexpr uint32_t kMaxVocab = 1u << 16;
// Keeps every product and sum below within 64 bits.
constexpr uint64_t kMaxTokens = uint64_t{1} << 56;

uint64_t TokenSectionBytes(uint64_t num_tokens) { return (num_tokens * kTokenBytes + 7) / 8 * 8; }

absl::Status CheckKind(const ShardHeader& header, absl::string_view name) {
  if (std::memcmp(header.magic, kShardMagic, sizeof(kShardMagic)) != 0) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "%s is not a token shard: its first 8 bytes are not \"UPTOKENS\"; `upipe-data pack` makes "
        "shards from text",
        name));
  }
  if (header.version != kShardVersion) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%s is a token shard of version %u, this build reads version %u; pack the "
                        "text again",
                        name, header.version, kShardVersion));
  }
  return absl::OkStatus();
}

absl::Status CheckCounts(const ShardHeader& header, absl::string_view name) {
  if (header.vocab_size < 1 || header.vocab_size > kMaxVocab) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "%s has a vocabulary of %u tokens, outside 1 .. %u", name, header.vocab_size, kMaxVocab));
  }
  if (header.token_bytes != kTokenBytes) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%s stores tokens of %u bytes, this build reads %u", name,
                        header.token_bytes, kTokenBytes));
  }
  if (header.reserved != 0 || header.reserved2 != 0) {
    return absl::DataLossError(
        absl::StrFormat("%s has reserved header fields %u and %u, expected 0", name,
                        header.reserved, header.reserved2));
  }
  if (header.num_tokens < 1 || header.num_tokens > kMaxTokens) {
    return absl::DataLossError(absl::StrFormat("%s claims %u tokens, outside 1 .. %u", name,
                                               header.num_tokens, kMaxTokens));
  }
  if (header.num_documents < 1 || header.num_documents > header.num_tokens) {
    return absl::DataLossError(absl::StrFormat("%s claims %u documents in %u tokens", name,
                                               header.num_documents, header.num_tokens));
  }
  return absl::OkStatus();
}

absl::Status FileError(const std::string& path, const char* what) {
  return absl::ErrnoToStatus(errno, absl::StrFormat("cannot %s token shard %s", what, path));
}

}  // namespace

uint64_t ShardFileBytes(const ShardHeader& header) {
  return sizeof(ShardHeader) + TokenSectionBytes(header.num_tokens) +
         header.num_documents * sizeof(uint64_t);
}

absl::StatusOr<ShardHeader> ParseShardHeader(absl::Span<const uint8_t> prefix, uint64_t file_bytes,
                                             absl::string_view name) {
  if (prefix.size() < sizeof(ShardHeader)) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%s is not a token shard: it has %u bytes, the header alone is %u", name,
                        prefix.size(), sizeof(ShardHeader)));
  }
  ShardHeader header;
  std::memcpy(&header, prefix.data(), sizeof(header));
  UPIPE_RETURN_IF_ERROR(CheckKind(header, name));
  const uint64_t sum = XXH64(prefix.data(), offsetof(ShardHeader, header_xxh64), 0);
  if (sum != header.header_xxh64) {
    return absl::DataLossError(
        absl::StrFormat("%s has a damaged header: its xxHash64 is %016x, it says %016x", name, sum,
                        header.header_xxh64));
  }
  UPIPE_RETURN_IF_ERROR(CheckCounts(header, name));
  if (const uint64_t expected = ShardFileBytes(header); file_bytes != expected) {
    return absl::DataLossError(
        absl::StrFormat("%s has %u bytes, its header (%u tokens, %u documents) needs %u", name,
                        file_bytes, header.num_tokens, header.num_documents, expected));
  }
  return header;
}

absl::StatusOr<TokenShard> TokenShard::Open(const std::string& path) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) return FileError(path, "open");
  struct stat info;
  if (fstat(fd, &info) != 0) {
    absl::Status error = FileError(path, "examine");
    close(fd);
    return error;
  }
  const auto size = static_cast<size_t>(info.st_size);
  if (!S_ISREG(info.st_mode) || size < sizeof(ShardHeader)) {
    close(fd);
    return absl::InvalidArgumentError(absl::StrFormat(
        "%s is not a token shard: it is %s of %u bytes, the header alone is %u", path,
        S_ISREG(info.st_mode) ? "a file" : "no regular file", size, sizeof(ShardHeader)));
  }
  void* mapping = mmap(nullptr, size, PROT_READ, MAP_SHARED, fd, 0);
  absl::Status map_error = mapping == MAP_FAILED ? FileError(path, "map") : absl::OkStatus();
  close(fd);
  UPIPE_RETURN_IF_ERROR(map_error);
  std::shared_ptr<const uint8_t> bytes(
      static_cast<const uint8_t*>(mapping),
      [size](const uint8_t* start) { munmap(const_cast<uint8_t*>(start), size); });
  return FromBytes(std::move(bytes), size, path);
}

absl::StatusOr<TokenShard> TokenShard::FromBytes(std::shared_ptr<const uint8_t> bytes,
                                                 size_t num_bytes, std::string path) {
  UPIPE_CHECK(reinterpret_cast<uintptr_t>(bytes.get()) % alignof(uint64_t) == 0)
      << path << ": shard bytes must be aligned to 8";
  TokenShard shard;
  UPIPE_ASSIGN_OR_RETURN(
      shard.header_,
      ParseShardHeader(absl::MakeConstSpan(bytes.get(), num_bytes), num_bytes, path));
  shard.bytes_ = std::move(bytes);
  shard.path_ = std::move(path);
  return shard;
}

absl::Span<const uint16_t> TokenShard::tokens() const {
  const auto* first = reinterpret_cast<const uint16_t*>(bytes_.get() + sizeof(ShardHeader));
  return absl::MakeConstSpan(first, header_.num_tokens);
}

absl::Span<const uint64_t> TokenShard::document_starts() const {
  const auto* first = reinterpret_cast<const uint64_t*>(bytes_.get() + sizeof(ShardHeader) +
                                                        TokenSectionBytes(header_.num_tokens));
  return absl::MakeConstSpan(first, header_.num_documents);
}

absl::Status TokenShard::Verify() const {
  const uint64_t sum =
      XXH64(bytes_.get() + sizeof(ShardHeader), ShardFileBytes(header_) - sizeof(ShardHeader), 0);
  if (sum != header_.payload_xxh64) {
    return absl::DataLossError(
        absl::StrFormat("%s is damaged: the xxHash64 of its payload is %016x, its header says "
                        "%016x; pack the text again",
                        path_, sum, header_.payload_xxh64));
  }
  const absl::Span<const uint16_t> all = tokens();
  for (size_t i = 0; i < all.size(); ++i) {
    if (all[i] < header_.vocab_size) continue;
    return absl::DataLossError(absl::StrFormat("%s: token %u is %u, the vocabulary has %u", path_,
                                               i, all[i], header_.vocab_size));
  }
  const absl::Span<const uint64_t> starts = document_starts();
  for (size_t i = 0; i < starts.size(); ++i) {
    const bool in_order = i == 0 ? starts[i] == 0 : starts[i] > starts[i - 1];
    if (in_order && starts[i] < header_.num_tokens) continue;
    return absl::DataLossError(
        absl::StrFormat("%s: document %u starts at token %u, out of order or past its %u tokens",
                        path_, i, starts[i], header_.num_tokens));
  }
  return absl::OkStatus();
}

}  // namespace upipe::data
