#include "engine/comm/ucx/ucx_communicator.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/check.h"
#include "common/status.h"
#include "engine/comm/serial_thread.h"
#include "engine/comm/transport_communicator.h"
#include "engine/comm/ucx/ucx_lane.h"
#include "engine/comm/ucx/ucx_transport.h"

namespace upipe::comm {
namespace {

// An address is two strings, each behind its length in one byte times 256 and one byte.
void AppendPart(std::string* address, const std::string& part) {
  UPIPE_CHECK(part.size() < (1 << 16)) << "a UCX address of " << part.size() << " bytes";
  address->push_back(static_cast<char>(part.size() >> 8));
  address->push_back(static_cast<char>(part.size() & 0xFF));
  address->append(part);
}

absl::StatusOr<std::string> TakePart(absl::string_view* address) {
  const auto byte = [&](int i) {
    return static_cast<size_t>(static_cast<unsigned char>((*address)[i]));
  };
  if (address->size() >= 2) {
    const size_t length = byte(0) << 8 | byte(1);
    if (length > 0 && address->size() - 2 >= length) {
      std::string part(address->substr(2, length));
      address->remove_prefix(2 + length);
      return part;
    }
  }
  return absl::InvalidArgumentError("is cut short");
}

// The part of `address` that reaches a rank on the own node, or on another.
absl::StatusOr<std::string> PartOf(absl::string_view address, bool same_node) {
  UPIPE_ASSIGN_OR_RETURN(std::string shared_memory, TakePart(&address));
  UPIPE_ASSIGN_OR_RETURN(std::string tcp, TakePart(&address));
  if (!address.empty()) return absl::InvalidArgumentError("has bytes behind its end");
  return same_node ? shared_memory : tcp;
}

class BoundContext final : public UcxContext {
 public:
  explicit BoundContext(const UcxOptions& options) : options_(options) {}

  ~BoundContext() override {
    if (thread_ != nullptr) thread_->Run([this] { lanes_ = {}; });
  }

  absl::Status Bind() {
    absl::Status status;
    thread_->Run([&] { status = BindOnThread(); });
    return status;
  }

  const std::string& address() const override { return address_; }

  absl::StatusOr<std::unique_ptr<Communicator>> Connect(const PeerGroup& group,
                                                        const CommOptions& options) override {
    if (thread_ == nullptr)
      return absl::FailedPreconditionError("this UCX context was connected before");
    UPIPE_ASSIGN_OR_RETURN(PeerGroup resolved, Resolve(group));
    absl::StatusOr<std::unique_ptr<UcxTransport>> transport;
    thread_->Run([&] { transport = ConnectOnThread(resolved); });
    if (!transport.ok()) return transport.status();
    return std::make_unique<TransportCommunicator>(std::move(thread_), *std::move(transport),
                                                   options);
  }

 private:
  absl::Status BindOnThread() {
    UPIPE_ASSIGN_OR_RETURN(
        lanes_.same_node,
        UcxLane::Create({.transports = options_.shared_memory_transports, .devices = "all"}));
    UPIPE_ASSIGN_OR_RETURN(lanes_.other_nodes, UcxLane::Create({.transports = "tcp",
                                                                .devices = options_.tcp_devices,
                                                                .reports_peer_errors = true}));
    AppendPart(&address_, lanes_.same_node->address());
    AppendPart(&address_, lanes_.other_nodes->address());
    return absl::OkStatus();
  }

  // The group with every address reduced to the part that is used.
  static absl::StatusOr<PeerGroup> Resolve(const PeerGroup& group) {
    const int size = static_cast<int>(group.addresses.size());
    if (size < 1 || size > kMaxRanks || group.node_ids.size() != group.addresses.size() ||
        group.rank < 0 || group.rank >= size) {
      return absl::InvalidArgumentError(absl::StrCat("a UCX group of rank ", group.rank, " with ",
                                                     size, " addresses and ", group.node_ids.size(),
                                                     " node ids"));
    }
    PeerGroup resolved = group;
    for (int rank = 0; rank < size; ++rank) {
      const bool same_node = group.node_ids[rank] == group.node_ids[group.rank];
      absl::StatusOr<std::string> part = PartOf(group.addresses[rank], same_node);
      if (!part.ok()) {
        return absl::InvalidArgumentError(absl::StrCat("the UCX address of rank ", rank, " (",
                                                       group.addresses[rank].size(), " bytes) ",
                                                       part.status().message()));
      }
      resolved.addresses[rank] = *std::move(part);
    }
    return resolved;
  }

  absl::StatusOr<std::unique_ptr<UcxTransport>> ConnectOnThread(const PeerGroup& group) {
    const std::string& own = group.node_ids[group.rank];
    const int64_t neighbours = std::count(group.node_ids.begin(), group.node_ids.end(), own);
    if (neighbours == 1) lanes_.same_node.reset();
    if (neighbours == static_cast<int64_t>(group.node_ids.size())) lanes_.other_nodes.reset();
    return UcxTransport::Connect(std::move(lanes_), group, options_);
  }

  const UcxOptions options_;
  std::unique_ptr<SerialThread> thread_ = std::make_unique<SerialThread>();
  UcxTransport::Lanes lanes_;  // touched on thread_ only
  std::string address_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<UcxContext>> UcxContext::Create(const UcxOptions& options) {
  auto context = std::make_unique<BoundContext>(options);
  UPIPE_RETURN_IF_ERROR(context->Bind());
  return context;
}

}  // namespace upipe::comm
