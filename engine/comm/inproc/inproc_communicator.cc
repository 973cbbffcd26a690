#include "engine/comm/inproc/inproc_communicator.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <list>
#include <memory>
#include <mutex>

#include "absl/strings/str_cat.h"
#include "common/check.h"
#include "common/status.h"
#include "engine/comm/local_work.h"
#include "engine/comm/serial_thread.h"
#include "engine/comm/traffic.h"
#include "engine/comm/transport.h"
#include "engine/comm/transport_communicator.h"

namespace upipe::comm {
namespace {

constexpr std::chrono::microseconds kSpin{50};

// One end of a message. Lives in its rank's list until that rank has waited for it; `state` says
// who may touch it.
struct Request {
  enum State { kPending, kCopying, kDone };
  bool is_send = false;
  int from = 0;
  int to = 0;
  MessageTag tag;
  char* data = nullptr;
  int64_t bytes = 0;
  std::atomic<int> state{kPending};
  absl::Status status;  // set before kDone
};

// What the ranks share. One mutex guards matching; the copies run outside it.
struct Exchange {
  explicit Exchange(int num_ranks)
      : size(num_ranks), wakeups(num_ranks), pending(num_ranks), left(num_ranks) {}

  const int size;
  std::mutex mutex;
  std::vector<std::condition_variable> wakeups;  // [rank] its waits
  std::vector<std::list<Request*>>
      pending;                          // [receiver] both kinds, unmatched, in order of arrival
  std::vector<std::atomic<bool>> left;  // [rank] its transport is gone
  FirstError error;                     // of the group
};

absl::Status Move(const Request& send, const Request& receive, LocalWork& work) {
  if (send.bytes != receive.bytes) {
    return absl::InternalError(absl::StrCat(
        "rank ", send.from, " sends ", send.bytes, " bytes as block ", send.tag.block, " and rank ",
        send.to, " expects ", receive.bytes, "; the ranks run different schedules"));
  }
  return work.Copy(receive.data, send.data, send.bytes);
}

class InprocTransport final : public Transport {
 public:
  InprocTransport(std::shared_ptr<Exchange> exchange, int rank, std::shared_ptr<LocalWork> work)
      : exchange_(std::move(exchange)), rank_(rank), work_(std::move(work)) {}

  ~InprocTransport() override {
    Withdraw();
    std::lock_guard<std::mutex> lock(exchange_->mutex);
    exchange_->left[rank_] = true;
    for (auto& wakeup : exchange_->wakeups) wakeup.notify_all();
  }

  int rank() const override { return rank_; }
  int size() const override { return exchange_->size; }

  int PostSend(int peer, MessageTag tag, const void* data, int64_t bytes) override {
    return Post(true, rank_, peer, tag, const_cast<void*>(data), bytes);
  }
  int PostReceive(int peer, MessageTag tag, void* data, int64_t bytes) override {
    return Post(false, peer, rank_, tag, data, bytes);
  }

  absl::Status Wait(int request, SteadyTime deadline) override {
    Request& waited = requests_[request];
    const SteadyTime spin_end = std::chrono::steady_clock::now() + kSpin;
    while (waited.state != Request::kDone && !Hopeless(waited) &&
           std::chrono::steady_clock::now() < spin_end) {
    }
    if (waited.state != Request::kDone) {
      std::unique_lock<std::mutex> lock(exchange_->mutex);
      const auto over = [&] { return waited.state == Request::kDone || Hopeless(waited); };
      exchange_->wakeups[rank_].wait_until(lock, deadline, over);
    }
    if (waited.state == Request::kDone) return waited.status;
    UPIPE_RETURN_IF_ERROR(exchange_->error.Get());
    const int peer = waited.is_send ? waited.to : waited.from;
    if (exchange_->left[peer]) {
      return absl::UnavailableError(absl::StrCat("rank ", peer, " has left the group"));
    }
    return absl::DeadlineExceededError(
        absl::StrCat("rank ", peer, " did not ", waited.is_send ? "take" : "send", " block ",
                     waited.tag.block, " of ", waited.bytes, " bytes before the deadline"));
  }

  absl::Status WaitAll(SteadyTime deadline) override {
    for (size_t i = 0; i < requests_.size(); ++i)
      UPIPE_RETURN_IF_ERROR(Wait(static_cast<int>(i), deadline));
    requests_.clear();
    return exchange_->error.Get();
  }

