// What an earlier worker may have left: kills it by journal before the new worker says hello, which
// makes the new incarnation itself the proof that older ranks are gone.
#pragma once

#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "worker/launcher/journal.h"

namespace upipe::worker {

// Blocks until no process of `entries` is left, at most `bound` each; DeadlineExceeded names what
// is. Then removes their shared memory; a System V segment that something still has attached stays,
// with a warning: by then it can only be a stranger's.
absl::Status KillLeftovers(const std::vector<JournalEntry>& entries, absl::Duration bound);

}  // namespace upipe::worker
