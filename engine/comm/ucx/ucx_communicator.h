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

namespace upipe::comm {

// Who a group is. Every peer's first message carries it; ranks of different attempts never talk.
struct UcxIdentity {
  std::string job;
  int64_t generation = 0;
  uint64_t plan_hash = 0;
  std::string nonce;
};

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

struct UcxGroup {
  int rank = 0;
  std::vector<std::string> addresses;  // [size], UcxContext::address() of every rank
  std::vector<std::string> node_ids;   // [size]
  UcxIdentity identity;
};

// One rank's transport before it knows its peers: binds its own worker, so no fixed ports.
// Processes that hold one must not fork without exec. Start the process with
// UCX_HANDLE_ERRORS=none, or UCX installs its own signal handlers while it is being loaded; Create
// takes them off again.
class UcxContext {
 public:
  static absl::StatusOr<std::unique_ptr<UcxContext>> Create(const UcxOptions& options);
  virtual ~UcxContext() = default;

  // Opaque bytes for the rendezvous, a few hundred.
  virtual const std::string& address() const = 0;

  // Blocks until every peer has answered with the same identity and the warm-up exchange is over,
  // or the connect deadline passes. Aborted naming both identities when a peer belongs to another
  // attempt. At most once.
  virtual absl::StatusOr<std::unique_ptr<Communicator>> Connect(const UcxGroup& group,
                                                                const CommOptions& options) = 0;
};

}  // namespace upipe::comm
