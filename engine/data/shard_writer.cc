#include "engine/data/shard_writer.h"

#include <fcntl.h>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "common/check.h"
#include "common/status.h"
#include "engine/data/byte_tokenizer.h"

namespace upipe::data {
namespace {

constexpr size_t kChunkTokens = 1 << 17;

absl::Status WriteError(const std::string& path) {
  return absl::ErrnoToStatus(errno, absl::StrCat("cannot write token shard ", path));
}

absl::Status WriteAt(int fd, const std::string& path, uint64_t offset, const void* data,
                     size_t num_bytes) {
  const char* next = static_cast<const char*>(data);
  while (num_bytes > 0) {
    const ssize_t written = pwrite(fd, next, num_bytes, static_cast<off_t>(offset));
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return WriteError(path);
    next += written;
    offset += written;
    num_bytes -= written;
  }
  return absl::OkStatus();
}

// Appends to the payload of an open shard and keeps its checksum.
class PayloadStream {
 public:
  PayloadStream(int fd, const std::string& path) : fd_(fd), path_(path) {
    XXH64_reset(sum_.get(), 0);
  }

  absl::Status Append(const void* data, size_t num_bytes) {
    XXH64_update(sum_.get(), data, num_bytes);
    UPIPE_RETURN_IF_ERROR(WriteAt(fd_, path_, offset_, data, num_bytes));
    offset_ += num_bytes;
    return absl::OkStatus();
  }
  uint64_t offset() const { return offset_; }
  uint64_t xxh64() const { return XXH64_digest(sum_.get()); }

 private:
  int fd_;
  const std::string& path_;
  uint64_t offset_ = sizeof(ShardHeader);
  std::unique_ptr<XXH64_state_t, XXH_errorcode (*)(XXH64_state_t*)> sum_{XXH64_createState(),
                                                                         XXH64_freeState};
};

// Appends the tokens of all documents, padded to 8 bytes; returns the index of each one's first
// token.
absl::StatusOr<std::vector<uint64_t>> AppendTokens(absl::Span<const absl::string_view> documents,
                                                   PayloadStream& payload, ShardHeader& header) {
  std::vector<uint64_t> starts;
  std::vector<uint16_t> chunk;
  chunk.reserve(kChunkTokens);
  for (absl::string_view text : documents) {
    starts.push_back(header.num_tokens);
    header.num_tokens += 1 + text.size();
    chunk.push_back(kDocumentMarker);
    while (true) {
      const size_t take = std::min(text.size(), kChunkTokens - chunk.size());
      for (const char byte : text.substr(0, take)) chunk.push_back(static_cast<uint8_t>(byte));
      text.remove_prefix(take);
      if (chunk.size() < kChunkTokens) break;
      UPIPE_RETURN_IF_ERROR(payload.Append(chunk.data(), chunk.size() * sizeof(uint16_t)));
      chunk.clear();
    }
  }
  while ((payload.offset() / sizeof(uint16_t) + chunk.size()) % 4 != 0) chunk.push_back(0);
  UPIPE_RETURN_IF_ERROR(payload.Append(chunk.data(), chunk.size() * sizeof(uint16_t)));
  return starts;
}

absl::StatusOr<ShardHeader> WriteInto(int fd, const std::string& path,
                                      absl::Span<const absl::string_view> documents) {
  ShardHeader header = {.version = kShardVersion,
                        .vocab_size = kByteVocabSize,
                        .token_bytes = sizeof(uint16_t),
                        .num_documents = documents.size()};
  std::memcpy(header.magic, kShardMagic, sizeof(kShardMagic));
  PayloadStream payload(fd, path);
  UPIPE_ASSIGN_OR_RETURN(const std::vector<uint64_t> starts,
                         AppendTokens(documents, payload, header));
  UPIPE_RETURN_IF_ERROR(payload.Append(starts.data(), starts.size() * sizeof(uint64_t)));
  UPIPE_CHECK(payload.offset() == ShardFileBytes(header))
      << payload.offset() << " bytes written, the header needs " << ShardFileBytes(header);
  header.payload_xxh64 = payload.xxh64();
  header.header_xxh64 = XXH64(&header, offsetof(ShardHeader, header_xxh64), 0);
  UPIPE_RETURN_IF_ERROR(WriteAt(fd, path, 0, &header, sizeof(header)));
  return header;
}

}  // namespace

absl::StatusOr<ShardHeader> WriteByteShard(const std::string& path,
                                           absl::Span<const absl::string_view> documents) {
  UPIPE_CHECK(!documents.empty()) << "a shard without documents: " << path;
  const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  if (fd < 0) return WriteError(path);
  absl::Cleanup remove = [&path] { unlink(path.c_str()); };
  absl::StatusOr<ShardHeader> header = WriteInto(fd, path, documents);
  if (close(fd) != 0 && header.ok()) header = WriteError(path);
  if (header.ok()) std::move(remove).Cancel();
  return header;
}

}  // namespace upipe::data
