// Ranks as processes over UCX: shared memory inside a node, tcp between nodes, chosen by the plan's
// node ids and never by what UCX guesses. The only public header of this folder; no UCX header
// leaves it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/comm/communicator.h"
#include "engine/comm/peer_context.h"

namespace upipe::comm {

struct UcxOptions {
  std::string shared_memory_transports =
      "self,sysv";                  // UCX names; sysv needs no rights and leaves no files
  std::string tcp_devices = "all";  // interfaces, comma-separated
  // A peer whose machine, on another node, has not answered for so long is lost; the machine
  // answers also while the peer computes. Taken as 2 seconds when less; half of it is survived.
  absl::Duration peer_silence = absl::Seconds(30);
  absl::Duration connect_deadline = absl::Minutes(1);
  absl::Duration close_deadline = absl::Seconds(10);  // of the farewell on destruction
};

// One rank's transport before it knows its peers: binds its own worker, so no fixed ports.
// Processes that hold one must not fork without exec. Start the process with
// UCX_HANDLE_ERRORS=none, or UCX installs its own signal handlers while it is being loaded; Create
// takes them off again.
class UcxContext : public PeerContext {
 public:
  static absl::StatusOr<std::unique_ptr<UcxContext>> Create(const UcxOptions& options);

  // Also until every peer has answered with the same identity. Aborted naming both identities when
  // a peer belongs to another attempt.
  absl::StatusOr<std::unique_ptr<Communicator>> Connect(const PeerGroup& group,
                                                        const CommOptions& options) override = 0;
};

}  // namespace upipe::comm
