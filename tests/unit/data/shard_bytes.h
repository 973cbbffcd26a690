// Token shards built by hand from the format's description, independent of shard_writer.cc.
#pragma once

#include <xxhash.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "engine/data/token_shard.h"

namespace upipe::data {

inline void AppendLittleEndian(std::string& bytes, uint64_t value, int num_bytes) {
  for (int i = 0; i < num_bytes; ++i) bytes.push_back(static_cast<char>(value >> (8 * i)));
}

inline void PutLittleEndian(std::string& bytes, size_t offset, uint64_t value, int num_bytes) {
  for (int i = 0; i < num_bytes; ++i) bytes[offset + i] = static_cast<char>(value >> (8 * i));
}

// Makes both checksums right again after a change to the bytes.
inline void SealShard(std::string& bytes) {
  PutLittleEndian(bytes, 40, XXH64(bytes.data() + 64, bytes.size() - 64, 0), 8);
  PutLittleEndian(bytes, 48, XXH64(bytes.data(), 48, 0), 8);
}

inline std::string ShardBytes(const std::vector<uint16_t>& tokens,
                              const std::vector<uint64_t>& starts, uint32_t vocab_size = 257) {
  std::string bytes = "UPTOKENS";
  AppendLittleEndian(bytes, 1, 4);
  AppendLittleEndian(bytes, vocab_size, 4);
  AppendLittleEndian(bytes, 2, 4);
  AppendLittleEndian(bytes, 0, 4);
  AppendLittleEndian(bytes, tokens.size(), 8);
  AppendLittleEndian(bytes, starts.size(), 8);
  bytes.resize(64);
  for (const uint16_t token : tokens) AppendLittleEndian(bytes, token, 2);
  while (bytes.size() % 8 != 0) bytes.push_back(0);
  for (const uint64_t start : starts) AppendLittleEndian(bytes, start, 8);
  SealShard(bytes);
  return bytes;
}

inline absl::StatusOr<TokenShard> ShardFromBytes(const std::string& bytes) {
  auto* words = new uint64_t[bytes.size() / 8 + 1];
  std::memcpy(words, bytes.data(), bytes.size());
  std::shared_ptr<const uint8_t> owner(
      reinterpret_cast<const uint8_t*>(words),
      [](const uint8_t* start) { delete[] reinterpret_cast<const uint64_t*>(start); });
  return TokenShard::FromBytes(std::move(owner), bytes.size(), "made.tokens");
}

// One document per shard.
inline TokenShard MakeShard(const std::vector<uint16_t>& tokens, uint32_t vocab_size = 257) {
  return *ShardFromBytes(ShardBytes(tokens, {0}, vocab_size));
}

}  // namespace upipe::data
