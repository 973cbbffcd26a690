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
                                                            const std::vector<RankGroup>& parts,
                                                            std::shared_ptr<NcclLedger> ledger,
                                                            SteadyTime deadline) {
  std::unique_ptr<NcclLink> link(new NcclLink(std::move(api), std::move(ledger)));
  const absl::Status status = link->Connect(config, parts, deadline);
  if (status.ok()) return link;
  link->ledger_->error.Set(status);
  return status;
}

absl::Status NcclLink::Connect(const NcclConfig& config, const std::vector<RankGroup>& parts,
                               SteadyTime deadline) {
  comms_.resize(1 + parts.size(), nullptr);
  NcclConfig whole = config;
  whole.shares = !parts.empty();
  NcclResult result = api_->CommInit(whole, &comms_[0]);
  UPIPE_RETURN_IF_ERROR(StatusOf(result, "ncclCommInitRankConfig", comms_[0]));
  UPIPE_RETURN_IF_ERROR(Settle(comms_[0], deadline));
  for (size_t i = 0; i < parts.size(); ++i) {
    NcclConfig part = whole;
    part.size = static_cast<int>(parts[i].size());
    part.rank = IndexIn(parts[i], config.rank);
    NcclComm*& comm = comms_[i + 1];
    result = api_->CommSplit(comms_[0], parts[i].front(), part, &comm);
    UPIPE_RETURN_IF_ERROR(StatusOf(result, "ncclCommSplit", comms_[0]));
    UPIPE_RETURN_IF_ERROR(Settle(comms_[0], deadline));
    UPIPE_RETURN_IF_ERROR(Settle(comm, deadline));
  }
  return absl::OkStatus();
}

NcclLink::~NcclLink() { Abort(); }

absl::Status NcclLink::StatusOf(NcclResult result, const char* call, NcclComm* comm) {
  if (result == NcclResult::kSuccess || result == NcclResult::kInProgress) return absl::OkStatus();
  std::string detail = api_->LastError(comm);
  if (!detail.empty()) detail = absl::StrCat(": ", detail);
  return absl::Status(CodeOf(result), absl::StrCat(call, " of NCCL says ", NameOf(result), detail));
}

absl::Status NcclLink::Settle(NcclComm* comm, SteadyTime deadline) {
  for (int look = 0;; ++look) {
    UPIPE_RETURN_IF_ERROR(ledger_->error.Get());
    NcclResult state = NcclResult::kSuccess;
    const NcclResult asked = api_->AsyncError(comm, &state);
    UPIPE_RETURN_IF_ERROR(StatusOf(asked, "ncclCommGetAsyncError", comm));
    if (state != NcclResult::kInProgress) return StatusOf(state, "ncclCommGetAsyncError", comm);
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

absl::Status NcclLink::GroupOf(size_t index, const Calls& calls, SteadyTime deadline) {
  std::lock_guard lock(calls_);
  UPIPE_RETURN_IF_ERROR(ledger_->error.Get());
  NcclComm* const comm = comms_.at(index);
  UPIPE_RETURN_IF_ERROR(StatusOf(api_->GroupStart(), "ncclGroupStart", comm));
  const absl::Status called = StatusOf(calls(*api_, comm), "a call", comm);
  // Also after a call that failed, or the group stays open.
  const absl::Status ended = StatusOf(api_->GroupEnd(), "ncclGroupEnd", comm);
  UPIPE_RETURN_IF_ERROR(called);
  UPIPE_RETURN_IF_ERROR(ended);
  return Settle(comm, deadline);
}

absl::Status NcclLink::AsyncError() {
  std::lock_guard lock(handle_);
  for (NcclComm* const comm : comms_) {
    if (comm == nullptr) continue;
    NcclResult state = NcclResult::kSuccess;
    const NcclResult asked = api_->AsyncError(comm, &state);
    UPIPE_RETURN_IF_ERROR(StatusOf(asked, "ncclCommGetAsyncError", comm));
    UPIPE_RETURN_IF_ERROR(StatusOf(state, "ncclCommGetAsyncError", comm));
  }
  return absl::OkStatus();
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
  for (NcclComm*& comm : comms_) {
    if (comm != nullptr) api_->CommAbort(std::exchange(comm, nullptr));
  }
}

void NcclLink::Close(SteadyTime deadline) {
  if (ledger_->error.failed()) return Abort();
  {
    std::lock_guard calls(calls_);
    // Parts before what they were split off.
    for (auto comm = comms_.rbegin(); comm != comms_.rend(); ++comm) {
      absl::Status left = StatusOf(api_->CommFinalize(*comm), "ncclCommFinalize", *comm);
      if (left.ok()) left = Settle(*comm, deadline);
      if (!left.ok()) break;
      std::lock_guard lock(handle_);
      api_->CommDestroy(std::exchange(*comm, nullptr));
    }
  }
  Abort();
}

}  // namespace upipe::comm
