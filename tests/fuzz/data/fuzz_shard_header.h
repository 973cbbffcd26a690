// The fuzz target of the token shard's reader, in libFuzzer's shape.
#pragma once

#include <cstddef>
#include <cstdint>

namespace upipe::data {

// How far into the reader the bytes came.
enum class ShardVerdict { kRefused, kOpened, kVerified };

// Hands the bytes to everything that reads a shard, placed so that reading one byte past their end
// is a fault. Aborts when something accepted turns out to be wrong; otherwise says how far it came.
ShardVerdict FuzzShardHeader(const uint8_t* data, size_t size);

}  // namespace upipe::data
