// Small protobuf messages as files that prove themselves: 8 bytes of magic, the message, and the
// SHA-256 of both. Manifests, summaries and owners are such files. Pure.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "upipe/v1/checkpoint.pb.h"

namespace upipe::checkpoint {

inline constexpr int kManifestVersion = 1;
inline constexpr int64_t kRecordBytesMax = int64_t{1} << 28;

std::string EncodeRecord(const v1::CheckpointManifest& manifest);
std::string EncodeRecord(const v1::ShardSummary& summary);
std::string EncodeRecord(const v1::CheckpointOwner& owner);
// Hex, of the sum that ends the bytes of a record.
std::string Sha256OfRecord(absl::string_view record);

// `name` is used in messages. InvalidArgument: no such record, or of a version this build does not
// read. DataLoss: damaged, or holding what cannot be.
absl::StatusOr<v1::CheckpointManifest> DecodeManifest(absl::string_view bytes,
                                                      absl::string_view name);
absl::StatusOr<v1::ShardSummary> DecodeSummary(absl::string_view bytes, absl::string_view name);
absl::StatusOr<v1::CheckpointOwner> DecodeOwner(absl::string_view bytes, absl::string_view name);

}  // namespace upipe::checkpoint
