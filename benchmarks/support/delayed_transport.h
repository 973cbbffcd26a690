// A network of a stated speed between ranks that are threads of one process: a decorator of the
// point-to-point seam that lets messages arrive when they would over such a network. Collectives
// run over it as they are.
#pragma once

#include <memory>
#include <vector>

#include "absl/time/time.h"
#include "engine/comm/communicator.h"

namespace upipe::bench {

// Of every rank's link out and its link in, which work at the same time.
struct LinkSpeed {
  double bytes_per_second = 1e9;
  absl::Duration latency = absl::ZeroDuration();
};

// Communicators of `size` ranks over inproc with links of that speed. A message begins to travel
// when both its ends are posted; it holds the sender's link out for bytes / bytes_per_second, then,
// a latency later, the receiver's link in as long, overlapping where both are free; links serve in
// order. The sender may use its memory again when its link is done. Waiting sleeps.
std::vector<std::unique_ptr<comm::Communicator>> CreateDelayedGroup(
    int size, const LinkSpeed& speed, const comm::CommOptions& options);

}  // namespace upipe::bench
