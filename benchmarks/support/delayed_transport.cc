#include "benchmarks/support/delayed_transport.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <map>
#include <mutex>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "engine/comm/inproc/inproc_communicator.h"
#include "engine/comm/serial_thread.h"
#include "engine/comm/transport.h"
#include "engine/comm/transport_communicator.h"

namespace upipe::bench {
namespace {

using comm::MessageTag;
using comm::SteadyTime;

// A message on its way. Under the mutex of the wires.
struct Journey {
  bool begun = false;  // both ends are posted; the times are known
  SteadyTime left;     // the sender's link is done with it
  SteadyTime arrived;
};

// All links of a group, and the journeys that one end has asked for. `dead` once a rank aborts.
class Wires {
 public:
  Wires(int size, const LinkSpeed& speed) : speed_(speed), out_free_(size), in_free_(size) {}

  // One end of a message; the second to come starts its journey.
  std::shared_ptr<Journey> Post(int from, int to, MessageTag tag, int64_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    const Key key{from, to, tag.collective, tag.block};
    const auto [it, first] = half_posted_.try_emplace(key, nullptr);
    if (first) return it->second = std::make_shared<Journey>();
    std::shared_ptr<Journey> journey = std::move(it->second);
    half_posted_.erase(it);
    const auto time = Nanoseconds(absl::Seconds(bytes / speed_.bytes_per_second));
    const SteadyTime begin = std::max(std::chrono::steady_clock::now(), out_free_[from]);
    journey->left = out_free_[from] = begin + time;
    const SteadyTime in_begin = std::max(begin + Nanoseconds(speed_.latency), in_free_[to]);
    journey->arrived = in_free_[to] = in_begin + time;
    journey->begun = true;
    news_.notify_all();
    return journey;
  }

  // Sleeps until the message has left, or arrived. False at the deadline or when the group is dead.
  bool Await(const Journey& journey, SteadyTime Journey::*end, SteadyTime deadline) {
    std::unique_lock<std::mutex> lock(mutex_);
    news_.wait_until(lock, deadline, [&] { return dead_ || journey.begun; });
    if (dead_ || !journey.begun) return false;
    news_.wait_until(lock, std::min(journey.*end, deadline), [&] { return dead_; });
    return !dead_ && journey.*end <= deadline;
  }

  void Kill() {
    std::lock_guard<std::mutex> lock(mutex_);
    dead_ = true;
    news_.notify_all();
  }

 private:
  using Key = std::tuple<int, int, uint32_t, uint32_t>;  // from, to, collective, block

  static std::chrono::nanoseconds Nanoseconds(absl::Duration duration) {
    return std::chrono::nanoseconds(absl::ToInt64Nanoseconds(duration));
  }

  const LinkSpeed speed_;
  std::mutex mutex_;  // of everything below
  std::condition_variable news_;
  bool dead_ = false;
  std::vector<SteadyTime> out_free_, in_free_;  // [rank]
  std::map<Key, std::shared_ptr<Journey>> half_posted_;
};

class DelayedTransport final : public comm::Transport {
 public:
  DelayedTransport(std::unique_ptr<comm::Transport> wrapped, std::shared_ptr<Wires> wires)
      : wrapped_(std::move(wrapped)), wires_(std::move(wires)) {}

  int rank() const override { return wrapped_->rank(); }
  int size() const override { return wrapped_->size(); }

  // The journey is known before the wrapped transport can say that the message is there.
  int PostSend(int peer, MessageTag tag, const void* data, int64_t bytes) override {
    requests_.push_back({wires_->Post(rank(), peer, tag, bytes), &Journey::left, peer});
    return wrapped_->PostSend(peer, tag, data, bytes);
  }
  int PostReceive(int peer, MessageTag tag, void* data, int64_t bytes) override {
    requests_.push_back({wires_->Post(peer, rank(), tag, bytes), &Journey::arrived, peer});
    return wrapped_->PostReceive(peer, tag, data, bytes);
  }

  absl::Status Wait(int request, SteadyTime deadline) override {
    UPIPE_RETURN_IF_ERROR(wrapped_->Wait(request, deadline));
    const Request& waited = requests_[request];
    if (wires_->Await(*waited.journey, waited.end, deadline)) return absl::OkStatus();
    UPIPE_RETURN_IF_ERROR(wrapped_->status());
    return absl::DeadlineExceededError(absl::StrCat("a message between ranks ", rank(), " and ",
                                                    waited.peer,
                                                    " is still on the wires at the deadline"));
  }
  absl::Status WaitAll(SteadyTime deadline) override {
    for (size_t i = 0; i < requests_.size(); ++i)
      UPIPE_RETURN_IF_ERROR(Wait(static_cast<int>(i), deadline));
    requests_.clear();
    return wrapped_->WaitAll(deadline);
  }
  absl::Status CheckNothingUnexpected(uint32_t collective) override {
    return wrapped_->CheckNothingUnexpected(collective);
  }
  void Withdraw() override {
    requests_.clear();
    wrapped_->Withdraw();
  }
  void Abort(const absl::Status& cause) override {
    wrapped_->Abort(cause);
    wires_->Kill();
  }
  absl::Status status() const override { return wrapped_->status(); }
  void Close() override { wrapped_->Close(); }

 private:
  struct Request {
    std::shared_ptr<Journey> journey;
    SteadyTime Journey::*end;
    int peer;
  };

  const std::unique_ptr<comm::Transport> wrapped_;
  const std::shared_ptr<Wires> wires_;
  std::vector<Request> requests_;  // numbered as the wrapped transport's
};

}  // namespace

std::vector<std::unique_ptr<comm::Communicator>> CreateDelayedGroup(
    int size, const LinkSpeed& speed, const comm::CommOptions& options) {
  const auto wires = std::make_shared<Wires>(size, speed);
  std::vector<std::unique_ptr<comm::Communicator>> ranks;
  for (auto& transport : comm::InprocGroup::CreateTransports(size)) {
    ranks.push_back(std::make_unique<comm::TransportCommunicator>(
        std::make_unique<comm::SerialThread>(),
        std::make_unique<DelayedTransport>(std::move(transport), wires), options));
  }
  return ranks;
}

}  // namespace upipe::bench
