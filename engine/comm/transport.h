// Point-to-point messages between the ranks of one group: all that differs between inproc and ucx.
// The collectives are written once above it (transport_communicator).
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/time/time.h"

namespace upipe::comm {

using SteadyTime = std::chrono::steady_clock::time_point;

// The moment `duration` from now; "infinite" is a year.
inline SteadyTime After(absl::Duration duration) {
  const absl::Duration bounded = std::min(duration, absl::Hours(24 * 365));
  return std::chrono::steady_clock::now() +
         std::chrono::nanoseconds(absl::ToInt64Nanoseconds(bounded));
}

// Which message of which collective; with sender and receiver it is unique in the life of a group.
struct MessageTag {
  uint32_t collective = 0;
  uint32_t block = 0;  // < kMaxBlocksPerPeer

  friend bool operator==(const MessageTag&, const MessageTag&) = default;
};

// The error of a message that arrived and that this rank's schedule does not know.
absl::Status UnexpectedMessage(int peer, uint32_t collective, uint32_t block, int64_t bytes);

inline constexpr int64_t kMaxBlocksPerPeer = int64_t{1} << 20;
inline constexpr int kMaxRanks = 1 << 12;

// All calls but Abort and status come from one thread. After the first error a transport is dead:
// nothing posted is touched any more once Withdraw has returned.
class Transport {
 public:
  virtual ~Transport() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;

  // Start moving `bytes` > 0 to or from another rank. The memory must live until Wait or WaitAll
  // has returned OK for it or Withdraw has returned. Returns the index of the request, counted from
  // 0 since the last WaitAll.
  virtual int PostSend(int peer, MessageTag tag, const void* data, int64_t bytes) = 0;
  virtual int PostReceive(int peer, MessageTag tag, void* data, int64_t bytes) = 0;

  // Blocks until the request is done. DeadlineExceeded naming the peer after `deadline`; the cause
  // after Abort; Internal when the peer's message has another size; Unavailable when the peer is
  // gone.
  virtual absl::Status Wait(int request, SteadyTime deadline) = 0;
  // Wait for everything posted, then forget it.
  virtual absl::Status WaitAll(SteadyTime deadline) = 0;
  // Internal when a message of `collective`, which this rank has finished, is here and nobody asked
  // for it. What is still under way escapes.
  virtual absl::Status CheckNothingUnexpected(uint32_t collective) = 0;
  // Takes back all that is posted.
  virtual void Withdraw() = 0;

  // Any thread. Keeps the first cause; ends waits here, and at peers where they can be told.
  virtual void Abort(const absl::Status& cause) = 0;
  virtual absl::Status status() const = 0;

  // Says farewell: once, at the end of a healthy life, before destruction.
  virtual void Close() = 0;
};

}  // namespace upipe::comm
