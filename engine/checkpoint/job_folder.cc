#include "engine/checkpoint/job_folder.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "common/clock.h"
#include "common/failpoint.h"
#include "common/status.h"
#include "engine/checkpoint/record.h"

namespace upipe::checkpoint {
namespace {

constexpr int kPassedOverMax = 16;
constexpr absl::Duration kOwnerLook = absl::Milliseconds(20);

std::string GenerationName(int64_t generation) { return absl::StrCat("g", generation); }
std::string StepName(int64_t step) { return absl::StrCat("s", step); }

// The number in "g12" or "s100"; other names are nobody's.
std::optional<int64_t> NumberIn(absl::string_view name, absl::string_view letter) {
  int64_t number = 0;
  if (!absl::ConsumePrefix(&name, letter) || !absl::SimpleAtoi(name, &number) || number < 0 ||
      name != absl::StrCat(number)) {
    return std::nullopt;
  }
  return number;
}

std::string Shape(const v1::TensorExtent& tensor) {
  return absl::StrCat("[", absl::StrJoin(tensor.shape(), ", "), "]");
}

}  // namespace

absl::StatusOr<std::unique_ptr<Checkpoint>> Checkpoint::Open(Folder folder) {
  std::unique_ptr<Checkpoint> checkpoint(new Checkpoint(std::move(folder)));
  const Folder& at = checkpoint->folder_;
  UPIPE_ASSIGN_OR_RETURN(const std::string record, at.ReadFile(kManifestName, kRecordBytesMax));
  UPIPE_ASSIGN_OR_RETURN(checkpoint->manifest_, DecodeManifest(record, at.PathOf(kManifestName)));
  checkpoint->manifest_sha256_ = Sha256OfRecord(record);
  std::vector<ShardFile> shards;
  for (const v1::ShardSummary& summary : checkpoint->manifest_.shards()) {
    absl::StatusOr<ShardFile> shard = ShardFile::Open(at, summary);
    if (absl::IsNotFound(shard.status())) {
      return absl::DataLossError(absl::StrCat("a shard is gone: ", shard.status().message()));
    }
    UPIPE_RETURN_IF_ERROR(shard.status());
    shards.push_back(*std::move(shard));
  }
  UPIPE_ASSIGN_OR_RETURN(checkpoint->content_,
                         Content::Create(checkpoint->manifest_.tensors(), std::move(shards)));
  return checkpoint;
}

v1::CheckpointRef Checkpoint::ref() const {
  v1::CheckpointRef ref;
  ref.set_generation(manifest_.generation());
  ref.set_step(manifest_.state().step());
  ref.set_manifest_sha256(manifest_sha256_);
  ref.set_content_sha256(manifest_.content_sha256());
  for (const v1::ShardSummary& shard : manifest_.shards()) {
    ref.set_bytes(ref.bytes() + shard.bytes());
  }
  return ref;
}

absl::Status Checkpoint::Verify() const {
  UPIPE_RETURN_IF_ERROR(content_->Verify());
  UPIPE_ASSIGN_OR_RETURN(const std::string sum, content_->Sum(manifest_.state()));
  if (sum == manifest_.content_sha256()) return absl::OkStatus();
  return absl::DataLossError(absl::StrCat(path(), " holds content ", sum, ", its manifest says ",
                                          manifest_.content_sha256()));
}

absl::StatusOr<JobFolder> JobFolder::Open(const std::string& root, const std::string& job_id) {
  UPIPE_ASSIGN_OR_RETURN(const Folder folder, Folder::OpenRoot(root, /*make=*/true));
  UPIPE_ASSIGN_OR_RETURN(Folder job, folder.Open(job_id, /*make=*/true));
  return JobFolder(std::move(job));
}

absl::StatusOr<v1::CheckpointOwner> JobFolder::ReadOwner() const {
  UPIPE_ASSIGN_OR_RETURN(const std::string record, folder_.ReadFile(kOwnerName, kRecordBytesMax));
  return DecodeOwner(record, folder_.PathOf(kOwnerName));
}

absl::StatusOr<int64_t> JobFolder::NextGeneration() const {
  UPIPE_ASSIGN_OR_RETURN(const std::vector<Entry> entries, List());
  const absl::StatusOr<v1::CheckpointOwner> owner = ReadOwner();
  if (!owner.ok() && !absl::IsNotFound(owner.status())) return owner.status();
  const int64_t newest = std::max(entries.empty() ? 0 : entries.front().generation,
                                  owner.ok() ? owner->generation() : 0);
  if (newest == std::numeric_limits<int64_t>::max()) {
    return absl::FailedPreconditionError(
        absl::StrCat(path(), " holds generation ", newest,
                     ", and none is above it; remove it or give the job another checkpoint.path"));
  }
  return 1 + newest;
}

absl::Status JobFolder::Claim(const v1::CheckpointOwner& owner) const {
  const absl::StatusOr<v1::CheckpointOwner> before = ReadOwner();
  if (!before.ok() && !absl::IsNotFound(before.status())) return before.status();
  if (before.ok() && before->job_id() != owner.job_id()) {
    return absl::FailedPreconditionError(absl::StrCat(path(), " belongs to job ", before->job_id(),
                                                      ", not to ", owner.job_id(),
                                                      "; give the job another checkpoint.path"));
  }
  if (before.ok() && before->generation() > owner.generation()) {
    return absl::AbortedError(absl::StrCat("generation ", owner.generation(), " of job ",
                                           owner.job_id(), " is over: ", path(), " belongs to ",
                                           before->generation()));
  }
  UPIPE_RETURN_IF_ERROR(folder_.PutFile(kOwnerName, EncodeRecord(owner)));
  return Failpoint(failpoints::kCheckpointClaimed);
}

absl::Status JobFolder::AwaitOwner(const v1::CheckpointOwner& owner,
                                   absl::Duration patience) const {
  const BootTime start = SystemClock().Now();
  while (true) {
    const absl::Status status = CheckOwner(owner);
    if (status.ok()) return status;
    if (SystemClock().Now() - start >= patience) {
      return absl::FailedPreconditionError(absl::StrCat(
          "this machine does not find what rank 0 wrote to ", folder_.PathOf(kOwnerName), " (",
          status.message(),
          "); checkpoint.path must be one file system that every worker reaches by that name"));
    }
    absl::SleepFor(kOwnerLook);
  }
}

absl::Status JobFolder::CheckOwner(const v1::CheckpointOwner& owner) const {
  UPIPE_ASSIGN_OR_RETURN(const v1::CheckpointOwner found, ReadOwner());
  if (found.job_id() == owner.job_id() && found.generation() == owner.generation() &&
      found.nonce() == owner.nonce()) {
    return absl::OkStatus();
  }
  return absl::AbortedError(absl::StrCat(path(), " belongs to generation ", found.generation(),
                                         " of job ", found.job_id(), ", this is generation ",
                                         owner.generation(), " of ", owner.job_id()));
}

absl::StatusOr<std::vector<JobFolder::Entry>> JobFolder::List() const {
  std::vector<Entry> entries;
  UPIPE_ASSIGN_OR_RETURN(const std::vector<std::string> generations, folder_.List());
  for (const std::string& generation_name : generations) {
    const std::optional<int64_t> generation = NumberIn(generation_name, "g");
    if (!generation) continue;
    const absl::StatusOr<Folder> folder = folder_.Open(generation_name, /*make=*/false);
    if (!folder.ok()) continue;
    UPIPE_ASSIGN_OR_RETURN(const std::vector<std::string> steps, folder->List());
    for (const std::string& step_name : steps) {
      if (const auto step = NumberIn(step_name, "s")) entries.push_back({*generation, *step});
    }
  }
  std::sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) {
    return std::pair(a.generation, a.step) > std::pair(b.generation, b.step);
  });
  return entries;
}

