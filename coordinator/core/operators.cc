// The operator's word about workers: cordon, drain, uncordon, fence, forget.
#include "absl/strings/str_cat.h"
#include "common/errors/rpc_error.h"
#include "common/units.h"
#include "coordinator/core/turn.h"
#include "coordinator/core/view.h"

namespace upipe::coordinator {
namespace {

absl::Status NotSilent(const Node& node, absl::string_view what) {
  return RpcError(Reason::kNodeNotSilent, absl::StrCat("worker ", node.record.worker(), " ", what),
                  {{"worker", node.record.worker()}});
}

}  // namespace

Node* Turn::FindNode(CallId call, const std::string& worker) {
  Node* node = FindNode(worker);
  if (node == nullptr) {
    out_.actions.push_back(
        ReplyNode{call,
                  RpcError(Reason::kNodeNotFound, absl::StrCat("no worker named '", worker, "'"),
                           {{"worker", worker}}),
                  {}});
  }
  return node;
}

void Turn::ReplyWith(CallId call, const Node& node, std::vector<std::string> job_ids) {
  out_.actions.push_back(ReplyNode{call, ViewNode(state_, node, now_.boot), std::move(job_ids)});
}

void Turn::Cordon(Node& node, const std::string& reason) {
  if (node.record.cordoned() && node.record.cordon_reason() == reason) return;
  node.record.set_cordoned(true);
  node.record.set_cordon_reason(reason);
  dirty_nodes_.insert(node.record.worker());
  Note(absl::StrCat("worker ", node.record.worker(), " is cordoned: ", reason));
}

void Turn::Handle(const CordonReceived& event) {
  Node* node = FindNode(event.call, event.worker);
  if (node == nullptr) return;
  Cordon(*node, event.reason);
  ReplyWith(event.call, *node);
}

void Turn::Handle(const UncordonReceived& event) {
  Node* node = FindNode(event.call, event.worker);
  if (node == nullptr) return;
  if (node->record.cordoned()) {
    node->record.clear_cordoned();
    node->record.clear_cordon_reason();
    dirty_nodes_.insert(event.worker);
    Note(absl::StrCat("worker ", event.worker, " is uncordoned"));
  }
  ReplyWith(event.call, *node);
}

void Turn::Handle(const DrainReceived& event) {
  Node* node = FindNode(event.call, event.worker);
  if (node == nullptr) return;
  Cordon(*node, event.reason);
  std::vector<std::string> told =
      Vacate(*node, event.grace.value_or(state_.timing.drain_grace),
             absl::StrCat("worker ", event.worker, " is drained", event.reason.empty() ? "" : ": ",
                          event.reason));
  ReplyWith(event.call, *node, std::move(told));
}

std::vector<std::string> Turn::Vacate(const Node& node, absl::Duration grace,
                                      const std::string& why) {
  std::set<std::string> here;
  for (const Slot& slot : node.slots) {
    if (slot.holder && state_.active.contains(slot.holder->job_id))
      here.insert(slot.holder->job_id);
  }
  std::vector<std::string> told;
  for (const std::string& id : here) {
    Job& job = state_.jobs.at(id);
    bool unfinished = false;
    for (const v1::RankRecord& rank : job.attempt->record.ranks()) {
      unfinished |= rank.worker() == node.record.worker() && HoldsSlot(rank) && !IsFinished(rank);
    }
    if (!unfinished || job.record.state() == v1::JOB_STATE_STOPPING) continue;
    Fired(Row::kDrained);
    Stop(job, v1::STOP_INTENT_REQUEUE, MakeCause(v1::CAUSE_KIND_USER, why), grace);
    told.push_back(id);
  }
  return told;
}

void Turn::Handle(const FenceNodeReceived& event) {
  Node* node = FindNode(event.call, event.worker);
  if (node == nullptr) return;
  if (StateOf(state_, *node, now_.boot) == v1::NODE_STATE_READY) {
    out_.actions.push_back(ReplyNode{
        event.call,
        NotSilent(*node,
                  "is not silent; stop its machine first, for its ranks would be started a second "
                  "time"),
        {}});
    return;
  }
  if (!node->lost) {
    Fired(Row::kNodeFenced);
    LoseNode(*node, absl::StrCat("worker ", event.worker,
                                 " is fenced: its machine is off, says the operator"));
  }
  ReplyWith(event.call, *node);
}

void Turn::Handle(const ForgetNodeReceived& event) {
  Node* node = FindNode(event.call, event.worker);
  if (node == nullptr) return;
  if (!node->lost) {
    const bool ready = StateOf(state_, *node, now_.boot) == v1::NODE_STATE_READY;
    const std::string silence = FormatTimeSpan(now_.boot - node->last_heard);
    out_.actions.push_back(
        ReplyNode{event.call,
                  NotSilent(*node, ready ? "is not silent; only a lost or fenced one is forgotten"
                                         : absl::StrCat("is silent for ", silence,
                                                        " and not lost yet; fence it "
                                                        "first if its machine is off")),
                  {}});
    return;
  }
  for (const Slot& slot : node->slots) {
    const Job* job = slot.holder ? FindJob(slot.holder->job_id) : nullptr;
    if (job == nullptr || !state_.active.contains(slot.holder->job_id) ||
        job->record.generation() != slot.holder->generation) {
      continue;
    }
    out_.actions.push_back(ReplyNode{
        event.call,
        RpcError(Reason::kNodeInUse,
                 absl::StrCat("job ", slot.holder->job_id, " still has rank ", slot.holder->rank,
                              " on worker ", event.worker, "; try again once the job has moved on"),
                 {{"worker", event.worker}, {"job", slot.holder->job_id}}),
        {}});
    return;
  }
  ReplyWith(event.call, *node);
  Forget(event.worker);
}

void Turn::Forget(const std::string& worker) {
  const Node node = state_.nodes.at(worker);
  Note(absl::StrCat("worker ", worker, " is forgotten"));
  Drop(absl::StrCat("node/", worker), node.revision);
  dirty_nodes_.erase(worker);
  state_.nodes.erase(worker);
  // Nothing waits for proof from it any more; if it comes back, what it says is of no generation
  // that lives.
  for (const Slot& slot : node.slots) {
    Job* job = slot.holder ? FindJob(slot.holder->job_id) : nullptr;
    if (job == nullptr) continue;
    if (v1::RankRecord* rank = MatchingRank(*job, FenceOf(*slot.holder), slot.holder->rank)) {
      rank->set_forgotten(true);
      Dirty(*job);
      continue;
    }
    const auto earlier = job->earlier.find(slot.holder->generation);
    if (earlier == job->earlier.end()) continue;
    earlier->second.record.mutable_ranks(slot.holder->rank)->set_forgotten(true);
    SaveEarlier(*job, earlier->second);
  }
}

}  // namespace upipe::coordinator
