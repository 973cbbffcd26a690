// The deciding thread and the store thread on a disk whose fsync hangs or fails: heartbeats are
// heard and acknowledged meanwhile, answers come after the commit, and a failure is told once.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <condition_variable>
#include <cstdlib>
#include <filesystem>
#include <mutex>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "common/errors/rpc_error.h"
#include "coordinator/runtime/loop.h"
#include "coordinator/store/sqlite_store.h"
#include "tests/support/coordinator/faulty_disk.h"

namespace upipe::coordinator {
namespace {

using testing::FaultyDisk;

constexpr absl::Duration kPatience = absl::Seconds(20);

// Syncs wait behind it while it is shut.
class Gate {
 public:
  void Shut() {
    std::lock_guard lock(mutex_);
    open_ = false;
  }
  void Open() {
    std::lock_guard lock(mutex_);
    open_ = true;
    changed_.notify_all();
  }
  void Pass() {
    std::unique_lock lock(mutex_);
    ++waiting_;
    changed_.notify_all();
    changed_.wait(lock, [this] { return open_; });
    --waiting_;
  }
  bool SomebodyWaits() {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, absl::ToChronoSeconds(kPatience),
                             [this] { return waiting_ > 0; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool open_ = true;
  int waiting_ = 0;
};

class Link : public WorkerLink {
 public:
  void Send(v1::CoordinatorMessage message) override { sent.TryPush(std::move(message)); }
  void Close(const absl::Status&) override {}
  BoundedQueue<v1::CoordinatorMessage> sent{4096};
};

class SlowDiskTest : public ::testing::Test {
 protected:
  SlowDiskTest() : folder_((std::filesystem::temp_directory_path() / "upipe-slow-XXXXXX")) {
    EXPECT_NE(mkdtemp(folder_.data()), nullptr);
    store_ = *SqliteStore::Open("/store", disk_.vfs());
    ballast_ = std::make_unique<Ballast>(folder_, 4096);
    Loop::Options options;
    options.timing.heartbeat = absl::Milliseconds(200);
    options.planner.binary = "/bin/false";
    options.planner.work_dir = folder_;
    options.on_failed = [this](absl::Status status) { failures_.TryPush(std::move(status)); };
    loop_ = *Loop::Create(std::move(options), *store_, *ballast_, nullptr);
    disk_.OnSync([this] { gate_.Pass(); });
    deciding_ = std::thread([this] { loop_->Run(); });
  }
  ~SlowDiskTest() override {
    gate_.Open();
    loop_->Stop();
    deciding_.join();
    std::filesystem::remove_all(folder_);
  }

  std::shared_ptr<Link> Join(SessionId session, const std::string& worker) {
    auto link = std::make_shared<Link>();
    v1::WorkerMessage message;
    v1::Hello& hello = *message.mutable_hello();
    hello.set_worker(worker);
    hello.set_node_id(worker);
    hello.set_incarnation("first");
    hello.set_state_id(worker);
    hello.set_start_number(1);
    hello.set_session_number(1);
    hello.set_num_slots(2);
    hello.set_memory_per_rank_bytes(1 << 20);
    loop_->Post(SessionMessage{session, link, std::move(message)});
    return link;
  }
  static bool Greeted(Link& link) {
    const auto message = link.sent.PopFor(kPatience);
    return message && message->has_hello_ack();
  }
  // One heartbeat there and its acknowledgement back.
  bool Beat(SessionId session, std::shared_ptr<Link> link) {
    v1::WorkerMessage message;
    message.set_sequence(++sequence_);
    message.mutable_heartbeat();
    loop_->Post(SessionMessage{session, link, std::move(message)});
    const auto ack = link->sent.PopFor(kPatience);
    return ack && ack->heartbeat_ack().sequence() == sequence_;
  }
  void Submit(const std::string& request_id) {
    v1::SubmitRequest request;
    request.set_request_id(request_id);
    v1::JobSpec& spec = *request.mutable_spec();
    spec.set_name("job");
    v1::ModelSpec& model = *spec.mutable_model();
    model.set_vocab_size(260);
    model.set_hidden_size(32);
    model.set_num_layers(1);
    model.set_num_heads(4);
    model.set_num_kv_heads(4);
    model.set_head_dim(8);
    model.set_intermediate_size(64);
    spec.mutable_data()->set_path("/nowhere");
    spec.mutable_parallel()->set_ranks(1);
    spec.mutable_parallel()->set_method(v1::METHOD_ULYSSES);
    spec.mutable_train()->set_context(64);
    spec.mutable_train()->set_steps(1);
    loop_->Post(SubmitCall{std::move(request), [this](absl::StatusOr<v1::SubmitResponse> reply) {
                             replies_.TryPush(reply.status());
                           }});
  }
  v1::NodeState StateOf(const v1::ListNodesResponse& nodes, const std::string& worker) {
    for (const v1::Node& node : nodes.nodes()) {
      if (node.worker() == worker) return node.state();
    }
    return v1::NODE_STATE_UNSPECIFIED;
  }

  FaultyDisk disk_;
  Gate gate_;
  std::string folder_;
  std::unique_ptr<SqliteStore> store_;
  std::unique_ptr<Ballast> ballast_;
  BoundedQueue<absl::Status> failures_{8};
  BoundedQueue<absl::Status> replies_{4096};
  std::unique_ptr<Loop> loop_;
  std::thread deciding_;
  uint64_t sequence_ = 0;
};

TEST_F(SlowDiskTest, AHangingCommitLosesNoHeartbeatAndHoldsItsAnswers) {
  const auto busy = Join(1, "busy"), silent = Join(2, "silent");
  ASSERT_TRUE(Greeted(*busy) && Greeted(*silent));
  gate_.Shut();
  // More steps than fit into one commit, or into a queue that would block.
  constexpr int kSubmits = 600;
  for (int i = 0; i < kSubmits; ++i) Submit(absl::StrCat("request-", i));
  ASSERT_TRUE(gate_.SomebodyWaits());
  const auto late = Join(3, "late");
  const BootTime begin = SystemClock().Now();
  while (SystemClock().Now() - begin < absl::Milliseconds(1500)) {  // SUSPECT is 600 ms
    ASSERT_TRUE(Beat(1, busy)) << "after " << SystemClock().Now() - begin;
    absl::SleepFor(absl::Milliseconds(50));
  }
  BoundedQueue<v1::ListNodesResponse> listed{1};
  loop_->Post(ListNodesCall{
      [&](absl::StatusOr<v1::ListNodesResponse> nodes) { listed.TryPush(*std::move(nodes)); }});
  ASSERT_TRUE(Beat(1, busy));  // the loop has taken what came before
  // What was decided is not durable: neither answers nor greetings leave.
  EXPECT_EQ(replies_.size(), 0u);
  EXPECT_EQ(listed.size(), 0u);
  EXPECT_EQ(late->sent.size(), 0u);
  gate_.Open();
  for (int i = 0; i < kSubmits; ++i) {
    const auto reply = replies_.PopFor(kPatience);
    ASSERT_TRUE(reply && reply->ok()) << i;
  }
  EXPECT_TRUE(Greeted(*late));
  const auto nodes = listed.PopFor(kPatience);
  ASSERT_TRUE(nodes);
  EXPECT_EQ(StateOf(*nodes, "busy"), v1::NODE_STATE_READY);
  EXPECT_EQ(StateOf(*nodes, "silent"), v1::NODE_STATE_SUSPECT);
}

TEST_F(SlowDiskTest, AnAcknowledgementNeverOvertakesItsGreeting) {
  gate_.Shut();
  const auto worker = Join(1, "worker");
  v1::WorkerMessage message;
  message.set_sequence(1);
  message.mutable_heartbeat();
  loop_->Post(SessionMessage{1, worker, message});
  ASSERT_TRUE(gate_.SomebodyWaits());
  gate_.Open();
  EXPECT_TRUE(Greeted(*worker));
  const auto ack = worker->sent.PopFor(kPatience);
  ASSERT_TRUE(ack);
  EXPECT_EQ(ack->heartbeat_ack().sequence(), 1u);
}

TEST_F(SlowDiskTest, AnswersThatPileUpBehindAHangingCommitAreBounded) {
  const auto worker = Join(1, "worker");
  ASSERT_TRUE(Greeted(*worker));
  gate_.Shut();
  Submit("first");
  ASSERT_TRUE(gate_.SomebodyWaits());
  constexpr int kCalls = 6000;
  BoundedQueue<absl::Status> answers{kCalls};
  for (int call = 0; call < kCalls; ++call) {
    while (!loop_->Post(ListNodesCall{
        [&](absl::StatusOr<v1::ListNodesResponse> nodes) { answers.TryPush(nodes.status()); }})) {
      std::this_thread::yield();
    }
  }
  ASSERT_TRUE(Beat(1, worker));  // the loop has taken them all, and workers are heard
  const size_t refused = answers.size();
  ASSERT_GT(refused, 1000u);
  EXPECT_LT(refused, 2000u);
  EXPECT_TRUE(HasReason(*answers.Pop(), Reason::kCoordinatorBusy));
  gate_.Open();
  size_t answered = 1;
  for (; answered < kCalls && answers.PopFor(kPatience); ++answered) {
  }
  EXPECT_EQ(answered, static_cast<size_t>(kCalls));
}

TEST_F(SlowDiskTest, AFailedSyncIsToldOnceAndNothingIsAnswered) {
  const auto worker = Join(1, "worker");
  ASSERT_TRUE(Greeted(*worker));
  disk_.Arm(FaultyDisk::Fault::kSyncError, 1);
  Submit("lost");
  const auto failure = failures_.PopFor(kPatience);
  ASSERT_TRUE(failure);
  EXPECT_EQ(failure->code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(failure->message()), ::testing::HasSubstr("/store: disk I/O error"));
  Submit("later");
  ASSERT_TRUE(Beat(1, worker));
  EXPECT_EQ(replies_.size(), 0u);
  EXPECT_EQ(failures_.size(), 0u);
}

}  // namespace
}  // namespace upipe::coordinator