absl::StatusOr<Folder> JobFolder::OpenStep(const Entry& entry) const {
  UPIPE_ASSIGN_OR_RETURN(const Folder generation,
                         folder_.Open(GenerationName(entry.generation), /*make=*/false));
  return generation.Open(StepName(entry.step), /*make=*/false);
}

absl::StatusOr<Folder> JobFolder::StepFolder(int64_t generation, int64_t step) const {
  UPIPE_ASSIGN_OR_RETURN(const Folder folder,
                         folder_.Open(GenerationName(generation), /*make=*/true));
  return folder.Open(StepName(step), /*make=*/true);
}

void JobFolder::RemoveStepFolder(int64_t generation, int64_t step) const {
  const absl::StatusOr<Folder> folder = folder_.Open(GenerationName(generation), /*make=*/false);
  if (folder.ok()) folder->RemoveFolder(StepName(step)).IgnoreError();
}

absl::StatusOr<ResumeChoice> JobFolder::FindNewest(const v1::CheckpointManifest& wanted) const {
  UPIPE_ASSIGN_OR_RETURN(const std::vector<Entry> entries, List());
  ResumeChoice choice;
  for (const Entry& entry : entries) {
    const auto look = [&]() -> absl::StatusOr<v1::CheckpointRef> {
      UPIPE_ASSIGN_OR_RETURN(Folder folder, OpenStep(entry));
      UPIPE_ASSIGN_OR_RETURN(const auto checkpoint, Checkpoint::Open(std::move(folder)));
      const v1::CheckpointManifest& stored = checkpoint->manifest();
      if (stored.generation() != entry.generation || stored.state().step() != entry.step) {
        return absl::DataLossError(absl::StrCat(checkpoint->path(), " holds step ",
                                                stored.state().step(), " of generation ",
                                                stored.generation()));
      }
      UPIPE_RETURN_IF_ERROR(CheckSameJob(stored, wanted));
      UPIPE_RETURN_IF_ERROR(checkpoint->Verify());
      return checkpoint->ref();
    };
    const absl::StatusOr<v1::CheckpointRef> found = look();
    if (found.ok()) {
      choice.newest = *found;
      break;
    }
    if (static_cast<int>(choice.passed_over.size()) == kPassedOverMax) continue;
    v1::CheckpointProblem& problem = choice.passed_over.emplace_back();
    problem.set_generation(entry.generation);
    problem.set_step(entry.step);
    problem.set_message(
        absl::IsNotFound(found.status())
            ? absl::StrCat("passed over: it was not finished (", found.status().message(), ")")
            : absl::StrCat("passed over: ", found.status().message()));
  }
  return choice;
}

