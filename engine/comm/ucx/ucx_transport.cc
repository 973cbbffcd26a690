#include "engine/comm/ucx/ucx_transport.h"

#include <poll.h>
#include <sched.h>
#include <sys/eventfd.h>
#include <ucs/config/global_opts.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "common/check.h"
#include "common/status.h"
#include "common/units.h"

namespace upipe::comm {
namespace {

using std::chrono::microseconds;
using std::chrono::steady_clock;

constexpr int kIdlePollsBeforeYield = 20;
constexpr microseconds kSpin{50};
constexpr microseconds kNapMax{1000};
constexpr std::chrono::milliseconds kSleepMax{
    100};  // looks at the clock and the wires again at least so often

constexpr absl::Duration kEndpointCloseMax = absl::Seconds(1);

constexpr int64_t kIdentityBytesMax = 4096;
constexpr int64_t kWarmUpBytes = 256 << 10;
// Collective 0 is the greeting; the last number is the farewell.
constexpr MessageTag kIdentityTag{0, 0};
constexpr MessageTag kWarmUpTag{0, 1};
constexpr MessageTag kWarmUpEndTag{0, 2};
constexpr MessageTag kFarewellTag{0xFFFFFFFFu, 0};

// UCX matches on 64 bits and knows no sender: collective 32, sender 12, block 20.
ucp_tag_t Encode(MessageTag tag, int sender) {
  return static_cast<uint64_t>(tag.collective) << 32 | static_cast<uint64_t>(sender) << 20 |
         tag.block;
}

std::string Describe(const AttemptIdentity& identity) {
  return absl::StrCat("job ", identity.job, ", generation ", identity.generation, ", plan ",
                      absl::Hex(identity.plan_hash), ", nonce ", identity.nonce);
}

}  // namespace

UcxTransport::UcxTransport(Lanes lanes, const PeerGroup& group, const UcxOptions& options)
    : rank_(group.rank),
      options_(options),
      abort_fd_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      peers_(group.addresses.size()),
      lanes_(std::move(lanes)) {
  UPIPE_CHECK(abort_fd_ >= 0) << "eventfd failed: out of file descriptors?";
  if (lanes_.other_nodes != nullptr)
    tcp_.emplace(lanes_.other_nodes->event_fd(), options.peer_silence);
}

absl::StatusOr<std::unique_ptr<UcxTransport>> UcxTransport::Connect(Lanes lanes,
                                                                    const PeerGroup& group,
                                                                    const UcxOptions& options) {
  std::unique_ptr<UcxTransport> transport(new UcxTransport(std::move(lanes), group, options));
  const SteadyTime deadline = After(options.connect_deadline);
  absl::Status status = transport->OpenEndpoints(group);
  if (status.ok()) status = transport->CompareIdentities(group, deadline);
  if (status.ok()) status = transport->WarmUp(deadline);
  if (status.ok()) {
    if (transport->tcp_.has_value()) transport->tcp_->Probe();  // also while ranks compute
    return transport;
  }
  transport->Withdraw();
  return absl::Status(status.code(), absl::StrCat("connecting rank ", group.rank, " of ",
                                                  group.addresses.size(), ": ", status.message()));
}

UcxTransport::~UcxTransport() {
  if (!requests_.empty()) Withdraw();
  if (unclean_)
    ucs_global_opts_set_value("LOG_LEVEL", "error");  // or UCX warns of each message dropped
  lanes_.same_node.reset();
  lanes_.other_nodes.reset();
  close(abort_fd_);
}

absl::Status UcxTransport::OpenEndpoints(const PeerGroup& group) {
  for (int rank = 0; rank < size(); ++rank) {
    Peer& peer = peers_[rank];
    peer.transport = this;
    peer.rank = rank;
    peer.node_id = group.node_ids[rank];
    if (rank == rank_) continue;
    peer.lane =
        (peer.node_id == group.node_ids[rank_] ? lanes_.same_node : lanes_.other_nodes).get();
    UPIPE_CHECK(peer.lane != nullptr) << "no lane to rank " << rank;
    absl::StatusOr<ucp_ep_h> endpoint =
        peer.lane->Connect(group.addresses[rank], &OnPeerError, &peer);
    if (!endpoint.ok()) {
      return absl::Status(endpoint.status().code(),
                          absl::StrCat("rank ", rank, " on node ", peer.node_id, ": ",
                                       endpoint.status().message()));
    }
    peer.endpoint = *endpoint;
  }
  return absl::OkStatus();
}

absl::Status UcxTransport::CompareIdentities(const PeerGroup& group, SteadyTime deadline) {
  const std::string own = Describe(group.identity);
  if (own.size() > kIdentityBytesMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("the identity has ", own.size(), " bytes, more than ", kIdentityBytesMax));
  }
  // Padded, so that a peer's length cannot look like a schedule error.
  std::string out = own;
  out.resize(kIdentityBytesMax, '\0');
  std::vector<std::string> theirs(size(), std::string(kIdentityBytesMax, '\0'));
  for (int peer = 0; peer < size(); ++peer) {
    if (peer != rank_) PostReceive(peer, kIdentityTag, theirs[peer].data(), kIdentityBytesMax);
  }
  for (int peer = 0; peer < size(); ++peer) {
    if (peer != rank_) PostSend(peer, kIdentityTag, out.data(), kIdentityBytesMax);
  }
  if (absl::Status status = WaitAll(deadline); !status.ok()) {
    Withdraw();  // before the buffers above go
    return status;
  }
  for (int peer = 0; peer < size(); ++peer) {
    if (peer == rank_ || theirs[peer] == out) continue;
    Close();  // the peers see the same: let our message reach them
    return absl::AbortedError(absl::StrCat("rank ", peer, " belongs to another attempt: it says \"",
                                           theirs[peer].c_str(), "\", this rank is of \"", own,
                                           "\""));
  }
  return absl::OkStatus();
}

