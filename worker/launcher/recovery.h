// What an earlier worker may have left: kills it by journal before the new worker says hello, which
// makes the new incarnation itself the proof that older ranks are gone.
#pragma once

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "worker/launcher/journal.h"

namespace upipe::worker {

// Blocks until nothing of `entry` is left, at most `bound`; DeadlineExceeded names what is.
absl::Status KillLeftovers(const JournalEntry& entry, absl::Duration bound);

}  // namespace upipe::worker