absl::StatusOr<std::unique_ptr<Checkpoint>> JobFolder::Open(const v1::CheckpointRef& ref) const {
  UPIPE_ASSIGN_OR_RETURN(Folder folder, OpenStep({ref.generation(), ref.step()}));
  UPIPE_ASSIGN_OR_RETURN(auto checkpoint, Checkpoint::Open(std::move(folder)));
  if (checkpoint->ref().manifest_sha256() == ref.manifest_sha256()) return checkpoint;
  return absl::DataLossError(absl::StrCat(checkpoint->path(), " has manifest ",
                                          checkpoint->ref().manifest_sha256(),
                                          ", the job goes on from ", ref.manifest_sha256()));
}

absl::Status JobFolder::Delete(const Entry& entry) const {
  UPIPE_ASSIGN_OR_RETURN(const Folder folder, OpenStep(entry));
  // The manifest first: what is half deleted is no checkpoint.
  UPIPE_RETURN_IF_ERROR(folder.RemoveFile(kManifestName));
  UPIPE_RETURN_IF_ERROR(folder.Sync());
  UPIPE_ASSIGN_OR_RETURN(const std::vector<std::string> names, folder.List());
  for (const std::string& name : names) UPIPE_RETURN_IF_ERROR(folder.RemoveFile(name));
  UPIPE_ASSIGN_OR_RETURN(const Folder generation,
                         folder_.Open(GenerationName(entry.generation), /*make=*/false));
  return generation.RemoveFolder(StepName(entry.step));
}

absl::Status JobFolder::Retain(const v1::CheckpointRef& newest, int keep) const {
  UPIPE_RETURN_IF_ERROR(Failpoint(failpoints::kCheckpointRetain));
  UPIPE_ASSIGN_OR_RETURN(const std::vector<Entry> entries, List());
  int kept = 0;
  for (const Entry& entry : entries) {
    if (std::pair(entry.generation, entry.step) > std::pair(newest.generation(), newest.step())) {
      continue;
    }
    UPIPE_ASSIGN_OR_RETURN(const Folder folder, OpenStep(entry));
    const bool whole = folder.OpenFile(kManifestName).ok();
    if (whole && ++kept <= keep) continue;
    UPIPE_RETURN_IF_ERROR(Delete(entry));
  }
  UPIPE_ASSIGN_OR_RETURN(const std::vector<std::string> generations, folder_.List());
  for (const std::string& name : generations) {
    const std::optional<int64_t> generation = NumberIn(name, "g");
    // One that holds something stays.
    if (generation && *generation < newest.generation()) folder_.RemoveFolder(name).IgnoreError();
  }
  return absl::OkStatus();
}

absl::Status CheckSameJob(const v1::CheckpointManifest& stored,
                          const v1::CheckpointManifest& wanted) {
  const auto differ = [](auto&&... what) {
    return absl::FailedPreconditionError(absl::StrCat("it is of another job: ", what...));
  };
  if (stored.tensors_size() != wanted.tensors_size()) {
    return differ("it has ", stored.tensors_size(), " tensors, the model ", wanted.tensors_size());
  }
  for (int i = 0; i < stored.tensors_size(); ++i) {
    const v1::TensorExtent& a = stored.tensors(i);
    const v1::TensorExtent& b = wanted.tensors(i);
    if (a.name() == b.name() && Shape(a) == Shape(b)) continue;
    return differ("tensor ", i, " is ", a.name(), " ", Shape(a), ", the model's ", b.name(), " ",
                  Shape(b));
  }
  const v1::TrainingState& a = stored.state();
  const v1::TrainingState& b = wanted.state();
  if (a.seed() != b.seed()) return differ("train.seed is ", a.seed(), ", the job's ", b.seed());
  if (a.context() != b.context()) {
    return differ("train.context is ", a.context(), " tokens, the job's ", b.context());
  }
  if (a.sequences_per_step() != b.sequences_per_step()) {
    return differ("a step has ", a.sequences_per_step(), " sequences, the job's ",
                  b.sequences_per_step());
  }
  return absl::OkStatus();
}

}  // namespace upipe::checkpoint
