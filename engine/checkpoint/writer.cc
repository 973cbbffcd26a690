#include "engine/checkpoint/writer.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/check.h"
#include "common/clock.h"
#include "common/failpoint.h"
#include "common/status.h"
#include "common/units.h"
#include "engine/checkpoint/record.h"

namespace upipe::checkpoint {
namespace {

constexpr auto kSummaryLook = std::chrono::milliseconds(10);

}  // namespace

Writer::Writer(WriterOptions options) : options_(std::move(options)), thread_([this] { Loop(); }) {}

Writer::~Writer() {
  Cancel();
  {
    const std::lock_guard lock(mutex_);
    ending_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void Writer::Start(const v1::TrainingState& state, std::vector<MemoryPiece> pieces) {
  const std::lock_guard lock(mutex_);
  UPIPE_CHECK(!busy_) << "a checkpoint of step " << state.step() << " while another is written";
  busy_ = part_open_ = true;
  start_ = SystemClock().Now();
  abandoned_step_ = std::min(abandoned_step_, state.step() - 1);  // a second try of one
  tasks_.push_back(Write{state, std::move(pieces), start_});
  changed_.notify_all();
}

bool Writer::busy() const {
  const std::lock_guard lock(mutex_);
  return busy_;
}

absl::Duration Writer::busy_for() const {
  const std::lock_guard lock(mutex_);
  return busy_ ? SystemClock().Now() - start_ : absl::ZeroDuration();
}

Writer::Standing Writer::Hold() {
  const std::lock_guard lock(mutex_);
  held_ = true;
  return {.busy = busy_, .failed_step = failed_step_, .sealed_step = sealed_step_};
}

void Writer::Release() {
  const std::lock_guard lock(mutex_);
  held_ = false;
  changed_.notify_all();
}

void Writer::Forgive(int64_t step) {
  const std::lock_guard lock(mutex_);
  if (failed_step_ <= step) failed_step_ = 0;
}

absl::Status Writer::last_error() const {
  const std::lock_guard lock(mutex_);
  return last_error_;
}

void Writer::Abandon(int64_t step) {
  const std::lock_guard lock(mutex_);
  abandoned_step_ = std::max(abandoned_step_, step);
  if (failed_step_ <= step) failed_step_ = 0;
  tasks_.push_back(Remove{step});
  removing_ = true;
  changed_.notify_all();
}

void Writer::AwaitPart() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return !part_open_ && !removing_; });
}

void Writer::AwaitIdle() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return !busy_ && !removing_; });
}

void Writer::Cancel() {
  const std::lock_guard lock(mutex_);
  cancelled_ = true;
  changed_.notify_all();
}

void Writer::Retain(const v1::CheckpointRef& newest, int keep) {
  const std::lock_guard lock(mutex_);
  // Orders only move on: one that waits is replaced.
  std::erase_if(tasks_, [](const Task& task) { return std::holds_alternative<Delete>(task); });
  tasks_.push_back(Delete{newest, keep});
  changed_.notify_all();
}

void Writer::Report(int64_t step, std::string message) const {
  if (!options_.on_problem) return;
  v1::CheckpointProblem problem;
  problem.set_generation(options_.owner.generation());
  problem.set_step(step);
  problem.set_message(std::move(message));
  options_.on_problem(problem);
}

void Writer::Loop() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return ending_ || !tasks_.empty(); });
    if (tasks_.empty()) return;
    const Task task = std::move(tasks_.front());
    tasks_.pop_front();
    lock.unlock();
    absl::Status removed;
    if (const auto* write = std::get_if<Write>(&task)) {
      Do(*write);
    } else if (const auto* remove = std::get_if<Remove>(&task)) {
      removed = RemovePart(remove->step);
    } else {
      Do(std::get<Delete>(task));
    }
    lock.lock();
    if (const auto* remove = std::get_if<Remove>(&task)) {
      if (!removed.ok()) {
        failed_step_ = remove->step;
        last_error_ = removed;
      }
      removing_ = std::any_of(tasks_.begin(), tasks_.end(), [](const Task& other) {
        return std::holds_alternative<Remove>(other);
      });
    } else if (std::holds_alternative<Write>(task)) {
      busy_ = part_open_ = false;
    }
    changed_.notify_all();
  }
}

