#include "engine/comm/nccl/nccl_link.h"

#include <chrono>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status.h"

namespace upipe::comm {
namespace {

using std::chrono::steady_clock;

constexpr std::chrono::microseconds kLook{50};
constexpr int kLooksBeforeSleep = 100;
// For the issuing thread to leave the library once it sees the error.
constexpr std::chrono::seconds kAbortPatience{2};

absl::StatusCode CodeOf(NcclResult result) {
  switch (result) {
    case NcclResult::kRemoteError:
    case NcclResult::kSystemError:
      return absl::StatusCode::kUnavailable;
    default:
      return absl::StatusCode::kInternal;
  }
}

}  // namespace

const char* NameOf(NcclResult result) {
  switch (result) {
    case NcclResult::kSuccess:
      return "success";
    case NcclResult::kUnhandledCudaError:
      return "unhandled CUDA error";
    case NcclResult::kSystemError:
      return "system error";
    case NcclResult::kInternalError:
      return "internal error";
    case NcclResult::kInvalidArgument:
      return "invalid argument";
    case NcclResult::kInvalidUsage:
      return "invalid usage";
    case NcclResult::kRemoteError:
      return "remote error";
    case NcclResult::kInProgress:
      return "in progress";
  }
  return "unknown error";
}

absl::StatusOr<std::unique_ptr<NcclLink>> NcclLink::Connect(std::shared_ptr<NcclApi> api,
                                                            const NcclConfig& config,
                                                            std::shared_ptr<NcclLedger> ledger,
                                                            SteadyTime deadline) {
  std::unique_ptr<NcclLink> link(new NcclLink(std::move(api), std::move(ledger)));
  const NcclResult result = link->api_->CommInit(config, &link->comm_);
  absl::Status status = link->StatusOf(result, "ncclCommInitRankConfig");
  if (status.ok()) status = link->Settle(deadline);
  if (status.ok()) return link;
  link->ledger_->error.Set(status);
  return status;
}

NcclLink::~NcclLink() { Abort(); }

absl::Status NcclLink::StatusOf(NcclResult result, const char* call) {
  if (result == NcclResult::kSuccess || result == NcclResult::kInProgress) return absl::OkStatus();
  std::string detail = api_->LastError(comm_);
  if (!detail.empty()) detail = absl::StrCat(": ", detail);
  return absl::Status(CodeOf(result), absl::StrCat(call, " of NCCL says ", NameOf(result), detail));
}

absl::Status NcclLink::Settle(SteadyTime deadline) {
  for (int look = 0;; ++look) {
    UPIPE_RETURN_IF_ERROR(ledger_->error.Get());
    NcclResult state = NcclResult::kSuccess;
    UPIPE_RETURN_IF_ERROR(StatusOf(api_->AsyncError(comm_, &state), "ncclCommGetAsyncError"));
    if (state != NcclResult::kInProgress) return StatusOf(state, "ncclCommGetAsyncError");
    if (steady_clock::now() > deadline) {
      return absl::DeadlineExceededError(
          "NCCL was still waiting for other ranks at the deadline; did all of them start?");
    }
    if (look < kLooksBeforeSleep) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(kLook);
    }
  }
}

absl::Status NcclLink::Group(const std::function<NcclResult(NcclApi& api, NcclComm* comm)>& calls,
                             SteadyTime deadline) {
  std::lock_guard lock(calls_);
  UPIPE_RETURN_IF_ERROR(ledger_->error.Get());
  UPIPE_RETURN_IF_ERROR(StatusOf(api_->GroupStart(), "ncclGroupStart"));
  const absl::Status called = StatusOf(calls(*api_, comm_), "a call");
  // Also after a call that failed, or the group stays open.
  const absl::Status ended = StatusOf(api_->GroupEnd(), "ncclGroupEnd");
  UPIPE_RETURN_IF_ERROR(called);
  UPIPE_RETURN_IF_ERROR(ended);
  return Settle(deadline);
}

absl::Status NcclLink::AsyncError() {
  std::lock_guard lock(handle_);
  if (comm_ == nullptr) return absl::OkStatus();
  NcclResult state = NcclResult::kSuccess;
  UPIPE_RETURN_IF_ERROR(StatusOf(api_->AsyncError(comm_, &state), "ncclCommGetAsyncError"));
  return StatusOf(state, "ncclCommGetAsyncError");
}

void NcclLink::Abort() {
  // NCCL's calls do not block; one that does all the same is ended by the abort itself.
  const SteadyTime end = steady_clock::now() + kAbortPatience;
  std::unique_lock calls(calls_, std::try_to_lock);
  while (!calls.owns_lock() && steady_clock::now() < end) {
    std::this_thread::sleep_for(kLook);
    calls.try_lock();
  }
  std::lock_guard lock(handle_);
  if (comm_ != nullptr) api_->CommAbort(std::exchange(comm_, nullptr));
}

void NcclLink::Close(SteadyTime deadline) {
  if (ledger_->error.failed()) return Abort();
  {
    std::lock_guard calls(calls_);
    absl::Status left = StatusOf(api_->CommFinalize(comm_), "ncclCommFinalize");
    if (left.ok()) left = Settle(deadline);
    if (left.ok()) {
      std::lock_guard lock(handle_);
      api_->CommDestroy(std::exchange(comm_, nullptr));
      return;
    }
  }
  Abort();
}

}  // namespace upipe::comm