// Makes UCX allocate its pools now: eager messages that wait for their receive, and a rendezvous
// each way.
absl::Status UcxTransport::WarmUp(SteadyTime deadline) {
  std::vector<char> out(kWarmUpBytes);
  std::vector<std::vector<char>> in(size(), std::vector<char>(kWarmUpBytes));
  std::vector<char> end(size());
  absl::Status status;
  for (int peer = 0; peer < size(); ++peer) {
    if (peer != rank_) PostSend(peer, kWarmUpEndTag, &end[rank_], 1);
  }
  for (int peer = 0; peer < size(); ++peer) {
    if (peer != rank_) PostSend(peer, kWarmUpTag, out.data(), kWarmUpBytes);
  }
  for (int peer = 0; peer < size(); ++peer) {
    if (peer == rank_) continue;
    PostReceive(peer, kWarmUpTag, in[peer].data(), kWarmUpBytes);
    PostReceive(peer, kWarmUpEndTag, &end[peer], 1);
  }
  status = WaitAll(deadline);
  if (!status.ok()) Withdraw();
  return status;
}

int UcxTransport::PostSend(int peer, MessageTag tag, const void* data, int64_t bytes) {
  Request& request = requests_.emplace_back(
      Request{.peer = peer, .is_send = true, .block = tag.block, .bytes = bytes});
  ucp_request_param_t param = {};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
  param.cb.send = &OnSent;
  param.user_data = &request;
  const ucs_status_ptr_t ucx =
      ucp_tag_send_nbx(peers_[peer].endpoint, data, bytes, Encode(tag, rank_), &param);
  if (!UCS_PTR_IS_PTR(ucx)) {
    request.done = true;
    request.result = UCS_PTR_STATUS(ucx);
  } else {
    request.ucx = ucx;
  }
  return static_cast<int>(requests_.size()) - 1;
}

int UcxTransport::PostReceive(int peer, MessageTag tag, void* data, int64_t bytes) {
  Request& request =
      requests_.emplace_back(Request{.peer = peer, .block = tag.block, .bytes = bytes});
  ucp_request_param_t param = {};
  // The length is told to the callback only, so that it must come even when the message is here
  // already.
  param.op_attr_mask =
      UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FLAG_NO_IMM_CMPL;
  param.cb.recv = &OnReceived;
  param.user_data = &request;
  const ucs_status_ptr_t ucx = ucp_tag_recv_nbx(peers_[peer].lane->worker(), data, bytes,
                                                Encode(tag, peer), ~uint64_t{0}, &param);
  if (!UCS_PTR_IS_PTR(ucx)) {
    request.done = true;
    request.result = UCS_PTR_STATUS(ucx);
  } else {
    request.ucx = ucx;
  }
  return static_cast<int>(requests_.size()) - 1;
}

void UcxTransport::OnSent(void*, ucs_status_t status, void* request) {
  auto* sent = static_cast<Request*>(request);
  sent->done = true;
  sent->result = status;
}