absl::Status Writer::GoOn(int64_t step) const {
  const std::lock_guard lock(mutex_);
  return GoOnLocked(step);
}

absl::Status Writer::GoOnLocked(int64_t step) const {
  if (cancelled_) return absl::CancelledError("the rank ends");
  if (abandoned_step_ >= step) return absl::CancelledError("another rank could not write its part");
  return absl::OkStatus();
}

absl::Status Writer::Seal(int64_t step) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return !held_ || cancelled_; });
  UPIPE_RETURN_IF_ERROR(GoOnLocked(step));
  sealed_step_ = step;
  return absl::OkStatus();
}

void Writer::Do(const Write& write) {
  const int64_t step = write.state.step();
  absl::Status status = WritePart(write);
  if (status.ok() && options_.rank == 0) {
    {
      const std::lock_guard lock(mutex_);
      part_open_ = false;
      changed_.notify_all();
    }
    status = Commit(write);
  }
  bool report = false;
  {
    const std::lock_guard lock(mutex_);
    part_open_ = false;  // together with the failure: who awaited the part sees both
    if (!status.ok()) {
      last_error_ = status;
      if (sealed_step_ == step) sealed_step_ = 0;
      // Given up already: then another rank has said why.
      report = !cancelled_ && abandoned_step_ < step;
      if (report) failed_step_ = step;
    }
  }
  if (report) {
    Report(step, absl::StrCat("rank ", options_.rank, " made no checkpoint of step ", step, ": ",
                              status.message()));
  }
}

void Writer::Do(const Delete& order) {
  const auto retain = [&]() -> absl::Status {
    if (options_.may_commit) UPIPE_RETURN_IF_ERROR(options_.may_commit());
    UPIPE_RETURN_IF_ERROR(options_.folder.CheckOwner(options_.owner));
    return options_.folder.Retain(order.newest, order.keep);
  };
  if (const absl::Status status = retain(); !status.ok()) {
    Report(order.newest.step(),
           absl::StrCat("older checkpoints were not all deleted: ", status.message()));
  }
}

absl::Status Writer::WritePart(const Write& write) {
  const int64_t step = write.state.step();
  const auto go_on = [&] { return GoOn(step); };
  UPIPE_RETURN_IF_ERROR(go_on());
  UPIPE_ASSIGN_OR_RETURN(const Folder folder,
                         options_.folder.StepFolder(options_.owner.generation(), step));
  // What an earlier try left must not stand for this one.
  UPIPE_RETURN_IF_ERROR(folder.RemoveFile(SummaryName(options_.rank)));
  UPIPE_ASSIGN_OR_RETURN(v1::ShardSummary summary,
                         WriteShard(folder, ShardName(options_.rank), write.pieces, go_on));
  UPIPE_RETURN_IF_ERROR(Failpoint(failpoints::kCheckpointShardSynced));
  summary.set_rank(options_.rank);
  summary.set_arithmetic(options_.arithmetic);
  *summary.mutable_state() = write.state;
  UPIPE_RETURN_IF_ERROR(
      folder.PutFile(SummaryName(options_.rank), EncodeRecord(summary), options_.may_commit));
  return Failpoint(failpoints::kCheckpointSummaryInPlace);
}

