// Drives the coordinator's core as its shell would: a clock that moves when told, a store every
// step is committed to, and what left for whom. Shared by unit tests and simulator.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "common/check.h"
#include "coordinator/core/state.h"
#include "coordinator/core/step.h"
#include "coordinator/core/view.h"
#include "coordinator/store/memory_store.h"

namespace upipe::coordinator {

inline v1::JobSpec SpecOf(int ranks) {
  v1::JobSpec spec;
  spec.set_name("job");
  spec.mutable_parallel()->set_ranks(ranks);
  return spec;
}

inline v1::PlanResult PlanOf(int ranks, int64_t bytes_per_rank = 100) {
  v1::PlanResult result;
  result.mutable_plan()->set_plan_hash(77);
  for (int r = 0; r < ranks; ++r) {
    result.mutable_plan()->add_ranks()->mutable_memory()->set_arena_bytes(bytes_per_rank);
  }
  return result;
}

inline v1::Hello HelloOf(const std::string& worker, int slots,
                         const std::string& incarnation = "i1", int64_t bytes_per_rank = 1000) {
  int64_t start_number = 0;
  UPIPE_CHECK(absl::SimpleAtoi(incarnation.substr(1), &start_number)) << incarnation;
  v1::Hello hello;
  hello.set_worker(worker);
  hello.set_node_id(worker);
  hello.set_incarnation(incarnation);
  hello.set_state_id(worker);
  hello.set_start_number(start_number);
  hello.set_session_number(1);
  hello.set_num_slots(slots);
  hello.set_memory_per_rank_bytes(bytes_per_rank);
  return hello;
}

class CoreDriver {
 public:
  explicit CoreDriver(MemoryStore& store) : store_(store) {
    now_.boot = {absl::Hours(1)};
    Restart();
  }

  // A new coordinator on the same store.
  void Restart() {
    Actions actions;
    auto state = LoadState(store_, {Timing(), [this] { return absl::StrCat("nonce", ++nonces_); }},
                           now_, &actions);
    UPIPE_CHECK_OK(state.status());
    state_ = *std::move(state);
    UPIPE_CHECK_OK(store_.Commit(actions.batches).status());
    UPIPE_CHECK(store_.Revision() == state_.revision);
  }

  // One step, committed; its actions are kept until the next one.
  const std::vector<Action>& Do(const Event& event) {
    Actions result = Step(state_, event, now_);
    batches_ = result.batches;
    actions_ = std::move(result.actions);
    UPIPE_CHECK_OK(store_.Commit(batches_).status());
    UPIPE_CHECK(store_.Revision() == state_.revision);
    return actions_;
  }
  void Advance(absl::Duration time) {
    now_.boot = now_.boot + time;
    now_.unix_millis += absl::ToInt64Milliseconds(time);
  }

  // Actions of one kind from the last step.
  template <typename T>
  std::vector<T> Last() const {
    std::vector<T> found;
    for (const Action& action : actions_) {
      if (const T* match = std::get_if<T>(&action)) found.push_back(*match);
    }
    return found;
  }
  // Messages of one kind to one session from the last step.
  std::vector<v1::CoordinatorMessage> Sent(SessionId session,
                                           v1::CoordinatorMessage::KindCase kind) const {
    std::vector<v1::CoordinatorMessage> found;
    for (const SendToWorker& send : Last<SendToWorker>()) {
      if (send.session == session && send.message.kind_case() == kind)
        found.push_back(send.message);
    }
    return found;
  }

  State& state() { return state_; }
  const Job& job(const std::string& id) const { return state_.jobs.at(id); }
  v1::JobState JobStateOf(const std::string& id) const { return job(id).record.state(); }
  const std::vector<Batch>& batches() const { return batches_; }
  Moment now() const { return now_; }

 private:
  MemoryStore& store_;
  Moment now_;
  int nonces_ = 0;
  State state_;
  std::vector<Batch> batches_;
  std::vector<Action> actions_;
};

}  // namespace upipe::coordinator
