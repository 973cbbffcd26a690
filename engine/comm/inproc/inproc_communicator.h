// Ranks as threads of one process: the oracle every other communicator is compared with. Blocks are
// copied straight from the sender's to the receiver's memory by whichever of the two arrives
// second.
#pragma once

#include <memory>
#include <vector>

#include "engine/comm/comm_device.h"
#include "engine/comm/communicator.h"
#include "engine/comm/transport.h"

namespace upipe::comm {

class InprocGroup {
 public:
  // One communicator per rank, in rank order; each is then used by its own host thread. They may be
  // destroyed in any order and outlive each other: an operation that waits for a rank that has left
  // fails with Unavailable. Abort of one, or the first error of one, ends the operations of all.
  // With a device, on which all their memory is, copies and sums run there.
  static std::vector<std::unique_ptr<Communicator>> Create(
      int size, const CommOptions& options, std::shared_ptr<CommDevice> device = nullptr);
  // The same with options (the observer, usually) of each rank; the size is that of the list.
  static std::vector<std::unique_ptr<Communicator>> Create(
      const std::vector<CommOptions>& by_rank, std::shared_ptr<CommDevice> device = nullptr);
  // What a group's communicators stand on, in rank order, for a decorator to wrap.
  static std::vector<std::unique_ptr<Transport>> CreateTransports(int size);
};

}  // namespace upipe::comm