absl::StatusOr<std::vector<v1::ShardSummary>> Writer::AwaitSummaries(const Folder& folder,
                                                                     const Write& write) {
  const BootTime start = SystemClock().Now();
  std::vector<v1::ShardSummary> summaries;
  while (static_cast<int>(summaries.size()) < options_.num_ranks) {
    const std::string name = SummaryName(static_cast<int>(summaries.size()));
    const absl::StatusOr<std::string> record = folder.ReadFile(name, kRecordBytesMax);
    if (record.ok()) {
      UPIPE_ASSIGN_OR_RETURN(v1::ShardSummary summary, DecodeSummary(*record, folder.PathOf(name)));
      if (summary.state().SerializeAsString() != write.state.SerializeAsString() ||
          summary.rank() != static_cast<int>(summaries.size())) {
        return absl::InternalError(absl::StrCat(
            folder.PathOf(name), " is of another state: ", summary.ShortDebugString()));
      }
      summaries.push_back(std::move(summary));
      continue;
    }
    if (!absl::IsNotFound(record.status())) return record.status();
    UPIPE_RETURN_IF_ERROR(GoOn(write.state.step()));
    if (SystemClock().Now() - start > options_.patience) {
      return absl::DeadlineExceededError(absl::StrCat(folder.PathOf(name), " did not come within ",
                                                      FormatTimeSpan(options_.patience)));
    }
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, kSummaryLook);
  }
  return summaries;
}

absl::Status Writer::Commit(const Write& write) {
  const int64_t step = write.state.step();
  UPIPE_ASSIGN_OR_RETURN(const Folder folder,
                         options_.folder.StepFolder(options_.owner.generation(), step));
  UPIPE_ASSIGN_OR_RETURN(const std::vector<v1::ShardSummary> summaries,
                         AwaitSummaries(folder, write));
  v1::CheckpointManifest manifest = options_.facts;
  manifest.set_version(kManifestVersion);
  manifest.set_job_id(options_.owner.job_id());
  manifest.set_generation(options_.owner.generation());
  *manifest.mutable_state() = write.state;
  manifest.set_written_unix_millis(SystemClock().UnixMillis());
  v1::CheckpointRef ref;
  std::vector<ShardFile> shards;
  for (const v1::ShardSummary& summary : summaries) {
    *manifest.add_shards() = summary;
    ref.set_bytes(ref.bytes() + summary.bytes());
    UPIPE_ASSIGN_OR_RETURN(ShardFile shard, ShardFile::Open(folder, summary));
    shards.push_back(std::move(shard));
  }
  UPIPE_ASSIGN_OR_RETURN(const Content content,
                         Content::Create(manifest.tensors(), std::move(shards)));
  UPIPE_ASSIGN_OR_RETURN(const std::string sum, content.Sum(write.state));
  manifest.set_content_sha256(sum);
  const std::string record = EncodeRecord(manifest);
  UPIPE_RETURN_IF_ERROR(folder.PutFile(kManifestName, record, [&]() -> absl::Status {
    UPIPE_RETURN_IF_ERROR(Failpoint(failpoints::kCheckpointBeforeManifest));
    UPIPE_RETURN_IF_ERROR(options_.folder.CheckOwner(options_.owner));
    UPIPE_RETURN_IF_ERROR(Seal(step));
    return options_.may_commit ? options_.may_commit() : absl::OkStatus();
  }));
  UPIPE_RETURN_IF_ERROR(Failpoint(failpoints::kCheckpointManifestInPlace));
  ref.set_generation(options_.owner.generation());
  ref.set_step(step);
  ref.set_manifest_sha256(Sha256OfRecord(record));
  ref.set_content_sha256(sum);
  ref.set_write_seconds(absl::ToDoubleSeconds(SystemClock().Now() - write.start));
  if (options_.on_committed) options_.on_committed(ref);
  return absl::OkStatus();
}

absl::Status Writer::RemovePart(int64_t step) const {
  const absl::StatusOr<Folder> folder =
      options_.folder.OpenStep({options_.owner.generation(), step});
  if (absl::IsNotFound(folder.status())) return absl::OkStatus();
  UPIPE_RETURN_IF_ERROR(folder.status());
  if (options_.rank == 0) UPIPE_RETURN_IF_ERROR(folder->RemoveFile(kManifestName));
  UPIPE_RETURN_IF_ERROR(folder->RemoveFile(SummaryName(options_.rank)));
  UPIPE_RETURN_IF_ERROR(folder->RemoveFile(ShardName(options_.rank)));
  // The last rank to leave succeeds.
  options_.folder.RemoveStepFolder(options_.owner.generation(), step);
  return absl::OkStatus();
}

}  // namespace upipe::checkpoint
