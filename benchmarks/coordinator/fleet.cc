#include "benchmarks/coordinator/fleet.h"

#include <algorithm>
#include <deque>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"

namespace upipe::bench {
namespace {

constexpr absl::Duration kRound = absl::Milliseconds(5);  // between looks at every worker
constexpr absl::Duration kBackoffMin = absl::Milliseconds(50);
constexpr absl::Duration kBackoffMax = absl::Seconds(4);

std::shared_ptr<grpc::Channel> MakeChannel(const std::string& address) {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);  // a connection of its own
  // As upipe-worker has them.
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, 5000);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 2000);
  return grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), arguments);
}

}  // namespace

class LoadWorker {
 public:
  LoadWorker(Fleet& fleet, v1::WorkerService::Stub& stub, int number)
      : fleet_(fleet), stub_(stub), number_(number), name_(absl::StrCat("load-", number)) {}

  // What time brings: a heartbeat, another try to connect.
  void Tick(absl::Time now);
  bool Idle() const {
    std::lock_guard lock(mutex_);
    return stream_ == nullptr;
  }
  bool AcknowledgedAt(int64_t epoch) const {
    std::lock_guard lock(mutex_);
    return open_ && epoch_ >= epoch;
  }
  int64_t NumRunning() const {
    std::lock_guard lock(mutex_);
    return std::count_if(ranks_.begin(), ranks_.end(), [](const auto& entry) {
      return entry.second.state() == v1::RANK_STATE_RUNNING;
    });
  }

 private:
  class Stream;
  void Received(const v1::CoordinatorMessage& message);
  void Ended();
  // The rest holds mutex_.
  void Open();
  void Send(v1::WorkerMessage message);
  void Beat(absl::Time now);
  void Report(v1::RankReport& rank, v1::RankState state);
  void Start(const v1::StartRank& start);
  void Acknowledged(uint64_t sequence);

  Fleet& fleet_;
  v1::WorkerService::Stub& stub_;
  const int number_;
  const std::string name_;
  mutable std::mutex mutex_;
  std::shared_ptr<Stream> stream_;
  bool open_ = false;
  int64_t epoch_ = 0;
  uint64_t sequence_ = 0;
  int64_t sessions_ = 0;
  absl::Time next_beat_;
  absl::Time connect_at_ = absl::InfinitePast();
  absl::Duration backoff_;
  std::deque<std::pair<uint64_t, absl::Time>> beats_;            // not acknowledged
  std::map<std::pair<std::string, int>, v1::RankReport> ranks_;  // by nonce and rank
};

// Holds itself until gRPC is done with it.
class LoadWorker::Stream
    : public grpc::ClientBidiReactor<v1::WorkerMessage, v1::CoordinatorMessage>,
      public std::enable_shared_from_this<Stream> {
 public:
  explicit Stream(LoadWorker& owner) : owner_(owner) {}

  void Begin() {
    self_ = shared_from_this();
    owner_.stub_.async()->Session(&context_, this);
    AddHold();  // Send may start a write until the read side ends
    StartRead(&incoming_);
    StartCall();
  }
  void Cancel() { context_.TryCancel(); }
  void Send(v1::WorkerMessage message) {
    std::lock_guard lock(mutex_);
    if (over_) return;
    outgoing_.push_back(std::move(message));
    Pump();
  }

 private:
  void Pump() {
    if (writing_ || outgoing_.empty()) return;
    writing_ = true;
    StartWrite(&outgoing_.front());
  }
  void OnReadDone(bool ok) override {
    if (ok) {
      owner_.Received(incoming_);
      StartRead(&incoming_);
      return;
    }
    {
      std::lock_guard lock(mutex_);
      over_ = true;
    }
    RemoveHold();
  }
  void OnWriteDone(bool ok) override {
    std::lock_guard lock(mutex_);
    writing_ = false;
    outgoing_.pop_front();
    if (ok && !over_) Pump();
  }
  void OnDone(const grpc::Status&) override {
    owner_.Ended();
    self_.reset();
  }

  LoadWorker& owner_;
  grpc::ClientContext context_;
  std::shared_ptr<Stream> self_;
  v1::CoordinatorMessage incoming_;
  std::mutex mutex_;
  std::deque<v1::WorkerMessage> outgoing_;  // front is being written when writing_
  bool writing_ = false;
  bool over_ = false;
};

void LoadWorker::Tick(absl::Time now) {
  std::lock_guard lock(mutex_);
  const bool away = fleet_.away_ || fleet_.ending_;
  if (stream_ == nullptr) {
    if (!away && now >= connect_at_) Open();
  } else if (away) {
    stream_->Cancel();
  } else if (open_ && now >= next_beat_) {
    Beat(now);
  }
}

void LoadWorker::Open() {
  stream_ = std::make_shared<Stream>(*this);
  stream_->Begin();
  sequence_ = 0;
  v1::WorkerMessage message;
  v1::Hello& hello = *message.mutable_hello();
  hello.set_worker(name_);
  hello.set_node_id(name_);
  hello.set_incarnation("first");
  hello.set_state_id(name_);
  hello.set_start_number(1);
  hello.set_session_number(++sessions_);
  hello.set_num_slots(fleet_.options_.slots);
  hello.set_memory_per_rank_bytes(64 << 20);
  hello.set_epoch(epoch_);
  for (const auto& [key, rank] : ranks_) *hello.add_ranks() = rank;
  Send(std::move(message));
}

