#include "engine/comm/nccl/nccl_context.h"

#include <map>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "common/status.h"
#include "engine/comm/nccl/nccl_communicator.h"

namespace upipe::comm {
namespace {

// "nccl", the version, the device, and the unique id or nothing, a line each; the id may hold
// anything and comes last.
constexpr char kMagic[] = "nccl";

struct Address {
  int version = 0;
  std::string device;
  std::string unique_id;
};

std::string Format(const Address& address) {
  return absl::StrCat(kMagic, "\n", address.version, "\n", address.device, "\n", address.unique_id);
}

absl::StatusOr<Address> Parse(const std::string& text, int rank) {
  const std::vector<std::string> lines = absl::StrSplit(text, absl::MaxSplits('\n', 3));
  Address address;
  if (lines.size() != 4 || lines[0] != kMagic || !absl::SimpleAtoi(lines[1], &address.version) ||
      lines[2].empty() || lines[3].size() != (rank == 0 ? kNcclIdBytes : 0)) {
    return absl::InvalidArgumentError(
        absl::StrCat("the address of rank ", rank, " (", text.size(),
                     " bytes) is not one of NCCL; do all ranks run backend cuda?"));
  }
  address.device = lines[2];
  address.unique_id = lines[3];
  return address;
}

absl::StatusOr<std::vector<Address>> ParseAll(const PeerGroup& group) {
  const int size = static_cast<int>(group.addresses.size());
  if (size < 1 || size > kMaxRanks || group.rank < 0 || group.rank >= size) {
    return absl::InvalidArgumentError(
        absl::StrCat("an NCCL group of rank ", group.rank, " with ", size, " addresses"));
  }
  std::vector<Address> addresses;
  std::map<std::string, int> rank_of_device;
  for (int rank = 0; rank < size; ++rank) {
    UPIPE_ASSIGN_OR_RETURN(Address address, Parse(group.addresses[rank], rank));
    const auto [other, first] = rank_of_device.emplace(address.device, rank);
    if (!first) {
      return absl::FailedPreconditionError(absl::StrCat(
          "ranks ", other->second, " and ", rank, " are both on device ", address.device,
          ", and NCCL takes one rank per device; start workers with one slot per device"));
    }
    if (rank > 0 && address.version != addresses[0].version) {
      return absl::FailedPreconditionError(
          absl::StrCat("rank 0 loaded NCCL ", addresses[0].version, " and rank ", rank, " NCCL ",
                       address.version, "; install one version on all nodes"));
    }
    addresses.push_back(std::move(address));
  }
  return addresses;
}

class BoundContext final : public NcclContext {
 public:
  BoundContext(std::shared_ptr<NcclApi> api, std::shared_ptr<CommDevice> device,
               const NcclOptions& options)
      : options_(options), api_(std::move(api)), device_(std::move(device)) {}

  absl::Status Bind(int rank) {
    Address address{.version = api_->Version(), .device = device_->id()};
    if (rank == 0) {
      const NcclResult result = api_->GetUniqueId(&address.unique_id);
      if (result != NcclResult::kSuccess) {
        return absl::UnavailableError(
            absl::StrCat("ncclGetUniqueId says ", NameOf(result), ": ", api_->LastError(nullptr)));
      }
    }
    address_ = Format(address);
    return absl::OkStatus();
  }

  const std::string& address() const override { return address_; }
  int64_t device_bytes() const override { return device_bytes_; }

  absl::StatusOr<std::unique_ptr<Communicator>> Connect(const PeerGroup& group,
                                                        const CommOptions& options) override {
    UPIPE_ASSIGN_OR_RETURN(const std::vector<Address> addresses, ParseAll(group));
    absl::StatusOr<std::unique_ptr<Communicator>> comm =
        Meet(group.rank, static_cast<int>(addresses.size()), addresses[0].unique_id, options);
    if (comm.ok()) return comm;
    return absl::Status(comm.status().code(),
                        absl::StrCat("connecting rank ", group.rank, " of ", addresses.size(), ": ",
                                     comm.status().message()));
  }

 private:
  absl::StatusOr<std::unique_ptr<Communicator>> Meet(int rank, int size,
                                                     const std::string& unique_id,
                                                     const CommOptions& options) {
    UPIPE_ASSIGN_OR_RETURN(const int64_t free_before, device_->FreeBytes());
    auto ledger = std::make_shared<NcclLedger>(rank, size);
    UPIPE_ASSIGN_OR_RETURN(
        std::unique_ptr<NcclLink> link,
        NcclLink::Connect(
            api_,
            {.size = size, .rank = rank, .unique_id = unique_id, .channels = options_.channels},
            options.parts, ledger, After(options_.connect_deadline)));
    UPIPE_ASSIGN_OR_RETURN(std::unique_ptr<NcclCommunicator> comm,
                           NcclCommunicator::Create({.device = device_,
                                                     .link = std::move(link),
                                                     .ledger = std::move(ledger),
                                                     .options = options,
                                                     .connect_deadline = options_.connect_deadline,
                                                     .close_deadline = options_.close_deadline}));
    UPIPE_ASSIGN_OR_RETURN(const int64_t free_after, device_->FreeBytes());
    device_bytes_ = free_before - free_after;
    return comm;
  }

  const NcclOptions options_;
  const std::shared_ptr<NcclApi> api_;
  const std::shared_ptr<CommDevice> device_;
  std::string address_;
  int64_t device_bytes_ = 0;
};

}  // namespace

absl::StatusOr<std::unique_ptr<NcclContext>> NcclContext::Create(std::shared_ptr<NcclApi> api,
                                                                 std::shared_ptr<CommDevice> device,
                                                                 int rank,
                                                                 const NcclOptions& options) {
  auto context = std::make_unique<BoundContext>(std::move(api), std::move(device), options);
  UPIPE_RETURN_IF_ERROR(context->Bind(rank));
  return context;
}

}  // namespace upipe::comm