  absl::Status CheckNothingUnexpected(uint32_t collective) override {
    std::lock_guard<std::mutex> lock(exchange_->mutex);
    for (const Request* request : exchange_->pending[rank_]) {
      if (!request->is_send || request->tag.collective != collective) continue;
      return UnexpectedMessage(request->from, collective, request->tag.block, request->bytes);
    }
    return absl::OkStatus();
  }

  void Withdraw() override {
    std::unique_lock<std::mutex> lock(exchange_->mutex);
    for (Request& request : requests_) {
      if (request.state == Request::kPending) exchange_->pending[request.to].remove(&request);
      exchange_->wakeups[rank_].wait(lock, [&] { return request.state != Request::kCopying; });
    }
    requests_.clear();
  }

  void Abort(const absl::Status& cause) override {
    std::lock_guard<std::mutex> lock(exchange_->mutex);
    exchange_->error.Set(cause);
    for (auto& wakeup : exchange_->wakeups) wakeup.notify_all();
  }
  absl::Status status() const override { return exchange_->error.Get(); }
  void Close() override {}

 private:
  bool Hopeless(const Request& request) const {
    return exchange_->error.failed() ||
           exchange_->left[request.is_send ? request.to : request.from];
  }

  int Post(bool is_send, int from, int to, MessageTag tag, void* data, int64_t bytes) {
    Request& request = requests_.emplace_back();
    request.is_send = is_send;
    request.from = from;
    request.to = to;
    request.tag = tag;
    request.data = static_cast<char*>(data);
    request.bytes = bytes;
    if (Request* other = Match(request)) {
      const absl::Status moved =
          is_send ? Move(request, *other, *work_) : Move(*other, request, *work_);
      std::lock_guard<std::mutex> lock(exchange_->mutex);
      request.status = other->status = moved;
      request.state = other->state = Request::kDone;
      exchange_->wakeups[is_send ? to : from].notify_all();
    }
    return static_cast<int>(requests_.size()) - 1;
  }

  // The other end, taken out of the list; or null, and `request` is in the list.
  Request* Match(Request& request) {
    std::lock_guard<std::mutex> lock(exchange_->mutex);
    std::list<Request*>& pending = exchange_->pending[request.to];
    for (auto it = pending.begin(); it != pending.end(); ++it) {
      Request* other = *it;
      if (other->is_send == request.is_send || other->from != request.from ||
          !(other->tag == request.tag))
        continue;
      pending.erase(it);
      other->state = request.state = Request::kCopying;
      return other;
    }
    pending.push_back(&request);
    return nullptr;
  }

  const std::shared_ptr<Exchange> exchange_;
  const int rank_;
  const std::shared_ptr<LocalWork> work_;
  std::deque<Request> requests_;  // stable addresses
};

std::shared_ptr<Exchange> NewExchange(int size) {
  UPIPE_CHECK(size >= 1 && size <= kMaxRanks) << size << " ranks";
  return std::make_shared<Exchange>(size);
}

}  // namespace

std::vector<std::unique_ptr<Communicator>> InprocGroup::Create(int size, const CommOptions& options,
                                                               std::shared_ptr<CommDevice> device) {
  return Create(std::vector<CommOptions>(size, options), std::move(device));
}

std::vector<std::unique_ptr<Communicator>> InprocGroup::Create(
    const std::vector<CommOptions>& by_rank, std::shared_ptr<CommDevice> device) {
  std::vector<std::unique_ptr<Communicator>> ranks;
  const auto exchange = NewExchange(static_cast<int>(by_rank.size()));
  for (const CommOptions& options : by_rank) {
    const int rank = static_cast<int>(ranks.size());
    const std::shared_ptr<LocalWork> work =
        device != nullptr ? CreateDeviceWork(device) : CreateHostWork();
    ranks.push_back(std::make_unique<TransportCommunicator>(
        std::make_unique<SerialThread>(), std::make_unique<InprocTransport>(exchange, rank, work),
        options, work));
  }
  return ranks;
}

std::vector<std::unique_ptr<Transport>> InprocGroup::CreateTransports(int size) {
  const auto exchange = NewExchange(size);
  std::vector<std::unique_ptr<Transport>> transports;
  for (int rank = 0; rank < size; ++rank) {
    transports.push_back(std::make_unique<InprocTransport>(exchange, rank, CreateHostWork()));
  }
  return transports;
}

}  // namespace upipe::comm