void UcxTransport::OnReceived(void*, ucs_status_t status, const ucp_tag_recv_info_t* info,
                              void* request) {
  auto* received = static_cast<Request*>(request);
  received->done = true;
  received->result = status;
  if (status == UCS_OK) received->received_bytes = static_cast<int64_t>(info->length);
}

void UcxTransport::OnPeerError(void* peer, ucp_ep_h, ucs_status_t status) {
  auto* lost = static_cast<Peer*>(peer);
  lost->lost = true;
  if (lost->transport->closing_) return;
  lost->transport->lost_.Update(lost->transport->LostPeer(*lost, "its endpoint failed", status));
}

absl::Status UcxTransport::LostPeer(const Peer& peer, const std::string& what,
                                    ucs_status_t status) const {
  const std::string lost =
      absl::StrCat("lost the connection to rank ", peer.rank, " on node ", peer.node_id);
  if (cut_after_ == absl::ZeroDuration())
    return UcxError(absl::StrCat(lost, " (", what, ")"), status);
  return absl::UnavailableError(absl::StrCat(
      lost, ": its machine has not answered for ", FormatTimeSpan(cut_after_),
      "; the network between the nodes is cut, or the machine is off or stands still"));
}

void UcxTransport::LookForSilence() {
  if (!tcp_.has_value()) return;
  if (const absl::Duration cut = tcp_->CutSilent(); cut > absl::ZeroDuration()) cut_after_ = cut;
}

bool UcxTransport::ProgressLanes() {
  bool moved = false;
  for (UcxLane* lane : {lanes_.same_node.get(), lanes_.other_nodes.get()}) {
    if (lane != nullptr) moved |= lane->Progress();
  }
  return moved;
}

bool UcxTransport::ProgressUntil(const std::function<bool()>& over, SteadyTime deadline) {
  int idle_polls = 0;
  int naps = 0;
  SteadyTime idle_since;
  for (;;) {
    const bool moved = ProgressLanes();
    if (over()) return true;
    if (error_.failed() || !lost_.ok()) return false;
    if (moved) {
      idle_polls = naps = 0;
      continue;
    }
    if (++idle_polls == 1) idle_since = steady_clock::now();
    if (idle_polls <= kIdlePollsBeforeYield) continue;
    const SteadyTime now = steady_clock::now();
    if (now >= deadline) return false;
    if (now - idle_since < kSpin) {
      sched_yield();
    } else {
      LookForSilence();
      SleepUntilNews(deadline, &naps);
    }
  }
}

// An armed worker wakes us; one that cannot be armed (its sends wait for room at a peer) is looked
// at again after a nap, longer each time.
void UcxTransport::SleepUntilNews(SteadyTime deadline, int* naps) {
  pollfd fds[3] = {{abort_fd_, POLLIN, 0}};
  int num_fds = 1;
  bool armed = true;
  for (UcxLane* lane : {lanes_.same_node.get(), lanes_.other_nodes.get()}) {
    if (lane == nullptr) continue;
    armed = armed && lane->Arm();
    fds[num_fds++] = {lane->event_fd(), POLLIN, 0};
  }
  if (!armed) {
    // The first refusal only says that news is waiting.
    if (++*naps > 1)
      std::this_thread::sleep_for(std::min(kNapMax, kSpin * (1 << std::min(*naps - 2, 5))));
    return;
  }
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - steady_clock::now());
  poll(fds, num_fds,
       static_cast<int>(std::clamp(left, std::chrono::milliseconds(0), kSleepMax).count()));
}

absl::Status UcxTransport::FirstFailure() const { return error_.failed() ? error_.Get() : lost_; }

absl::Status UcxTransport::Outcome(const Request& request) const {
  const std::string what = absl::StrCat("block ", request.block, " of ", request.bytes, " bytes ",
                                        request.is_send ? "to" : "from", " rank ", request.peer);
  if (request.result == UCS_ERR_MESSAGE_TRUNCATED ||
      (request.result == UCS_OK && !request.is_send && request.received_bytes != request.bytes)) {
    return absl::InternalError(absl::StrCat(what, ": the peer's has ",
                                            request.result == UCS_OK
                                                ? absl::StrCat(request.received_bytes, " bytes")
                                                : std::string("more bytes"),
                                            "; the ranks run different schedules"));
  }
  if (request.result != UCS_OK) return LostPeer(peers_[request.peer], what, request.result);
  return absl::OkStatus();
}