void LoadWorker::Send(v1::WorkerMessage message) {
  message.set_sequence(++sequence_);
  if (stream_ != nullptr) stream_->Send(std::move(message));
}

void LoadWorker::Beat(absl::Time now) {
  next_beat_ = std::max(next_beat_ + fleet_.options_.heartbeat, now);
  v1::WorkerMessage message;
  std::string nonce;  // of the attempt added last; ranks are in its order
  v1::Heartbeat& beat = *message.mutable_heartbeat();
  for (const auto& [key, rank] : ranks_) {
    if (key.first != nonce) {
      nonce = key.first;
      *beat.add_attempts()->mutable_fence() = rank.ref().fence();
    }
    v1::RankPosition& position = *beat.mutable_attempts(beat.attempts_size() - 1)->add_ranks();
    position.set_rank(key.second);
    position.set_changes(sequence_);
    position.set_step(1);
    position.set_pass("forward");
  }
  beats_.emplace_back(sequence_ + 1, absl::Now());
  Send(std::move(message));
}

void LoadWorker::Report(v1::RankReport& rank, v1::RankState state) {
  rank.set_state(state);
  v1::WorkerMessage message;
  *message.mutable_rank() = rank;
  Send(std::move(message));
}

void LoadWorker::Start(const v1::StartRank& start) {
  const auto [place, added] = ranks_.try_emplace({start.ref().fence().nonce(), start.ref().rank()});
  if (!added) return;
  v1::RankReport& rank = place->second;
  *rank.mutable_ref() = start.ref();
  rank.set_slot(start.slot());
  Report(rank, v1::RANK_STATE_STARTED);
  rank.set_address(absl::StrCat(name_, "/", start.ref().rank()));
  rank.set_plan_hash(start.plan().plan_hash());
  Report(rank, v1::RANK_STATE_READY);
}

void LoadWorker::Acknowledged(uint64_t sequence) {
  const absl::Time now = absl::Now();
  while (!beats_.empty() && beats_.front().first <= sequence) {
    const double seconds = absl::ToDoubleSeconds(now - beats_.front().second);
    beats_.pop_front();
    std::lock_guard lock(fleet_.mutex_);
    fleet_.ack_seconds_.push_back(seconds);
  }
}

void LoadWorker::Received(const v1::CoordinatorMessage& message) {
  std::lock_guard lock(mutex_);
  switch (message.kind_case()) {
    case v1::CoordinatorMessage::kHelloAck: {
      epoch_ = message.hello_ack().epoch();
      open_ = true;
      backoff_ = absl::ZeroDuration();
      // Workers that were started at different times: beats are spread over the period.
      next_beat_ = absl::Now() + fleet_.options_.heartbeat * number_ / fleet_.options_.workers;
      for (int64_t seen = fleet_.epoch_;
           seen < epoch_ && !fleet_.epoch_.compare_exchange_weak(seen, epoch_);) {
      }
      return;
    }
    case v1::CoordinatorMessage::kHeartbeatAck:
      return Acknowledged(message.heartbeat_ack().sequence());
    case v1::CoordinatorMessage::kStart:
      return Start(message.start());
    case v1::CoordinatorMessage::kPeers:
      for (auto& [key, rank] : ranks_) {
        if (key.first != message.peers().fence().nonce()) continue;
        if (rank.state() == v1::RANK_STATE_READY) Report(rank, v1::RANK_STATE_RUNNING);
      }
      return;
    case v1::CoordinatorMessage::kStop:
      ++fleet_.num_stops_;
      return;
    default:
      return;
  }
}

void LoadWorker::Ended() {
  std::lock_guard lock(mutex_);
  stream_.reset();
  open_ = false;
  beats_.clear();
  backoff_ =
      std::clamp(2 * backoff_, kBackoffMin, std::min(kBackoffMax, 2 * fleet_.options_.heartbeat));
  connect_at_ = absl::Now() + backoff_;
  ++fleet_.num_ended_;
}

Fleet::Fleet(Options options) : options_(std::move(options)) {
  for (int i = 0; i < options_.workers; ++i) {
    if (i % options_.streams_per_channel == 0) {
      stubs_.push_back(v1::WorkerService::NewStub(MakeChannel(options_.address)));
    }
    workers_.push_back(std::make_unique<LoadWorker>(*this, *stubs_.back(), i));
  }
  thread_ = std::thread([this] { Run(); });
}

Fleet::~Fleet() {
  ending_ = true;
  thread_.join();
}

void Fleet::Run() {
  bool idle = false;
  while (!ending_ || !idle) {
    idle = true;
    for (const auto& worker : workers_) {
      worker->Tick(absl::Now());
      idle = idle && worker->Idle();
    }
    absl::SleepFor(kRound);
  }
}

int Fleet::NumAcknowledged(int64_t epoch) const {
  return static_cast<int>(
      std::count_if(workers_.begin(), workers_.end(),
                    [epoch](const auto& worker) { return worker->AcknowledgedAt(epoch); }));
}

int64_t Fleet::NumRunning() const {
  int64_t running = 0;
  for (const auto& worker : workers_) running += worker->NumRunning();
  return running;
}

std::vector<double> Fleet::TakeAckSeconds() {
  std::lock_guard lock(mutex_);
  return std::exchange(ack_seconds_, {});
}

}  // namespace upipe::bench
