#include "coordinator/runtime/store_thread.h"

#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "common/clock.h"
#include "common/errors/rpc_error.h"
#include "common/failpoint.h"
#include "common/log.h"

namespace upipe::coordinator {
namespace {

// Of one commit: what the ballast has room for whenever it is given back.
constexpr size_t kMaxGroupBatches = 256;
constexpr size_t kMaxGroupBytes = size_t{1} << 20;
constexpr absl::Duration kBallastPeriod = absl::Seconds(1);

size_t BytesOf(const std::vector<Batch>& batches) {
  size_t bytes = 0;
  for (const Batch& batch : batches) {
    for (const Write& write : batch.writes) {
      bytes += write.key.size() + (write.value ? write.value->size() : 0);
    }
  }
  return bytes;
}

absl::Status CopyError(const absl::Status& status) {
  const bool full = absl::IsResourceExhausted(status);
  return RpcError(full ? Reason::kStateDiskFull : Reason::kBackupFailed,
                  absl::StrCat("the copy of the store was not made: ", status.message()));
}

}  // namespace

StoreThread::StoreThread(Store& store, Ballast& ballast, Hooks hooks)
    : store_(store), ballast_(ballast), hooks_(std::move(hooks)) {
  CheckBallast();
  thread_ = std::thread([this] { Run(); });
}

StoreThread::~StoreThread() {
  queue_.Close();
  thread_.join();
}

uint64_t StoreThread::Commit(std::vector<Batch> batches) {
  queue_.PushOverCapacity(Step{++handed_over_, std::move(batches)});
  return handed_over_;
}

void StoreThread::Copy(std::string path, CopyDone done) {
  queue_.PushOverCapacity(CopyRequest{std::move(path), std::move(done)});
}

absl::Status StoreThread::AcceptsSubmits() const {
  std::lock_guard lock(mutex_);
  return accepts_submits_;
}

void StoreThread::CheckBallast() {
  absl::Status status = ballast_.Check();
  const bool accepted = AcceptsSubmits().ok();
  if (accepted && !status.ok()) {
    UPIPE_LOG(WARNING) << "submits are refused: " << status.message();
  } else if (!accepted && status.ok()) {
    UPIPE_LOG(INFO) << "the state disk has room again: submits are accepted";
  }
  std::lock_guard lock(mutex_);
  accepts_submits_ = std::move(status);
}

uint64_t StoreThread::Gather(std::optional<Work> first, std::vector<Batch>& group) {
  uint64_t last = 0;
  size_t bytes = 0;
  for (std::optional<Work> work = std::move(first); work;
       work = queue_.PopFor(absl::ZeroDuration())) {
    if (auto* request = std::get_if<CopyRequest>(&*work)) {
      BeginCopy(std::move(*request));
      continue;
    }
    Step& step = std::get<Step>(*work);
    last = step.number;
    bytes += BytesOf(step.batches);
    group.insert(group.end(), std::make_move_iterator(step.batches.begin()),
                 std::make_move_iterator(step.batches.end()));
    if (group.size() >= kMaxGroupBatches || bytes >= kMaxGroupBytes) break;
  }
  return last;
}

void StoreThread::Run() {
  while (true) {
    std::optional<Work> work = queue_.PopFor(copy_ ? absl::ZeroDuration() : kBallastPeriod);
    if (!work && queue_.closed()) return EndCopy(absl::CancelledError("the store is closed"));
    std::vector<Batch> group;
    const uint64_t last = Gather(std::move(work), group);
    CheckBallast();  // first: a full disk gives this commit the ballast's room
    if (last != 0) {
      const BootTime begin = SystemClock().Now();
      absl::Status status = Failpoint(failpoints::kCoordinatorBeforeCommit);
      if (status.ok()) status = store_.Commit(group).status();
      if (!status.ok()) {
        EndCopy(status);
        return hooks_.failed(status);
      }
      const absl::Duration took = SystemClock().Now() - begin;
      Failpoint(failpoints::kCoordinatorCommitted).IgnoreError();
      committed_ = last;
      hooks_.committed(took);
    }
    ContinueCopy();
  }
}

void StoreThread::BeginCopy(CopyRequest request) {
  if (copy_) {
    return request.done(RpcError(Reason::kCoordinatorBusy,
                                 "another copy of the store is being made; try again later"));
  }
  absl::StatusOr<std::unique_ptr<StoreCopy>> copy = store_.StartCopy(request.path);
  if (!copy.ok()) return request.done(CopyError(copy.status()));
  copy_ = *std::move(copy);
  copy_done_ = std::move(request.done);
}

void StoreThread::ContinueCopy() {
  if (!copy_) return;
  const absl::StatusOr<bool> whole = copy_->Step();
  if (!whole.ok()) return EndCopy(CopyError(whole.status()));
  if (*whole) EndCopy(store_.Revision());
}

void StoreThread::EndCopy(absl::StatusOr<int64_t> revision) {
  if (!copy_) return;
  copy_.reset();
  std::exchange(copy_done_, nullptr)(std::move(revision));
}

}  // namespace upipe::coordinator
