#include "engine/checkpoint/record.h"

#include <set>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "common/sha256.h"
#include "common/status.h"
#include "engine/checkpoint/shard_format.h"

namespace upipe::checkpoint {
namespace {

constexpr size_t kMagicBytes = 8;
constexpr absl::string_view kManifestMagic("UPMANIF\n", kMagicBytes);
constexpr absl::string_view kSummaryMagic("UPSUMMA\n", kMagicBytes);
constexpr absl::string_view kOwnerMagic("UPOWNER\n", kMagicBytes);

std::string Encode(absl::string_view magic, const google::protobuf::MessageLite& message) {
  std::string bytes = absl::StrCat(magic, message.SerializeAsString());
  Sha256 sum;
  sum.Update(bytes);
  return bytes + sum.Digest();
}

template <typename Message>
absl::StatusOr<Message> Decode(absl::string_view magic, absl::string_view bytes,
                               absl::string_view name) {
  if (bytes.size() < kMagicBytes + kSumBytes || bytes.substr(0, kMagicBytes) != magic) {
    return absl::InvalidArgumentError(
        absl::StrCat(name, " (", bytes.size(), " bytes) is no ", magic.substr(2, 5), " record"));
  }
  const absl::string_view summed = bytes.substr(0, bytes.size() - kSumBytes);
  Sha256 sum;
  sum.Update(summed);
  if (sum.Digest() != bytes.substr(summed.size())) {
    return absl::DataLossError(
        absl::StrCat(name, " is damaged: its SHA-256 is not the one at its end"));
  }
  Message message;
  if (!message.ParseFromArray(summed.data() + kMagicBytes,
                              static_cast<int>(summed.size() - kMagicBytes))) {
    return absl::DataLossError(absl::StrCat(name, " cannot be read"));
  }
  return message;
}

absl::Status CheckTensors(const v1::CheckpointManifest& manifest, absl::string_view name) {
  std::set<absl::string_view> names;
  for (const v1::TensorExtent& tensor : manifest.tensors()) {
    int64_t elements = 1;
    bool positive = !tensor.name().empty() && tensor.shape_size() >= 1;
    for (const int64_t dim : tensor.shape()) {
      positive = positive && dim >= 1 && !__builtin_mul_overflow(elements, dim, &elements) &&
                 elements <= int64_t{1} << 56;
    }
    if (positive && names.insert(tensor.name()).second) continue;
    return absl::DataLossError(absl::StrCat(name, " lists a tensor '", tensor.name(),
                                            "' twice or of an impossible shape"));
  }
  return absl::OkStatus();
}

}  // namespace

std::string EncodeRecord(const v1::CheckpointManifest& manifest) {
  return Encode(kManifestMagic, manifest);
}
std::string EncodeRecord(const v1::ShardSummary& summary) { return Encode(kSummaryMagic, summary); }
std::string EncodeRecord(const v1::CheckpointOwner& owner) { return Encode(kOwnerMagic, owner); }

std::string Sha256OfRecord(absl::string_view record) {
  return absl::BytesToHexString(record.substr(record.size() - kSumBytes));
}

absl::StatusOr<v1::CheckpointManifest> DecodeManifest(absl::string_view bytes,
                                                      absl::string_view name) {
  UPIPE_ASSIGN_OR_RETURN(v1::CheckpointManifest manifest,
                         Decode<v1::CheckpointManifest>(kManifestMagic, bytes, name));
  if (manifest.version() != kManifestVersion) {
    return absl::InvalidArgumentError(
        absl::StrCat(name, " is a manifest of version ", manifest.version(),
                     ", this build reads version ", kManifestVersion));
  }
  UPIPE_RETURN_IF_ERROR(CheckTensors(manifest, name));
  if (manifest.state().step() < 1 || manifest.shards_size() < 1) {
    return absl::DataLossError(absl::StrCat(name, " is of step ", manifest.state().step(), " and ",
                                            manifest.shards_size(), " shards"));
  }
  for (int rank = 0; rank < manifest.shards_size(); ++rank) {
    const v1::ShardSummary& shard = manifest.shards(rank);
    if (shard.rank() == rank && shard.index_sha256().size() == kSumBytes) continue;
    return absl::DataLossError(
        absl::StrCat(name, " lists rank ", shard.rank(), " in the place of rank ", rank));
  }
  return manifest;
}

absl::StatusOr<v1::ShardSummary> DecodeSummary(absl::string_view bytes, absl::string_view name) {
  UPIPE_ASSIGN_OR_RETURN(v1::ShardSummary summary,
                         Decode<v1::ShardSummary>(kSummaryMagic, bytes, name));
  if (summary.index_sha256().size() == kSumBytes) return summary;
  return absl::DataLossError(
      absl::StrCat(name, " has a sum of ", summary.index_sha256().size(), " bytes"));
}

absl::StatusOr<v1::CheckpointOwner> DecodeOwner(absl::string_view bytes, absl::string_view name) {
  return Decode<v1::CheckpointOwner>(kOwnerMagic, bytes, name);
}

}  // namespace upipe::checkpoint
