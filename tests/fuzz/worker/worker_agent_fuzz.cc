// What a worker is told by coordinator and trainers, in any order and with any content: its agent
// must neither fail, start what it may not, nor grow with what it hears. One byte of an event says
// what happens, one whom it concerns; the payload is the message as it lies on the wire.
#include <csignal>
#include <map>
#include <set>
#include <vector>

#include "common/check.h"
#include "common/utf8.h"
#include "tests/support/fuzz/events.h"
#include "tests/support/fuzz/swell.h"
#include "worker/agent/agent.h"

namespace upipe::worker {
namespace {

constexpr int kSlots = 3;
constexpr size_t kRanksMax = 8192;
constexpr size_t kUnacknowledgedMax = 4097;
constexpr size_t kSendMax = size_t{4} << 20;  // what the coordinator takes
constexpr size_t kSwollen = size_t{2} << 20;

// What the launcher has done with a tree.
enum class Tree { kLaunched, kStarted, kExited, kGone };

class Worker {
 public:
  Worker() {
    state_.identity.set_worker("w1");
    state_.identity.set_node_id("n1");
    state_.identity.set_incarnation("i1");
    state_.identity.set_state_id("s1");
    state_.identity.set_start_number(1);
    state_.identity.set_num_slots(kSlots);
    state_.identity.set_memory_per_rank_bytes(1000);
    now_.since_boot = absl::Hours(1);
    state_.reconnect_at = now_;
    Take(Tick{});
  }

  void Happen(const fuzz::Event& event) {
    switch (event.kind) {
      case 'c':
        return Order(event);
      case 't':
      case 'T':
        return Tell(event);
      case 'p':
        return Process(event);
      case 'l':
        return Look(event);
      case 'a':
        return Acknowledge(event);
      case 'd':
        now_ = now_ + absl::Milliseconds(event.argument * event.argument * 20);
        return Take(Tick{});
      case 's':
        return Take(SessionClosed{state_.session - event.argument % 2, "cut"});
      case 'x':
        return Take(TrainerClosed{event.argument % 4u + 1});
      case 'j':
        return Take(JobLogsDeleted{std::string(event.payload)});
      case 'v':
        return Take(Leave{});
      case 'q':
        return Take(Shutdown{});
      default:
        return;
    }
  }

 private:
  // One of the ranks it knows, for messages that would not find one by themselves.
  const Rank* Known(uint8_t argument) const {
    if (state_.ranks.empty()) return nullptr;
    return &std::next(state_.ranks.begin(), argument % state_.ranks.size())->second;
  }

  // Bit 0: the epoch is that of the coordinator in charge. Bit 1: it concerns a rank that is known.
  // Bit 2: it comes in an old session.
  void Order(const fuzz::Event& event) {
    v1::CoordinatorMessage message;
    if (!fuzz::Parse(event, message)) return;
    v1::Fence* fence = message.has_start() ? message.mutable_start()->mutable_ref()->mutable_fence()
                       : message.has_peers()  ? message.mutable_peers()->mutable_fence()
                       : message.has_stop()   ? message.mutable_stop()->mutable_fence()
                       : message.has_retain() ? message.mutable_retain()->mutable_fence()
                                              : nullptr;
    const Rank* known = Known(event.argument >> 3);
    if (fence != nullptr && known != nullptr && (event.argument & 2) != 0) {
      *fence = known->report.ref().fence();
    }
    if (fence != nullptr && (event.argument & 1) != 0) fence->set_epoch(state_.epoch);
    Take(FromCoordinator{state_.session - ((event.argument & 4) != 0), std::move(message)});
  }

  // Bits 0 and 1: the connection. Bit 2: a hello is that of a rank that is known. Of kind T one of
  // its strings, as bits 3 to 7 say, is long.
  void Tell(const fuzz::Event& event) {
    v1::TrainerMessage message;
    if (!fuzz::Parse(event, message)) return;
    if (event.kind == 'T') fuzz::Swell(message, event.argument >> 3, kSwollen);
    const Rank* known = Known(event.argument >> 3);
    if (message.has_hello() && known != nullptr && (event.argument & 4) != 0) {
      *message.mutable_hello()->mutable_ref() = known->report.ref();
      if (known->pid != 0) message.mutable_hello()->set_pid(known->pid);
    }
    Take(FromTrainer{event.argument % 4u + 1, std::move(message)});
  }

  // The launcher goes on with one of its trees, in the only order there is.
  void Process(const fuzz::Event& event) {
    if (trees_.empty()) return;
    auto& [key, tree] = *std::next(trees_.begin(), event.argument % trees_.size());
    const bool failed = event.argument >= 128;
    switch (tree) {
      case Tree::kLaunched:
        tree = failed ? Tree::kGone : Tree::kStarted;
        if (failed) return Take(ProcessLaunchFailed{key, absl::InternalError("no fork")});
        return Take(ProcessStarted{key, 100 + event.argument});
      case Tree::kStarted: {
        tree = Tree::kExited;
        ProcessExited exited{key, {}, {}};
        if (failed) exited.exit.signal = SIGKILL;
        if (!failed) exited.exit.exit_code = event.payload.empty() ? 0 : event.payload[0];
        exited.exit.died_before_kill = event.payload.size() % 2 == 1;
        exited.exit.log_tail = {ToUtf8(event.payload, 1000)};
        exited.positions.resize(2);
        fuzz::Parse(event, exited.positions[0]);
        return Take(exited);
      }
      case Tree::kExited:
        tree = Tree::kGone;
        return Take(ProcessGone{key});
      case Tree::kGone:
        return;
    }
  }

