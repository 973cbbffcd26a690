// Writes token shards (format: token_shard.h) from text with the byte tokenizer.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "engine/data/token_shard.h"

namespace upipe::data {

// Creates `path`, which must not exist, with a document marker and the bytes of each document in
// order. At least one document; documents may be empty. Streams: takes constant memory. On error
// the file is removed again and the message names the path: AlreadyExists, or what the file system
// said.
absl::StatusOr<ShardHeader> WriteByteShard(const std::string& path,
                                           absl::Span<const absl::string_view> documents);

}  // namespace upipe::data
