// Workers: hello and reconciliation (CONTROL-PLANE, Timing 3 and 4), silence, and what is said
// again as time passes.
#include <algorithm>
#include <tuple>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/check.h"
#include "common/errors/rpc_error.h"
#include "common/units.h"
#include "coordinator/core/turn.h"

namespace upipe::coordinator {
namespace {

constexpr int kMaxSlots = 1024;
constexpr size_t kMaxSuperseded = 16;
constexpr size_t kMaxHelloTextBytes = 256;  // of each of its texts: all are stored
constexpr int64_t kMaxGeneration = int64_t{1} << 48;

bool IsWorkerName(const std::string& name) {
  return !name.empty() && name.size() <= 63 && std::all_of(name.begin(), name.end(), [](char c) {
    return absl::ascii_isalnum(static_cast<unsigned char>(c)) || c == '.' || c == '_' || c == '-';
  });
}

std::vector<FieldViolation> HelloViolations(const v1::Hello& hello) {
  std::vector<FieldViolation> violations;
  if (!IsWorkerName(hello.worker())) {
    violations.push_back(
        {"hello.worker", absl::StrCat("'", hello.worker(), "' is not [a-zA-Z0-9._-]{1,63}")});
  }
  if (hello.num_slots() < 1 || hello.num_slots() > kMaxSlots) {
    violations.push_back(
        {"hello.num_slots", absl::StrCat("is ", hello.num_slots(), ", must be 1 to ", kMaxSlots)});
  }
  if (hello.incarnation().empty()) {
    violations.push_back({"hello.incarnation", "is empty; it names one start of the worker"});
  }
  if (hello.state_id().empty()) {
    violations.push_back({"hello.state_id", "is empty; it names the worker's state folder"});
  }
  const std::pair<const char*, int64_t> numbers[] = {
      {"hello.start_number", hello.start_number()},
      {"hello.session_number", hello.session_number()}};
  for (const auto& [field, number] : numbers) {
    if (number >= 1) continue;
    violations.push_back({field, absl::StrCat("is ", number, ", must be 1 or more")});
  }
  if (hello.memory_per_rank_bytes() < 1) {
    violations.push_back(
        {"hello.memory_per_rank_bytes",
         absl::StrCat("is ", hello.memory_per_rank_bytes(), ", must be 1 or more")});
  }
  const std::pair<const char*, const std::string&> texts[] = {
      {"hello.node_id", hello.node_id()},
      {"hello.incarnation", hello.incarnation()},
      {"hello.state_id", hello.state_id()},
      {"hello.containment", hello.containment()},
      {"hello.metrics_address", hello.metrics_address()},
      {"hello.isa", hello.isa()},
      {"hello.version", hello.version()},
      {"hello.backend", hello.backend()}};
  for (const auto& [field, text] : texts) {
    if (text.size() <= kMaxHelloTextBytes) continue;
    violations.push_back(
        {field, absl::StrCat("has ", text.size(), " bytes, at most ", kMaxHelloTextBytes)});
  }
  if (hello.devices_size() > std::max(0, hello.num_slots())) {
    violations.push_back({"hello.devices", absl::StrCat("are ", hello.devices_size(), " for ",
                                                        hello.num_slots(), " slots")});
  }
  for (const auto& [job, generation] : hello.newest_generations()) {
    if (generation >= 0 && generation <= kMaxGeneration) continue;
    violations.push_back({"hello.newest_generations",
                          absl::StrCat("is ", generation, ", must be 0 to ", kMaxGeneration)});
    break;
  }
  for (const v1::RankReport& report : hello.ranks()) {
    const std::vector<FieldViolation> found = ReportViolations(report, "hello.ranks");
    violations.insert(violations.end(), found.begin(), found.end());
    if (!found.empty()) break;
  }
  return violations;
}

v1::NodeRecord RecordOf(const v1::Hello& hello) {
  v1::NodeRecord record;
  record.set_worker(hello.worker());
  record.set_node_id(hello.node_id());
  record.set_incarnation(hello.incarnation());
  record.set_state_id(hello.state_id());
  record.set_start_number(hello.start_number());
  record.set_num_slots(hello.num_slots());
  record.set_memory_per_rank_bytes(hello.memory_per_rank_bytes());
  record.set_metrics_address(hello.metrics_address());
  record.set_containment(hello.containment());
  record.set_isa(hello.isa());
  record.set_version(hello.version());
  record.set_backend(hello.backend());
  record.set_insecure_listen(hello.insecure_listen());
  return record;
}

// A dead stream may deliver a hello after a later one was heard, of a start this coordinator never
// met, too.
bool IsOld(const v1::Hello& hello, const Node& node) {
  const auto& superseded = node.superseded;
  if (std::find(superseded.begin(), superseded.end(), hello.incarnation()) != superseded.end()) {
    return true;
  }
  return hello.state_id() == node.record.state_id() &&
         std::pair(hello.start_number(), hello.session_number()) <
             std::pair(node.record.start_number(), node.session_number);
}

std::string LeavingText(const Node& node) {
  return absl::StrCat("worker ", node.record.worker(), " leaves");
}

}  // namespace

Node* Turn::FindNode(const std::string& worker) {
  const auto found = state_.nodes.find(worker);
  return found == state_.nodes.end() ? nullptr : &found->second;
}

absl::Status HelloMissing() {
  return RpcError(Reason::kHelloMissing, "no hello on this session; say hello first");
}

Node* Turn::NodeOf(SessionId session) {
  const auto found = state_.worker_of_session.find(session);
  return found == state_.worker_of_session.end() ? nullptr : FindNode(found->second);
}

bool Turn::IsReachable(const std::string& worker) {
  const Node* node = FindNode(worker);
  return node != nullptr && StateOf(state_, *node, now_.boot) == v1::NODE_STATE_READY;
}

absl::Status Turn::CheckHello(const HelloReceived& event) {
  const v1::Hello& hello = event.hello;
  const std::vector<FieldViolation> violations = HelloViolations(hello);
  if (!violations.empty()) {
    return InvalidFields(Reason::kHelloInvalid, violations, {{"worker", hello.worker()}});
  }
  if (hello.epoch() > state_.epoch) {
    return RpcError(
        Reason::kEpochSuperseded,
        absl::StrCat("worker ", hello.worker(), " has seen epoch ", hello.epoch(),
                     ", this coordinator is at ", state_.epoch, ": it is not the latest one"),
        {{"worker", hello.worker()}, {"seen_epoch", hello.epoch()}, {"epoch", state_.epoch}});
  }
  const Node* known = FindNode(hello.worker());
  if (known == nullptr) return absl::OkStatus();
  const bool same = known->record.incarnation() == hello.incarnation();
  if (!Holds(Guard::kHelloIsLater, !IsOld(hello, *known))) {
    return RpcError(Reason::kSessionReplaced,
                    absl::StrCat("worker ", hello.worker(), " has said a later hello"),
                    {{"worker", hello.worker()}});
  }
  if (!same && known->session != event.session &&
      StateOf(state_, *known, now_.boot) == v1::NODE_STATE_READY) {
    return RpcError(Reason::kWorkerNameTaken,
                    absl::StrCat("another worker named ", hello.worker(),
                                 " is connected; give this one another --name"),
                    {{"worker", hello.worker()}});
  }
  if (same && known->record.num_slots() != hello.num_slots()) {
    return InvalidFields(
        Reason::kHelloInvalid,
        {{"hello.num_slots", absl::StrCat("was ", known->record.num_slots(), ", is ",
                                          hello.num_slots(), " without a new incarnation")}},
        {{"worker", hello.worker()}});
  }
  return absl::OkStatus();
}

void Turn::Handle(const HelloReceived& event) {
  const absl::Status problem = CheckHello(event);
  if (!problem.ok()) return Close(event.session, problem);
  const v1::Hello& hello = event.hello;
  const bool known = state_.nodes.contains(hello.worker());
  Node& node = state_.nodes[hello.worker()];
  const bool new_incarnation = known && node.record.incarnation() != hello.incarnation();
  if (new_incarnation) {
    node.superseded.push_back(node.record.incarnation());
    if (node.superseded.size() > kMaxSuperseded) node.superseded.erase(node.superseded.begin());
  }
  if (node.session != 0 && node.session != event.session) {
    Close(node.session,
          RpcError(Reason::kSessionReplaced, "replaced by a newer session of this worker",
                   {{"worker", hello.worker()}}));
  }
  v1::NodeRecord record = RecordOf(hello);
  record.set_cordoned(node.record.cordoned());
  record.set_cordon_reason(node.record.cordon_reason());
  if (record.SerializeAsString() != node.record.SerializeAsString()) {
    dirty_nodes_.insert(hello.worker());
    if (record.num_slots() > node.record.num_slots()) state_.last_node_joined = now_.boot;
    node.record = std::move(record);
    Note(absl::StrCat("worker ", hello.worker(), " on node ", hello.node_id(), ": ",
                      hello.num_slots(), " slots, ", FormatBytes(hello.memory_per_rank_bytes()),
                      " per rank", new_incarnation ? ", restarted" : ""));
  }
  node.session = event.session;
  node.session_number = hello.session_number();
  state_.worker_of_session[event.session] = hello.worker();
  node.last_heard = now_.boot;
  node.greeted = true;
  node.lost = false;
  node.leaving = hello.leaving();
  node.suspect_told = false;
  v1::CoordinatorMessage ack;
  ack.mutable_hello_ack()->set_epoch(state_.epoch);
  *ack.mutable_hello_ack()->mutable_timing() = state_.timing.ToProto();
  Send(node, std::move(ack));
  Adopt(node, event, new_incarnation);
}

void Turn::Adopt(Node& node, const HelloReceived& event, bool new_incarnation) {
  const size_t num_slots = node.record.num_slots();
  // A restarted worker may have fewer slots; what it says about the old ones is heard first.
  node.slots.resize(std::max(node.slots.size(), num_slots));
  for (Slot& slot : node.slots) slot.stray.reset();
  for (const v1::RankReport& report : event.hello.ranks()) ApplyReport(node, report);
  // Before what is unlisted: a start that never arrived is awaited only where it still may.
  LearnGenerations(event.hello);
  ReleaseUnlisted(node, event.hello, new_incarnation);
  node.slots.resize(num_slots);
  NoteDevices(node, event.hello.devices());
  for (const std::string& id : state_.active) ResendJob(state_.jobs.at(id), &node);
  if (node.leaving) Vacate(node, state_.timing.drain_grace, LeavingText(node));
}

// After a restore of the store workers may have seen later generations than it knows: the next one
// is above them, and what the store takes for the latest is over.
void Turn::LearnGenerations(const v1::Hello& hello) {
  const std::map<std::string, int64_t> seen(hello.newest_generations().begin(),
                                            hello.newest_generations().end());
  for (const auto& [id, generation] : seen) {
    Job* job = FindJob(id);
    if (job == nullptr || IsTerminal(job->record.state()) ||
        generation <= std::max(job->record.generation(), job->record.minimum_generation())) {
      continue;
    }
    job->record.set_minimum_generation(generation);
    AddEvent(*job, "RESTORED",
             absl::StrCat("worker ", hello.worker(), " has seen generation ", generation,
                          ", the store knows ", job->record.generation()));
    if (!state_.active.contains(id)) continue;
    Restart(*job, v1::CAUSE_KIND_NODE_LOST,
            absl::StrCat("the store is older than generation ", generation, ", seen by worker ",
                         hello.worker()));
  }
}

void Turn::ReleaseUnlisted(Node& node, const v1::Hello& hello, bool new_incarnation) {
  std::set<std::tuple<std::string, int64_t, std::string, int32_t>> listed;
  for (const v1::RankReport& report : hello.ranks()) {
    const v1::Fence& fence = report.ref().fence();
    listed.emplace(fence.job_id(), fence.generation(), fence.nonce(), report.ref().rank());
  }
  for (Slot& slot : node.slots) {
    if (!slot.holder) continue;
    const SlotHolder& holder = *slot.holder;
    if (listed.contains({holder.job_id, holder.generation, holder.nonce, holder.rank})) continue;
    RankLost(node, slot, new_incarnation);
  }
}

// The worker does not know the rank that holds this slot: a proof that it is gone, unless its Start
// never arrived. One that a restored store knows as placed is not started now: a later generation
// may have been.
void Turn::RankLost(Node& node, Slot& slot, bool new_incarnation) {
  const SlotHolder holder = *slot.holder;
  const v1::Fence fence = FenceOf(holder);
  Job* job = FindJob(holder.job_id);
  v1::RankRecord* rank = job == nullptr ? nullptr : MatchingRank(*job, fence, holder.rank);
  if (rank != nullptr && job->record.state() == v1::JOB_STATE_STARTING && !new_incarnation &&
      !state_.restored && rank->state() == v1::RANK_STATE_PLACED) {
    return;
  }
  slot.Release();
  if (job == nullptr) return;
  if (rank == nullptr || !state_.active.contains(holder.job_id)) {
    return NoteGone(*job, fence, holder.rank);
  }
  if (rank->state() == v1::RANK_STATE_GONE) return;
  rank->set_state(v1::RANK_STATE_GONE);
  Fired(Row::kRankGone);
  Dirty(*job);
  if (!IsFinished(*rank)) {
    if (new_incarnation && job->record.state() != v1::JOB_STATE_STOPPING) {
      Fired(Row::kNewIncarnation);
    }
    Restart(
        *job, v1::CAUSE_KIND_NODE_LOST,
        absl::StrCat("worker ", node.record.worker(),
                     new_incarnation ? " restarted; that ended rank " : " no longer knows rank ",
                     holder.rank),
        holder.rank);
  }
  if (state_.active.contains(holder.job_id)) Advance(*job);
  EndIfGone(*job);
}

void Turn::Handle(const HeartbeatReceived& event) {
  Node* node = NodeOf(event.session);
  if (node == nullptr) return Close(event.session, HelloMissing());
  node->last_heard = now_.boot;
  node->suspect_told = false;
  NotePositions(*node, event.heartbeat);
  NoteDevices(*node, event.heartbeat.devices());
  if (event.heartbeat.leaving()) {
    node->leaving = true;
    Vacate(*node, state_.timing.drain_grace, LeavingText(*node));
  }
  v1::CoordinatorMessage ack;
  ack.mutable_heartbeat_ack()->set_sequence(event.sequence);
  Send(*node, std::move(ack));
}

// A sick device takes no new ranks; the other slots of its node do. What its own rank meets there
// is told by that rank.
void Turn::NoteDevices(Node& node, const DeviceList& devices) {
  for (size_t s = 0; s < node.slots.size(); ++s) {
    v1::SlotDevice device;
    if (static_cast<int>(s) < devices.size()) device = devices[static_cast<int>(s)];
    for (std::string* text : {device.mutable_name(), device.mutable_uuid(), device.mutable_sick()})
      text->resize(std::min(text->size(), kMaxHelloTextBytes));
    v1::SlotDevice& known = node.slots[s].device;
    if (device.sick() != known.sick()) {
      Note(absl::StrCat("worker ", node.record.worker(), ", slot ", s, ": ",
                        device.sick().empty()
                            ? "its device is well again"
                            : absl::StrCat("its device is sick: ", device.sick())));
    }
    known = std::move(device);
  }
}

void Turn::Handle(const SessionClosed& event) {
  Node* node = NodeOf(event.session);
  state_.worker_of_session.erase(event.session);
  if (node != nullptr && node->session == event.session) node->session = 0;
}

void Turn::Handle(const Tick&) {
  DropEnded();
  for (auto& [worker, node] : state_.nodes) CheckSilence(node);
  const std::set<std::string> active = state_.active;
  for (const std::string& id : active) {
    Job& job = state_.jobs.at(id);
    CheckStartDeadline(job);
    CheckStall(job);
    CheckTimeLimit(job);
    EndIfGone(job);
  }
  if (now_.boot >= state_.next_resend) {
    state_.next_resend = now_.boot + state_.timing.heartbeat;
    ResendAll();
  }
}

void Turn::CheckSilence(Node& node) {
  if (node.lost) return;
  const absl::Duration silent = now_.boot - node.last_heard;
  if (Holds(Guard::kExpiryOver, silent >= state_.timing.Expiry()) &&
      silent >= state_.timing.SuspectAfter()) {
    Fired(Row::kNodeLost);
    return LoseNode(node, absl::StrCat("worker ", node.record.worker(), " is lost: silent for ",
                                       FormatTimeSpan(silent)));
  }
  if (silent < state_.timing.SuspectAfter() || !node.greeted || node.suspect_told) return;
  node.suspect_told = true;
  Fired(Row::kSuspect);
  TellJobs(
      node, "SUSPECT",
      absl::StrCat("worker ", node.record.worker(), " is silent for ", FormatTimeSpan(silent)));
}

void Turn::TellJobs(const Node& node, absl::string_view kind, const std::string& message) {
  Note(message);
  std::set<std::string> told;
  for (const Slot& slot : node.slots) {
    if (!slot.holder || !state_.active.contains(slot.holder->job_id)) continue;
    if (told.insert(slot.holder->job_id).second) {
      AddEvent(state_.jobs.at(slot.holder->job_id), kind, message);
    }
  }
}

// Its ranks are presumed gone; its slots stay unknown until it says hello.
void Turn::LoseNode(Node& node, const std::string& message) {
  node.lost = true;
  node.greeted = false;
  if (node.session != 0) {
    Close(node.session,
          RpcError(Reason::kSessionExpired, "silent past the expiry; say hello again",
                   {{"worker", node.record.worker()},
                    {"expiry_seconds", absl::ToDoubleSeconds(state_.timing.Expiry())}}));
    node.session = 0;
  }
  TellJobs(node, "NODE_LOST", message);
  for (const Slot& slot : node.slots) {
    if (!slot.holder) continue;
    Job* job = FindJob(slot.holder->job_id);
    v1::RankRecord* rank =
        job == nullptr ? nullptr : MatchingRank(*job, FenceOf(*slot.holder), slot.holder->rank);
    if (rank == nullptr || rank->state() >= v1::RANK_STATE_GONE) continue;
    rank->set_state(v1::RANK_STATE_PRESUMED_GONE);
    Dirty(*job);
    if (!state_.active.contains(slot.holder->job_id)) continue;
    if (!IsFinished(*rank)) {
      Restart(*job, v1::CAUSE_KIND_NODE_LOST, message, slot.holder->rank);
    }
    if (state_.active.contains(slot.holder->job_id)) Advance(*job);
    EndIfGone(*job);
  }
}

// What `only` (or every worker) should have been told about a job and may have missed.
void Turn::ResendJob(const Job& job, const Node* only) {
  if (job.record.state() == v1::JOB_STATE_STOPPING) return SendStops(job);
  if (job.record.state() == v1::JOB_STATE_RUNNING) return SendRetain(job, only);
  if (job.record.state() != v1::JOB_STATE_STARTING) return;
  std::set<std::string> meeting;
  for (int r = 0; r < job.attempt->record.ranks_size(); ++r) {
    const v1::RankRecord& rank = job.attempt->record.ranks(r);
    const Node* node = FindNode(rank.worker());
    if (node == nullptr || (only != nullptr && node != only)) continue;
    if (rank.state() == v1::RANK_STATE_PLACED) SendStart(job, r);
    if (rank.state() < v1::RANK_STATE_RUNNING) meeting.insert(rank.worker());
  }
  if (!job.attempt->peers_sent) return;
  for (const std::string& worker : meeting) SendPeers(job, *FindNode(worker));
  SendRetain(job, only);
}

void Turn::ResendAll() {
  for (const std::string& id : state_.active) ResendJob(state_.jobs.at(id), nullptr);
  // Ranks of no live attempt that still hold a slot.
  for (auto& [worker, node] : state_.nodes) {
    for (size_t s = 0; s < node.slots.size(); ++s) {
      const Slot& slot = node.slots[s];
      if (!slot.holder) continue;
      const Job* job = FindJob(slot.holder->job_id);
      if (job != nullptr && state_.active.contains(slot.holder->job_id) &&
          job->record.generation() == slot.holder->generation) {
        continue;
      }
      SendStop(node, FenceOf(*slot.holder), absl::ZeroDuration(), "superseded or ended",
               {RankSlotOf(slot.holder->rank, static_cast<int>(s))});
    }
  }
}

}  // namespace upipe::coordinator
