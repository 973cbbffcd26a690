#include "engine/comm/nccl/nccl_watch.h"

#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"

namespace upipe::comm {
namespace {

constexpr std::chrono::milliseconds kLook{2};
constexpr std::chrono::milliseconds kLookIdle{50};

}  // namespace

absl::Status NcclOperation::Synchronize() {
  const absl::Status reached = end.Synchronize();
  std::lock_guard lock(mutex_);
  if (resolved_) return outcome_;
  if (!reached.ok()) ledger_->error.Set(reached);
  // An abort ends what is in flight as if it were complete.
  outcome_ = ledger_->error.Get();
  if (outcome_.ok() && operation_) {
    ledger_->traffic.AddSeconds(*operation_, end_mark->SecondsSince(*begin_mark));
  }
  resolved_ = true;
  return outcome_;
}

NcclWatch::NcclWatch(NcclLink& link, std::shared_ptr<NcclLedger> ledger, const CommOptions& options)
    : link_(link), ledger_(std::move(ledger)), options_(options) {
  thread_ = std::thread([this] { Loop(); });
}

NcclWatch::~NcclWatch() {
  {
    std::lock_guard lock(mutex_);
    closing_ = true;
  }
  news_.notify_one();
  thread_.join();
}

void NcclWatch::Add(std::shared_ptr<NcclOperation> operation) {
  {
    std::lock_guard lock(mutex_);
    operations_.push_back(std::move(operation));
  }
  news_.notify_one();
}

void NcclWatch::Die(const absl::Status& error) {
  ledger_->error.Set(error);
  news_.notify_one();
}

void NcclWatch::Loop() {
  std::unique_lock lock(mutex_);
  while (!closing_ || !operations_.empty()) {
    news_.wait_for(lock, operations_.empty() ? kLookIdle : kLook);
    lock.unlock();
    Look();
    lock.lock();
  }
}

void NcclWatch::Look() {
  if (absl::Status found = link_.AsyncError(); !found.ok()) Die(found);
  // A stream's error is found by whoever waits for it.
  if (ledger_->error.failed()) link_.Abort();
  for (;;) {
    std::shared_ptr<NcclOperation> first;
    {
      std::lock_guard lock(mutex_);
      if (operations_.empty()) return;
      first = operations_.front();
    }
    if (!LookAt(*first)) return;
    entered_ = false;
    std::lock_guard lock(mutex_);
    operations_.pop_front();
  }
}

bool NcclWatch::LookAt(NcclOperation& operation) {
  if (!entered_ && operation.begin.Done() && !ledger_->error.failed()) {
    entered_ = true;
    deadline_ = After(options_.deadline);
    if (options_.observer.entered) options_.observer.entered(operation.number);
  }
  if (operation.end.Done()) {
    operation.Synchronize().IgnoreError();
    if (entered_ && options_.observer.left) options_.observer.left(operation.number);
    return true;
  }
  if (entered_ && !ledger_->error.failed() && std::chrono::steady_clock::now() > deadline_) {
    const Traffic& traffic = ledger_->traffic;
    Die(InCollective(
        absl::DeadlineExceededError(absl::StrCat(
            "other ranks did not come before the deadline, ",
            absl::FormatDuration(options_.deadline),
            " after its start; NCCL does not say which: the one in the lowest collective")),
        operation.name, operation.number, traffic.rank(), traffic.size()));
    link_.Abort();
  }
  return false;
}

}  // namespace upipe::comm
