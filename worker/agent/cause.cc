#include "worker/agent/cause.h"

#include <algorithm>
#include <csignal>

#include "absl/strings/str_cat.h"

namespace upipe::worker {
namespace {

std::string SignalName(int signal) {
  const char* name = sigabbrev_np(signal);
  return name != nullptr ? absl::StrCat("SIG", name) : absl::StrCat("signal ", signal);
}

void DescribeSignal(const ProcessExit& exit, v1::Cause& cause, std::string& evidence) {
  const int signal = *exit.signal;
  cause.set_kind(v1::CAUSE_KIND_SIGNAL);
  cause.set_message(
      absl::StrCat("ended by ", SignalName(signal), ", which the worker did not send"));
  if (signal == SIGBUS) {
    evidence =
        "SIGBUS: a file it had mapped, such as a token shard, was cut short or is unreadable";
  }
  if (signal != SIGKILL) return;
  if (!exit.oom_evidence.empty()) {
    cause.set_kind(v1::CAUSE_KIND_OUT_OF_MEMORY);
    cause.set_message(
        "killed by the kernel: out of memory; give the worker fewer slots or the job more ranks");
    evidence = exit.oom_evidence;
  } else if (!exit.oom_counters_known) {
    cause.set_kind(v1::CAUSE_KIND_OUT_OF_MEMORY);
    cause.set_message("killed by a SIGKILL the worker did not send: probably out of memory");
    evidence = "SIGKILL we did not send (probable)";
  } else {
    evidence = "SIGKILL we did not send; no OOM kill was counted";
  }
}

void DescribeExitCode(const Rank& rank, const ProcessExit& exit, v1::Cause& cause) {
  const int code = exit.exit_code.value_or(-1);
  cause.set_kind(v1::CAUSE_KIND_EXIT_CODE);
  if (!rank.finished.has_value()) {
    cause.set_message(absl::StrCat("left with exit code ", code, " before it reported its end"));
    return;
  }
  const bool aborted = rank.finished->code() == static_cast<int>(absl::StatusCode::kAborted);
  if (rank.finished->device_fault()) {
    cause.set_kind(v1::CAUSE_KIND_DEVICE_FAULT);
  } else if (rank.finished->selfcheck_failed()) {
    cause.set_kind(v1::CAUSE_KIND_SELFCHECK);
  } else if (rank.finished->peer_failure()) {
    cause.set_kind(v1::CAUSE_KIND_PEER_FAILURE);
  } else if (aborted) {  // it held itself to the worker's deadline, before the worker did
    cause.set_kind(v1::CAUSE_KIND_NODE_LOST);
  }
  cause.set_message(
      absl::StrCat(rank.finished->message().empty() ? "reported success" : rank.finished->message(),
                   " (exit code ", code, ")"));
}

// The time of its worker was over: it may have left by itself a moment before the kill, and said so
// to nobody.
bool PastTheDeadline(const Rank& rank) {
  return rank.kill_sent && rank.kill_cause.kind() == v1::CAUSE_KIND_NODE_LOST;
}

}  // namespace

bool EndedWell(const Rank& rank, const ProcessExit& exit) {
  return exit.exit_code == 0 && rank.finished.has_value() && rank.finished->code() == 0;
}

bool LeftOnNotice(const Rank& rank, const ProcessExit& exit) {
  return exit.exit_code.has_value() && rank.finished.has_value() &&
         rank.finished->code() == static_cast<int>(absl::StatusCode::kCancelled);
}

bool SignalSentByWorker(const Rank& rank, const ProcessExit& exit) {
  return rank.kill_sent && !exit.died_before_kill && exit.signal == SIGKILL;
}

std::string DescribePosition(const v1::RankPosition& position) {
  std::string text = absl::StrCat("step ", position.step(), ", ", position.pass());
  if (position.layer() >= 0) absl::StrAppend(&text, ", layer ", position.layer());
  if (position.stage() >= 0) absl::StrAppend(&text, ", stage ", position.stage());
  absl::StrAppend(&text, position.in_collective() ? ", inside collective " : ", after collective ",
                  position.collective());
  return text;
}

std::string DescribeCulprit(const std::vector<v1::RankPosition>& positions) {
  if (positions.empty()) return "";
  const auto [low, high] = std::minmax_element(
      positions.begin(), positions.end(), [](const v1::RankPosition& a, const v1::RankPosition& b) {
        return a.collective() < b.collective();
      });
  std::string text;
  if (positions.size() > 1) {
    text = low->collective() == high->collective()
               ? absl::StrCat("every rank here is at collective ", low->collective())
               : absl::StrCat("rank ", low->rank(), " is behind, at collective ", low->collective(),
                              " of ", high->collective());
  }
  for (const v1::RankPosition& position : positions) {
    absl::StrAppend(&text, text.empty() ? "" : "; ", "rank ", position.rank(), ": ",
                    DescribePosition(position));
  }
  return text;
}

v1::Cause CauseOfExit(const Rank& rank, const ProcessExit& exit,
                      const std::vector<v1::RankPosition>& positions) {
  v1::Cause cause;
  std::string evidence;
  if (exit.signal.has_value() && !SignalSentByWorker(rank, exit)) {
    DescribeSignal(exit, cause, evidence);
  } else if (exit.signal.has_value() || PastTheDeadline(rank)) {
    cause = rank.kill_cause;
  } else {  // it ended by itself, whatever was on its way to it
    DescribeExitCode(rank, exit, cause);
  }
  cause.set_rank(rank.report.ref().rank());
  if (exit.exit_code.has_value()) cause.set_exit_code(*exit.exit_code);
  if (exit.signal.has_value()) cause.set_signal(*exit.signal);
  for (const std::string& line : exit.log_tail) cause.add_log_tail(line);
  const std::string where = DescribeCulprit(positions);
  if (!where.empty()) absl::StrAppend(&evidence, evidence.empty() ? "" : "; ", where);
  cause.set_evidence(evidence);
  return cause;
}

}  // namespace upipe::worker