  void Look(const fuzz::Event& event) {
    PositionsRead read;
    v1::RankPosition position;
    if (!fuzz::Parse(event, position)) return;
    for (const auto& [key, tree] : trees_) {
      position.set_rank(key.rank);
      read.attempts[key.nonce].push_back(position);
    }
    Take(read);
  }

  // As a coordinator that has heard everything up to now, or one number.
  void Acknowledge(const fuzz::Event& event) {
    const uint64_t first = event.argument < 128 ? event.argument : 1;
    const uint64_t last = event.argument < 128 ? event.argument : state_.next_sequence;
    for (uint64_t sequence = first; sequence <= last; ++sequence) {
      v1::CoordinatorMessage message;
      message.mutable_heartbeat_ack()->set_sequence(sequence);
      Take(FromCoordinator{state_.session, message});
      message.mutable_rank_ack()->set_sequence(sequence);
      Take(FromCoordinator{state_.session, message});
    }
  }

  void Take(const Event& event) {
    if (over_) return;
    for (const Action& action : Step(state_, event, now_)) {
      std::visit([this](const auto& kind) { Do(kind); }, action);
    }
    CheckState();
    UPIPE_CHECK(NextWake(state_, now_) >= BootTime{});
  }

  void Do(const LaunchRank& action) {
    const auto [tree, fresh] = trees_.emplace(action.key, Tree::kLaunched);
    UPIPE_CHECK(fresh || tree->second == Tree::kGone) << "launched twice";
    tree->second = Tree::kLaunched;
    UPIPE_CHECK(state_.ranks.contains(action.key));
    UPIPE_CHECK(action.slot >= 0 && action.slot < kSlots) << action.slot;
    UPIPE_CHECK(action.job.find('/') == std::string::npos &&
                action.job.find(' ') == std::string::npos);
    UPIPE_CHECK(action.threads >= 1) << action.threads;
    UPIPE_CHECK(slots_.emplace(action.slot, action.key).second)
        << "slot " << action.slot << " twice";
  }
  void Do(const KillRank& action) {
    UPIPE_CHECK(trees_.contains(action.key)) << "killed what was not launched";
  }
  void Do(const ReleaseRank& action) {
    UPIPE_CHECK(state_.ranks.contains(action.key));
    UPIPE_CHECK(trees_.at(action.key) == Tree::kGone) << "released without proof";
    UPIPE_CHECK(slots_.at(action.slot) == action.key);
    slots_.erase(action.slot);
  }
  void Do(const RecordStep& action) { UPIPE_CHECK(state_.ranks.contains(action.key)); }
  void Do(const RecordTimeline& action) { UPIPE_CHECK(state_.ranks.contains(action.key)); }
  void Do(const UploadLog& action) {
    const std::string& job = action.request.ref().fence().job_id();
    UPIPE_CHECK(!job.empty() && job[0] != '.' && job.find('/') == std::string::npos) << job;
  }
  void Do(const SendToTrainer& action) { UPIPE_CHECK(action.connection != 0); }
  void Do(const SendToCoordinator& action) {
    UPIPE_CHECK(action.message.ByteSizeLong() <= kSendMax) << action.message.ByteSizeLong();
    v1::WorkerMessage received;
    UPIPE_CHECK(received.ParseFromString(action.message.SerializeAsString()));
  }
  void Do(const ShutdownComplete&) { over_ = true; }
  template <typename Other>
  void Do(const Other&) {}

  void CheckState() {
    UPIPE_CHECK(state_.heartbeats.size() <= kUnacknowledgedMax);
    UPIPE_CHECK(state_.reports.size() <= kUnacknowledgedMax);
    UPIPE_CHECK(state_.ranks.size() <= kRanksMax);
    UPIPE_CHECK(state_.stopped_generation.size() <= state_.newest_generation.size());
    for (const auto& [connection, key] : state_.connections) {
      const auto rank = state_.ranks.find(key);
      UPIPE_CHECK(rank != state_.ranks.end()) << "connection " << connection << " of no rank";
      UPIPE_CHECK(rank->second.connection == connection)
          << "connection " << connection << " is that of a rank at " << rank->second.connection;
    }
    for (const auto& [key, rank] : state_.ranks) {
      UPIPE_CHECK(rank.connection == 0 || state_.connections.contains(rank.connection))
          << "nobody notices when connection " << rank.connection << " closes";
      const auto tree = trees_.find(key);
      // A stop may name a rank that was proven gone and forgotten: it is known again, as gone.
      UPIPE_CHECK(rank.launched ? tree != trees_.end()
                                : tree == trees_.end() || tree->second == Tree::kGone);
    }
    for (const auto& [nonce, peers] : state_.peers) {
      UPIPE_CHECK(
          std::any_of(state_.ranks.begin(), state_.ranks.end(),
                      [&nonce = nonce](const auto& rank) { return rank.first.nonce == nonce; }))
          << "peers of nobody are kept";
    }
  }

  State state_;
  BootTime now_;
  std::map<RankKey, Tree> trees_;
  std::map<int, RankKey> slots_;  // of trees that are not proven gone
  bool over_ = false;
};

}  // namespace
}  // namespace upipe::worker

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  upipe::worker::Worker worker;
  for (const upipe::fuzz::Event& event : upipe::fuzz::ReadEvents(data, size)) worker.Happen(event);
  return 0;
}
