// Named places where a test may end, stop or fail a process: compiled in always, at the cost of one
// relaxed load while nothing is armed. All names are listed here, so that a typing mistake in a
// test is refused and a soak knows what it has not hit yet.
#pragma once

#include <atomic>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace upipe {

namespace failpoints {

// Before each system call below a checkpoint root: its n-th hit is the n-th of the process.
inline constexpr absl::string_view kCheckpointSystemCall = "checkpoint.system_call";
inline constexpr absl::string_view kCheckpointClaimed = "checkpoint.claimed";
inline constexpr absl::string_view kCheckpointCopied = "checkpoint.copied";
inline constexpr absl::string_view kCheckpointShardPart = "checkpoint.shard_part";
inline constexpr absl::string_view kCheckpointShardSynced = "checkpoint.shard_synced";
inline constexpr absl::string_view kCheckpointSummaryInPlace = "checkpoint.summary_in_place";
inline constexpr absl::string_view kCheckpointBeforeManifest = "checkpoint.before_manifest";
inline constexpr absl::string_view kCheckpointManifestInPlace = "checkpoint.manifest_in_place";
inline constexpr absl::string_view kCheckpointRetain = "checkpoint.retain";
inline constexpr absl::string_view kCheckpointRestored = "checkpoint.restored";
// An op's scratch is measured; an error here makes it more than it is.
inline constexpr absl::string_view kTrainerWorkspace = "trainer.workspace";
inline constexpr absl::string_view kTrainerReady = "trainer.ready";
inline constexpr absl::string_view kTrainerConnected = "trainer.connected";
inline constexpr absl::string_view kTrainerStep = "trainer.step";
inline constexpr absl::string_view kTrainerFinishing = "trainer.finishing";

// The worker's launcher thread: recorded and not forked; forked and its pid not recorded; reaped
// and not reported; proven gone and not recorded. And before each order it takes from the
// coordinator.
inline constexpr absl::string_view kWorkerJournaled = "worker.journaled";
inline constexpr absl::string_view kWorkerForked = "worker.forked";
inline constexpr absl::string_view kWorkerReaped = "worker.reaped";
inline constexpr absl::string_view kWorkerProven = "worker.proven";
inline constexpr absl::string_view kWorkerOrder = "worker.order";

// The coordinator's store thread: decided and not durable (an error here is a failed commit);
// durable and nobody told. Its deciding thread: before each reply and each message to a worker.
inline constexpr absl::string_view kCoordinatorBeforeCommit = "coordinator.before_commit";
inline constexpr absl::string_view kCoordinatorCommitted = "coordinator.committed";
inline constexpr absl::string_view kCoordinatorReply = "coordinator.reply";
inline constexpr absl::string_view kCoordinatorSend = "coordinator.send";

inline constexpr absl::string_view kAll[] = {
    kCheckpointSystemCall,
    kCheckpointClaimed,
    kCheckpointCopied,
    kCheckpointShardPart,
    kCheckpointShardSynced,
    kCheckpointSummaryInPlace,
    kCheckpointBeforeManifest,
    kCheckpointManifestInPlace,
    kCheckpointRetain,
    kCheckpointRestored,
    kTrainerWorkspace,
    kTrainerReady,
    kTrainerConnected,
    kTrainerStep,
    kTrainerFinishing,
    kWorkerJournaled,
    kWorkerForked,
    kWorkerReaped,
    kWorkerProven,
    kWorkerOrder,
    kCoordinatorBeforeCommit,
    kCoordinatorCommitted,
    kCoordinatorReply,
    kCoordinatorSend,
};

}  // namespace failpoints

namespace failpoint_internal {
extern std::atomic<bool> armed;
absl::Status Hit(absl::string_view name);
}  // namespace failpoint_internal

// OK, unless armed: then the action may end or stop this process, or be the error returned.
// Thread-safe.
inline absl::Status Failpoint(absl::string_view name) {
  if (!failpoint_internal::armed.load(std::memory_order_relaxed)) return absl::OkStatus();
  return failpoint_internal::Hit(name);
}

// Arms "NAME:ACTION[:N]", comma-separated: at the N-th hit of NAME from now on (default 1), once,
// ACTION is `kill` (SIGKILL), `stop` (SIGSTOP), `exit` (code 17), `enospc` or `eio` (an error).
// Replaces what was armed; empty disarms. InvalidArgument naming what is unknown.
absl::Status ArmFailpoints(absl::string_view text);

// What the environment says, null where it is silent: UPIPE_FAILPOINT holds such a text.
// UPIPE_FAILPOINT_FILE names a file that does: it may be written (by rename) at any time, and the
// one process that fires removes it, so that of many processes one acts, once. Call at the start of
// main.
absl::Status ArmFailpoints(const char* upipe_failpoint, const char* upipe_failpoint_file);

}  // namespace upipe
