// The core's side of the session: hello, heartbeats and the reports repeated until acknowledged.
#pragma once

#include "worker/agent/agent.h"

namespace upipe::worker {

// The rank's report changed: whatever was acknowledged is old.
void Changed(Rank& rank);

// A trainer process may be at work.
bool IsLive(const Rank& rank);

// What the worker's slots are, each one of these.
struct SlotCounts {
  int free = 0;
  int taken = 0;        // by a rank that is not proven gone
  int quarantined = 0;  // that was not in time
  int sick = 0;         // empty, and its device takes no rank

  friend bool operator==(const SlotCounts&, const SlotCounts&) = default;
};
SlotCounts CountSlots(const State& state);

// While leaving: when the coordinator counts as silent, should it say nothing more.
BootTime SilentWhileLeavingAt(const State& state);

void LoseSession(State& state, BootTime now);
void AcceptHelloAck(State& state, const v1::HelloAck& ack, BootTime now, Actions& out);
void AcceptHeartbeatAck(State& state, uint64_t sequence);
void AcceptRankAck(State& state, uint64_t sequence);

// Reconnects, sends heartbeats, gives up a session the coordinator is silent on.
void KeepSession(State& state, BootTime now, Actions& out);
void FlushReports(State& state, BootTime now, Actions& out);
void SendProgress(State& state, const Rank& rank, const v1::StepReport& report, Actions& out);

}  // namespace upipe::worker
