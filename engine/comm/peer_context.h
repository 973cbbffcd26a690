// One rank's end of the transport before it knows its peers: what it tells them through the
// rendezvous, and the meeting itself.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/comm/communicator.h"

namespace upipe::comm {

// Who a group is. Ranks of different attempts never talk.
struct AttemptIdentity {
  std::string job;
  int64_t generation = 0;
  uint64_t plan_hash = 0;
  std::string nonce;
};

struct PeerGroup {
  int rank = 0;
  std::vector<std::string> addresses;  // [size], PeerContext::address() of every rank
  std::vector<std::string> node_ids;   // [size]
  AttemptIdentity identity;
};

class PeerContext {
 public:
  virtual ~PeerContext() = default;

  // Opaque bytes for the rendezvous, a few hundred.
  virtual const std::string& address() const = 0;

  // Blocks until every peer is met and the warm-up exchange is over, or the connect deadline
  // passes. At most once.
  virtual absl::StatusOr<std::unique_ptr<Communicator>> Connect(const PeerGroup& group,
                                                                const CommOptions& options) = 0;

  // Device memory the communicator took while it connected, from outside the rank's arena.
  virtual int64_t device_bytes() const { return 0; }
};

}  // namespace upipe::comm
