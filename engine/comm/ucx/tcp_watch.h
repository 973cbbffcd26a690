// What UCX does not do about the TCP connections of one of its workers: notice machines that have
// gone silent, and let peers know at once that this rank is through.
#pragma once

#include "absl/time/time.h"
#include "engine/comm/transport.h"

namespace upipe::comm {

// Kernels probe an idle connection once a second at most.
inline constexpr absl::Duration kMinSilence = absl::Seconds(2);

class TcpWatch {
 public:
  // Over the connections that `epoll_fd`, a UCX worker's, watches. silence_limit: kMinSilence when
  // less.
  TcpWatch(int epoll_fd, absl::Duration silence_limit);

  // Has the kernel probe the connections there are now whenever they are idle.
  void Probe();
  // Shuts down every connection over which no packet came for longer than the limit; UCX then
  // reports a failed endpoint. A machine answers through its kernel, whatever its rank computes, so
  // a slow rank is never taken for a lost machine; TCP alone would repeat its packets for a quarter
  // of an hour, or give up on a peer that does not read (TCP_USER_TIMEOUT). Returns the longest
  // silence among these, zero when there were none. Cheap to call often: looks a few times per
  // limit.
  absl::Duration CutSilent();
  // Shuts all down. Endpoints closed by force alone leave connections open where the peer sends.
  void CutAll();

 private:
  const int epoll_fd_;
  const absl::Duration silence_limit_;
  SteadyTime next_look_{};
};

}  // namespace upipe::comm
