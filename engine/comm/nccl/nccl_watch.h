// What happens to collectives after they were issued: their outcome, which the streams that wait
// for them carry, and a thread that watches them, tells the observer, and aborts at the deadline.
#pragma once

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "engine/comm/comm_device.h"
#include "engine/comm/communicator.h"
#include "engine/comm/nccl/nccl_link.h"
#include "engine/comm/traffic.h"
#include "kernels/api/stream.h"

namespace upipe::comm {

// One collective. As an event's state: the point where it ends, and whether what it brought may be
// used.
class NcclOperation final : public kernels::Event::State {
 public:
  // Without `operation` it is the warm-up, which is not counted.
  NcclOperation(std::optional<CommOperation> operation, int64_t number,
                std::shared_ptr<NcclLedger> ledger)
      : name(operation ? NameOf(*operation) : "warm-up"),
        number(number),
        operation_(operation),
        ledger_(std::move(ledger)) {}

  bool Done() const override { return end.Done(); }
  // The communicator's error when it failed before this was known to have ended well.
  absl::Status Synchronize() override;
  const State* point() const override { return end.state().get(); }

  const char* const name;
  const int64_t number;
  // Of the communicator's stream. Set before the operation is shared.
  kernels::Event begin, end;
  std::unique_ptr<CommDevice::Mark> begin_mark, end_mark;

 private:
  const std::optional<CommOperation> operation_;
  const std::shared_ptr<NcclLedger> ledger_;
  std::mutex mutex_;
  bool resolved_ = false;  // under mutex_, as is the outcome
  absl::Status outcome_;
};

class NcclWatch {
 public:
  // `link` outlives it.
  NcclWatch(NcclLink& link, std::shared_ptr<NcclLedger> ledger, const CommOptions& options);
  // Blocks until every operation has ended, or was aborted.
  ~NcclWatch();

  void Add(std::shared_ptr<NcclOperation> operation);
  // The first error: of the communicator, of NCCL's calls, and the reason for the abort.
  void Die(const absl::Status& error);

 private:
  void Loop();
  void Look();
  // Of the first operation; true when it is over.
  bool LookAt(NcclOperation& operation);

  NcclLink& link_;
  const std::shared_ptr<NcclLedger> ledger_;
  const CommOptions options_;
  std::mutex mutex_;
  std::condition_variable news_;
  std::deque<std::shared_ptr<NcclOperation>> operations_;  // under mutex_, in the order of issue
  bool closing_ = false;                                   // under mutex_
  // The thread's own: of the first operation.
  bool entered_ = false;
  SteadyTime deadline_;
  std::thread thread_;
};

}  // namespace upipe::comm
