// Point-to-point messages over UCX: one lane for peers of the own node, one for the others.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/comm/traffic.h"
#include "engine/comm/transport.h"
#include "engine/comm/ucx/tcp_watch.h"
#include "engine/comm/ucx/ucx_communicator.h"
#include "engine/comm/ucx/ucx_lane.h"

namespace upipe::comm {

class UcxTransport final : public Transport {
 public:
  // Made, used and destroyed on one thread; the lanes were too. A null lane has no peers.
  // `group.addresses` are those of the lanes by rank: each peer's on the lane that reaches it.
  struct Lanes {
    std::unique_ptr<UcxLane> same_node;
    std::unique_ptr<UcxLane> other_nodes;
  };
  static absl::StatusOr<std::unique_ptr<UcxTransport>> Connect(Lanes lanes, const PeerGroup& group,
                                                               const UcxOptions& options);
  ~UcxTransport() override;

  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(peers_.size()); }
  int PostSend(int peer, MessageTag tag, const void* data, int64_t bytes) override;
  int PostReceive(int peer, MessageTag tag, void* data, int64_t bytes) override;
  absl::Status Wait(int request, SteadyTime deadline) override;
  absl::Status WaitAll(SteadyTime deadline) override;
  absl::Status CheckNothingUnexpected(uint32_t collective) override;
  void Withdraw() override;
  void Abort(const absl::Status& cause) override;
  absl::Status status() const override { return error_.Get(); }
  void Close() override;

 private:
  struct Peer {
    UcxTransport* transport = nullptr;
    int rank = 0;
    UcxLane* lane = nullptr;  // null for the own rank
    ucp_ep_h endpoint = nullptr;
    std::string node_id;
    bool lost = false;
  };
  struct Request {
    int peer = 0;
    bool is_send = false;
    uint32_t block = 0;
    int64_t bytes = 0;
    void* ucx = nullptr;
    bool done = false;
    ucs_status_t result = UCS_OK;
    int64_t received_bytes = 0;
  };

  UcxTransport(Lanes lanes, const PeerGroup& group, const UcxOptions& options);
  absl::Status OpenEndpoints(const PeerGroup& group);
  absl::Status CompareIdentities(const PeerGroup& group, SteadyTime deadline);
  absl::Status WarmUp(SteadyTime deadline);
  // Runs UCX until `over()`; false at the deadline or when an Abort came. Spins, then yields, then
  // sleeps.
  bool ProgressUntil(const std::function<bool()>& over, SteadyTime deadline);
  bool ProgressLanes();
  void SleepUntilNews(SteadyTime deadline, int* naps);
  void LookForSilence();
  absl::Status LostPeer(const Peer& peer, const std::string& what, ucs_status_t status) const;
  absl::Status FirstFailure() const;
  absl::Status Outcome(const Request& request) const;
  // Blocks until they are closed, a second at most.
  void CloseEndpoints(UcxLane* lane, unsigned flags);
  static void OnPeerError(void* peer, ucp_ep_h endpoint, ucs_status_t status);
  static void OnSent(void* ucx, ucs_status_t status, void* request);
  static void OnReceived(void* ucx, ucs_status_t status, const ucp_tag_recv_info_t* info,
                         void* request);

  const int rank_;
  const UcxOptions options_;
  bool closing_ = false;  // peers may leave
  bool unclean_ = false;  // something was left in flight
  int abort_fd_ = -1;     // wakes a sleeping wait
  FirstError error_;
  absl::Status lost_;  // the first peer whose endpoint failed
  std::vector<Peer> peers_;
  std::deque<Request> requests_;  // UCX points at them: they outlive the lanes
  Lanes lanes_;
  std::optional<TcpWatch> tcp_;  // of the peers on other nodes
  absl::Duration cut_after_;     // the silence that made us cut connections; zero: none
};

}  // namespace upipe::comm
