// A checkpoint somebody else wrote: a manifest and one shard of any bytes are read or refused, and
// what is accepted can be read to its last value. The input is the manifest's message, the shard's
// index and the values between them; a first byte says which sums are put right before they are
// read, for without them nothing comes past the first.
#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "common/check.h"
#include "common/sha256.h"
#include "engine/checkpoint/job_folder.h"
#include "engine/checkpoint/record.h"
#include "engine/checkpoint/shard_format.h"
#include "tests/support/fuzz/events.h"
#include "tests/support/fuzz/scratch_folder.h"

namespace upipe::checkpoint {
namespace {

// What the first byte says.
constexpr uint8_t kSealed = 1;   // the manifest's record has its own sum
constexpr uint8_t kNamed = 2;    // the manifest names the shard as it is
constexpr uint8_t kIndexed = 4;  // the shard's header names the index as it is
constexpr uint8_t kSummed = 8;   // the index holds the sums of its blocks

absl::string_view Cut(absl::string_view& rest) {
  const absl::string_view part = rest.substr(0, rest.find(fuzz::kEventMark));
  rest.remove_prefix(std::min(rest.size(), part.size() + fuzz::kEventMark.size()));
  return part;
}

// Of the pieces that lie in `file`, the sums of what lies there.
std::string WithSums(absl::string_view bytes, absl::string_view file) {
  v1::ShardIndex index;
  if (!index.ParseFromArray(bytes.data(), static_cast<int>(bytes.size())))
    return std::string(bytes);
  const auto size = static_cast<int64_t>(file.size());
  for (v1::ShardPiece& piece : *index.mutable_pieces()) {
    const int64_t at = piece.file_offset();
    if (piece.offset() < 0 || piece.offset() > size || piece.count() < 1 || piece.count() > size ||
        at < 0 || at > size || piece.count() * 4 > size - at) {
      continue;
    }
    piece.clear_block_sums();
    for (int64_t block = 0; block < NumBlocks(piece); ++block) {
      const BlockPart part = PartOf(piece, block);
      Sha256 sum;
      sum.Update(file.substr(at + (part.begin - piece.offset()) * 4, (part.end - part.begin) * 4));
      piece.mutable_block_sums()->append(sum.Digest());
    }
  }
  return index.SerializeAsString();
}

void Write(const Folder& folder, const std::string& name, absl::string_view bytes) {
  absl::StatusOr<File> file = folder.Create(name);
  UPIPE_CHECK_OK(file.status());
  UPIPE_CHECK_OK(file->WriteAt(0, bytes));
}

// Everything it holds, also beyond the first damage.
void ReadAll(const Checkpoint& checkpoint) {
  const bool whole = checkpoint.content().Verify().ok();
  checkpoint.Verify().IgnoreError();
  CheckSameJob(checkpoint.manifest(), checkpoint.manifest()).IgnoreError();
  std::vector<float> values;
  for (const v1::TensorExtent& tensor : checkpoint.manifest().tensors()) {
    const int64_t elements = NumElements(tensor);
    UPIPE_CHECK(elements >= 1 && elements <= (1 << 20))
        << elements << " elements of one small file";
    values.resize(elements);
    for (const v1::ValueKind kind : {v1::VALUE_KIND_WEIGHT, v1::VALUE_KIND_SECOND_MOMENT}) {
      const absl::Status read =
          checkpoint.content().Read(tensor.name(), kind, 0, elements, values.data());
      UPIPE_CHECK(read.ok() || !whole) << read;
    }
  }
}

void Fuzz(absl::string_view input) {
  static const fuzz::ScratchFolder root;
  static const absl::StatusOr<JobFolder> job = JobFolder::Open(root.path(), "job");
  UPIPE_CHECK_OK(job.status());
  if (input.empty()) return;
  const auto flags = static_cast<uint8_t>(input[0]);
  input.remove_prefix(1);
  const std::string message(Cut(input));
  std::string index(Cut(input));
  std::string shard(sizeof(ShardHeader), '\0');
  shard.append(input.data(), input.size());
  if ((flags & kSummed) != 0) index = WithSums(index, shard);
  const std::string header = EncodeShardHeader(index, static_cast<int64_t>(shard.size()));
  if ((flags & kIndexed) != 0) {
    shard.replace(0, header.size(), header);
    shard.append(index);
  } else {
    shard.erase(0, sizeof(ShardHeader));
  }
  v1::CheckpointManifest manifest;
  std::string record = message;
  if ((flags & kSealed) != 0 && manifest.ParseFromString(message)) {
    if ((flags & kNamed) != 0 && manifest.shards_size() > 0) {
      manifest.mutable_shards(0)->set_bytes(static_cast<int64_t>(shard.size()));
      manifest.mutable_shards(0)->set_index_sha256(header.substr(header.size() - kSumBytes));
    }
    record = EncodeRecord(manifest);
  }
  DecodeSummary(record, "summary").IgnoreError();
  DecodeOwner(record, "owner").IgnoreError();
  absl::StatusOr<Folder> folder = job->StepFolder(1, 1);
  UPIPE_CHECK_OK(folder.status());
  Write(*folder, kManifestName, record);
  Write(*folder, ShardName(0), shard);
  const absl::StatusOr<std::unique_ptr<Checkpoint>> checkpoint =
      Checkpoint::Open(*std::move(folder));
  if (checkpoint.ok()) ReadAll(**checkpoint);
  job->FindNewest(manifest).IgnoreError();
}

}  // namespace
}  // namespace upipe::checkpoint

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  upipe::checkpoint::Fuzz({reinterpret_cast<const char*>(data), size});
  return 0;
}
