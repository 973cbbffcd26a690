#include "client/node_commands.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/follow.h"
#include "client/render.h"
#include "client/report.h"
#include "common/errors/rpc_error.h"
#include "common/units.h"

namespace upipe::client {
namespace {

constexpr absl::Duration kDrainPoll = absl::Milliseconds(500);

std::string NodeAnswer(const Console& console, const v1::Node& node) {
  if (console.json) return RenderJson(node);
  return absl::StrCat(Printable(node.worker()), "  ", NodeStateText(node), "  ", SlotsText(node),
                      "\n");
}

int Answer(Console& console, const absl::StatusOr<v1::Node>& node) {
  if (!node.ok()) return Report(console, node.status());
  console.out << NodeAnswer(console, *node);
  return kExitDone;
}

// A quarantined slot is not waited for: only its worker's end frees it.
bool IsTaken(const v1::Slot& slot) {
  return !slot.job_id().empty() && slot.state() != v1::SLOT_STATE_QUARANTINED;
}

bool IsDrained(const v1::Node& node) {
  return std::none_of(node.slots().begin(), node.slots().end(), IsTaken);
}

absl::StatusOr<v1::Node> FindNode(Console& console, const std::string& worker) {
  const absl::StatusOr<v1::ListNodesResponse> nodes = console.coordinator.ListNodes();
  if (!nodes.ok()) return nodes.status();
  for (const v1::Node& node : nodes->nodes()) {
    if (node.worker() == worker) return node;
  }
  return RpcError(Reason::kNodeNotFound,
                  absl::StrCat("no worker is called '", worker, "'; `upipe nodes` shows all"),
                  {{"worker", worker}});
}

// The node once no slot is taken; DeadlineExceeded names the jobs that are still there.
absl::StatusOr<v1::Node> AwaitDrained(Console& console, const DrainOptions& options) {
  const BootTime end = console.clock.Now() + options.timeout;
  std::optional<Outage> outage(std::in_place, console, kOutageLimit);
  while (true) {
    const absl::StatusOr<v1::Node> node = FindNode(console, options.worker);
    if (!node.ok() && !IsOutage(node.status())) return node;
    if (!node.ok()) {
      if (!outage->PauseBeforeRetry(node.status())) return node;
      continue;
    }
    outage.emplace(console, kOutageLimit);
    if (IsDrained(*node)) return node;
    if (console.clock.Now() >= end) {
      std::vector<std::string> left;
      for (const v1::Slot& slot : node->slots()) {
        if (IsTaken(slot)) {
          left.push_back(absl::StrCat("rank ", slot.rank(), " of ", slot.job_id()));
        }
      }
      return RpcError(
          Reason::kNodeNotDrained,
          absl::StrCat(options.worker, " was not drained within ", FormatTimeSpan(options.timeout),
                       ": still there: ", absl::StrJoin(left, ", "),
                       "; `upipe why JOB` tells what it "
                       "waits for"),
          {{"worker", options.worker}, {"ranks", left.size()}});
    }
    console.pause(kDrainPoll);
  }
}

// True when the operator's word was given, here or by --yes.
bool IsConfirmed(const NodeWord& word, const std::string& sentence) {
  if (word.yes) return true;
  if (!word.ask) return false;
  const std::optional<std::string> typed =
      word.ask(absl::StrCat(sentence, "\nType the worker's name to go on: "));
  return typed.has_value() && *typed == word.worker;
}

int NotConfirmed(Console& console, const NodeWord& word, const std::string& sentence) {
  return Report(console, RpcError(Reason::kNotConfirmed,
                                  absl::StrCat(sentence,
                                               " Not confirmed, so nothing was done; "
                                               "--yes gives the word beforehand."),
                                  {{"worker", word.worker}}));
}

}  // namespace

int Nodes(Console& console) {
  const absl::StatusOr<v1::ListNodesResponse> nodes = console.coordinator.ListNodes();
  if (!nodes.ok()) return Report(console, nodes.status());
  console.out << (console.json ? RenderJson(*nodes) : RenderNodes(*nodes));
  return kExitDone;
}

int Cordon(Console& console, const std::string& worker, const std::string& reason) {
  v1::CordonRequest request;
  request.set_worker(worker);
  request.set_reason(reason);
  return Answer(console, console.coordinator.Cordon(request));
}

int Uncordon(Console& console, const std::string& worker) {
  return Answer(console, console.coordinator.Uncordon(worker));
}

int Drain(Console& console, const DrainOptions& options) {
  v1::DrainRequest request;
  request.set_worker(options.worker);
  request.set_reason(options.reason);
  if (options.grace) request.set_grace_millis(absl::ToInt64Milliseconds(*options.grace));
  absl::StatusOr<v1::DrainResponse> drain = console.coordinator.Drain(request);
  if (!drain.ok()) return Report(console, drain.status());
  if (options.wait) {
    if (!console.json && drain->job_ids_size() > 0) {
      Note(console, absl::StrCat("told to leave: ", absl::StrJoin(drain->job_ids(), ", ")));
    }
    const absl::StatusOr<v1::Node> node = AwaitDrained(console, options);
    if (!node.ok()) {
      Report(console, node.status());
      return HasReason(node.status(), Reason::kNodeNotDrained) ? kExitTimeout : kExitFailed;
    }
    *drain->mutable_node() = *node;
  }
  if (console.json) {
    console.out << RenderJson(*drain);
    return kExitDone;
  }
  console.out << NodeAnswer(console, drain->node());
  if (!options.wait && drain->job_ids_size() > 0) {
    console.out << "told to leave: " << Printable(absl::StrJoin(drain->job_ids(), ", ")) << "\n";
  }
  return kExitDone;
}

int FenceNode(Console& console, const NodeWord& word) {
  const std::string sentence = absl::StrCat(
      "Fencing ", Printable(word.worker),
      " is your word that its machine is off or can no longer reach the checkpoint folder: its "
      "jobs start elsewhere at once. If its trainers still run, two of them train one job.");
  if (!IsConfirmed(word, sentence)) return NotConfirmed(console, word, sentence);
  return Answer(console, console.coordinator.FenceNode(word.worker));
}

int ForgetNode(Console& console, const NodeWord& word) {
  const std::string sentence =
      absl::StrCat("Forgetting ", Printable(word.worker),
                   " drops what the coordinator knows of it, its logs become unreachable. It is "
                   "known again when its worker says hello.");
  if (!IsConfirmed(word, sentence)) return NotConfirmed(console, word, sentence);
  const absl::Status forgotten = console.coordinator.ForgetNode(word.worker);
  if (!forgotten.ok()) return Report(console, forgotten);
  console.out << (console.json ? RenderJson(v1::ForgetNodeResponse())
                               : absl::StrCat(Printable(word.worker), "  forgotten\n"));
  return kExitDone;
}

}  // namespace upipe::client