absl::Status UcxTransport::Wait(int request, SteadyTime deadline) {
  Request& waited = requests_[request];
  const bool over = waited.done || ProgressUntil([&waited] { return waited.done; }, deadline);
  const absl::Status error = FirstFailure();
  if (over && (waited.result == UCS_OK || error.ok())) return Outcome(waited);
  UPIPE_RETURN_IF_ERROR(error);
  return absl::DeadlineExceededError(
      absl::StrCat("rank ", waited.peer, " on node ", peers_[waited.peer].node_id, " did not ",
                   waited.is_send ? "take" : "send", " block ", waited.block, " of ", waited.bytes,
                   " bytes before the deadline"));
}

absl::Status UcxTransport::WaitAll(SteadyTime deadline) {
  for (size_t i = 0; i < requests_.size(); ++i)
    UPIPE_RETURN_IF_ERROR(Wait(static_cast<int>(i), deadline));
  for (Request& request : requests_) {
    if (request.ucx != nullptr) ucp_request_free(request.ucx);
  }
  requests_.clear();
  return FirstFailure();
}

absl::Status UcxTransport::CheckNothingUnexpected(uint32_t collective) {
  constexpr ucp_tag_t kAnySenderAndBlock = ~uint64_t{0} << 32;
  for (UcxLane* lane : {lanes_.same_node.get(), lanes_.other_nodes.get()}) {
    if (lane == nullptr) continue;
    ucp_tag_recv_info_t info = {};
    if (ucp_tag_probe_nb(lane->worker(), Encode({collective, 0}, 0), kAnySenderAndBlock, 0,
                         &info) == nullptr)
      continue;
    return UnexpectedMessage(static_cast<int>(info.sender_tag >> 20 & (kMaxRanks - 1)), collective,
                             static_cast<uint32_t>(info.sender_tag & (kMaxBlocksPerPeer - 1)),
                             info.length);
  }
  return absl::OkStatus();
}

// Receives that have not begun are cancelled. Over tcp, closing the endpoints by force ends what
// has begun, and cutting the connections tells the peers. Over shared memory what has begun moves
// only when its lane is run, and it is not run again.
void UcxTransport::Withdraw() {
  unclean_ = true;
  closing_ = true;
  for (Request& request : requests_) {
    if (request.ucx == nullptr) continue;
    if (!request.done && !request.is_send) {
      ucp_request_cancel(peers_[request.peer].lane->worker(), request.ucx);
    }
    ucp_request_free(request.ucx);
    request.ucx = nullptr;
  }
  if (lanes_.other_nodes == nullptr) return;
  CloseEndpoints(lanes_.other_nodes.get(), UCP_EP_CLOSE_FLAG_FORCE);
  tcp_->CutAll();
}

void UcxTransport::CloseEndpoints(UcxLane* lane, unsigned flags) {
  ucp_request_param_t param = {};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
  param.flags = flags;
  std::vector<void*> closings;
  for (Peer& peer : peers_) {
    if (peer.endpoint == nullptr || peer.lane != lane) continue;
    // UCX wants an endpoint that has failed closed by force.
    param.flags = peer.lost ? unsigned{UCP_EP_CLOSE_FLAG_FORCE} : flags;
    closings.push_back(ucp_ep_close_nbx(peer.endpoint, &param));
    peer.endpoint = nullptr;
  }
  const SteadyTime deadline = After(kEndpointCloseMax);
  for (void* closing : closings) {
    if (!UCS_PTR_IS_PTR(closing)) continue;
    while (ucp_request_check_status(closing) == UCS_INPROGRESS && steady_clock::now() < deadline) {
      if (!lane->Progress()) sched_yield();
    }
    ucp_request_free(closing);
  }
}

void UcxTransport::Abort(const absl::Status& cause) {
  error_.Set(cause);
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written =
      write(abort_fd_, &one, sizeof one);  // full means awake already
}

// Everyone has everything: then the endpoints are flushed and closed. A peer that does not come
// costs the deadline.
void UcxTransport::Close() {
  closing_ = true;
  const SteadyTime deadline = After(options_.close_deadline);
  const char ours = 0;
  std::vector<char> theirs(size());
  for (int peer = 0; peer < size(); ++peer) {
    if (peer == rank_ || peers_[peer].lost) continue;
    PostReceive(peer, kFarewellTag, &theirs[peer], 1);
    PostSend(peer, kFarewellTag, &ours, 1);
  }
  if (!WaitAll(deadline).ok()) return Withdraw();
  for (UcxLane* lane : {lanes_.same_node.get(), lanes_.other_nodes.get()}) {
    if (lane != nullptr) CloseEndpoints(lane, 0);
  }
}

}  // namespace upipe::comm
