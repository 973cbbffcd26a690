#include "coordinator/runtime/store_thread.h"

#include <iterator>

#include "absl/time/time.h"

namespace upipe::coordinator {
namespace {

constexpr size_t kMaxGroupBatches = 256;
constexpr absl::Duration kBallastPeriod = absl::Seconds(1);

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
  queue_.Push(Step{++handed_over_, std::move(batches)});
  return handed_over_;
}

absl::Status StoreThread::AcceptsSubmits() const {
  std::lock_guard lock(mutex_);
  return accepts_submits_;
}

void StoreThread::CheckBallast() {
  absl::Status status = ballast_.Check();
  std::lock_guard lock(mutex_);
  accepts_submits_ = std::move(status);
}

void StoreThread::Run() {
  while (true) {
    std::optional<Step> step = queue_.PopFor(kBallastPeriod);
    if (!step && queue_.closed()) return;
    std::vector<Batch> group;
    uint64_t last = 0;
    while (step) {
      last = step->number;
      group.insert(group.end(), std::make_move_iterator(step->batches.begin()),
                   std::make_move_iterator(step->batches.end()));
      if (group.size() >= kMaxGroupBatches) break;
      step = queue_.PopFor(absl::ZeroDuration());
    }
    CheckBallast();  // first: a full disk gives this commit the ballast's room
    if (last == 0) continue;
    const absl::StatusOr<int64_t> revision = store_.Commit(group);
    if (!revision.ok()) return hooks_.failed(revision.status());
    committed_ = last;
    hooks_.committed();
  }
}

}  // namespace upipe::coordinator
