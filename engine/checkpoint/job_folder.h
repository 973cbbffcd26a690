// A job's folder below its checkpoint root: whose it is, which whole checkpoints it holds, and what
// may be deleted.
//   OWNER                                 v1.CheckpointOwner: the newest generation
//   g<generation>/s<step>/rank-<r>.shard, rank-<r>.summary, MANIFEST
// A checkpoint is whole when its manifest is in its place, which is renamed there last.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "engine/checkpoint/content.h"
#include "engine/checkpoint/files.h"
#include "upipe/v1/checkpoint.pb.h"
#include "upipe/v1/report.pb.h"

namespace upipe::checkpoint {

inline constexpr char kOwnerName[] = "OWNER";
inline constexpr char kManifestName[] = "MANIFEST";

// A checkpoint whose manifest and shards fit together.
class Checkpoint {
 public:
  // Reads the manifest, and every shard's header and index. NotFound: no manifest. DataLoss or
  // InvalidArgument: not whole.
  static absl::StatusOr<std::unique_ptr<Checkpoint>> Open(Folder folder);

  const v1::CheckpointManifest& manifest() const { return manifest_; }
  const Content& content() const { return *content_; }
  v1::CheckpointRef ref() const;
  const std::string& path() const { return folder_.path(); }
  // Reads every value, and forms the sum of them all once more.
  absl::Status Verify() const;

 private:
  explicit Checkpoint(Folder folder) : folder_(std::move(folder)) {}
  Folder folder_;
  v1::CheckpointManifest manifest_;
  std::string manifest_sha256_;
  std::optional<Content> content_;
};

// What a job would go on from.
struct ResumeChoice {
  std::optional<v1::CheckpointRef> newest;         // absent: from the beginning
  std::vector<v1::CheckpointProblem> passed_over;  // newer ones, the newest first, 16 at most
};

// Thread-safe but for moving.
class JobFolder {
 public:
  // PATH/<job id>, both made when missing.
  static absl::StatusOr<JobFolder> Open(const std::string& root, const std::string& job_id);

  // FailedPrecondition while another process on this machine holds it so. Until this object goes.
  absl::Status Lock() const { return folder_.Lock(); }

  // Above every generation that left something here: where no coordinator counts them.
  absl::StatusOr<int64_t> NextGeneration() const;

  // Rank 0, before anything else: writes OWNER. FailedPrecondition when it is another job's,
  // Aborted when it is a higher generation's.
  absl::Status Claim(const v1::CheckpointOwner& owner) const;
  // Every rank: waits for what rank 0 wrote. FailedPrecondition after `patience`: this machine does
  // not see rank 0's file system.
  absl::Status AwaitOwner(const v1::CheckpointOwner& owner, absl::Duration patience) const;
  // Aborted unless `owner` still is.
  absl::Status CheckOwner(const v1::CheckpointOwner& owner) const;

  // The newest checkpoint, by generation and step, that is whole, undamaged (all of it is read) and
  // of the model and data order that `wanted` describes.
  absl::StatusOr<ResumeChoice> FindNewest(const v1::CheckpointManifest& wanted) const;
  // That very checkpoint. DataLoss when the manifest is another one than `ref` names.
  absl::StatusOr<std::unique_ptr<Checkpoint>> Open(const v1::CheckpointRef& ref) const;

  // The folder of a step, made when missing.
  absl::StatusOr<Folder> StepFolder(int64_t generation, int64_t step) const;
  // Removes a folder of a step if it is empty.
  void RemoveStepFolder(int64_t generation, int64_t step) const;

  // Deletes whole checkpoints older than the newest `keep` up to `newest`, and unfinished ones that
  // nobody finishes: those of lower generations, and of `newest`'s own below its step.
  absl::Status Retain(const v1::CheckpointRef& newest, int keep) const;

  // A step's folder by numbers, whole or not.
  struct Entry {
    int64_t generation = 0;
    int64_t step = 0;
  };
  // The newest first.
  absl::StatusOr<std::vector<Entry>> List() const;
  absl::StatusOr<Folder> OpenStep(const Entry& entry) const;
  const std::string& path() const { return folder_.path(); }

 private:
  explicit JobFolder(Folder folder) : folder_(std::move(folder)) {}
  absl::StatusOr<v1::CheckpointOwner> ReadOwner() const;
  absl::Status Delete(const Entry& entry) const;

  Folder folder_;
};

// OK when what is stored can go on as `wanted` (tensors and state are looked at):
// FailedPrecondition naming the first difference.
absl::Status CheckSameJob(const v1::CheckpointManifest& stored,
                          const v1::CheckpointManifest& wanted);

}  // namespace upipe::checkpoint
