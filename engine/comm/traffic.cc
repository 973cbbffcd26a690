#include "engine/comm/traffic.h"

#include <algorithm>
#include <functional>
#include <memory>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/check.h"
#include "common/status.h"
#include "engine/comm/transport.h"

namespace upipe::comm {
namespace {

class FixedState final : public kernels::Event::State {
 public:
  explicit FixedState(absl::Status status) : status_(std::move(status)) {}
  bool Done() const override { return true; }
  absl::Status Synchronize() override { return status_; }

 private:
  const absl::Status status_;
};

absl::Status CheckBlocks(const std::vector<Block>& blocks, const char* which, int size) {
  std::vector<int64_t> blocks_of_peer(size, 0);
  for (size_t i = 0; i < blocks.size(); ++i) {
    const Block& block = blocks[i];
    if (block.peer < 0 || block.peer >= size) {
      return absl::InvalidArgumentError(absl::StrCat("all-to-all: ", which, " block ", i,
                                                     " names rank ", block.peer, " of a group of ",
                                                     size));
    }
    if (block.bytes < 0 || (block.bytes > 0 && block.data == nullptr)) {
      return absl::InvalidArgumentError(
          absl::StrCat("all-to-all: ", which, " block ", i, " with rank ", block.peer, " has ",
                       block.bytes, " bytes at ", block.data == nullptr ? "null" : "an address"));
    }
    if (++blocks_of_peer[block.peer] > kMaxBlocksPerPeer) {
      return absl::InvalidArgumentError(absl::StrCat("all-to-all: more than ", kMaxBlocksPerPeer,
                                                     " ", which, " blocks with rank ", block.peer,
                                                     "; join neighbours"));
    }
  }
  return absl::OkStatus();
}

std::vector<int64_t> SizesWith(const std::vector<Block>& blocks, int peer) {
  std::vector<int64_t> sizes;
  for (const Block& block : blocks) {
    if (block.peer == peer) sizes.push_back(block.bytes);
  }
  return sizes;
}

absl::Status CheckMemory(const char* op, int64_t bytes,
                         std::initializer_list<const void*> pointers) {
  const bool null =
      std::any_of(pointers.begin(), pointers.end(), [](const void* p) { return p == nullptr; });
  if (bytes < 0 || (bytes > 0 && null)) {
    return absl::InvalidArgumentError(
        absl::StrCat(op, ": ", bytes, " bytes", null ? " with a null buffer" : ""));
  }
  return absl::OkStatus();
}

}  // namespace

bool FirstError::Set(const absl::Status& error) {
  UPIPE_CHECK(!error.ok()) << "an OK status is no error";
  std::lock_guard<std::mutex> lock(mutex_);
  if (!error_.ok()) return false;
  error_ = error;
  failed_.store(true, std::memory_order_release);
  return true;
}

absl::Status FirstError::Get() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return error_;
}

kernels::Event EventWithStatus(const absl::Status& status) {
  return kernels::Event(std::make_shared<FixedState>(status));
}

absl::Status InCollective(const absl::Status& error, const char* name, int64_t number, int rank,
                          int size) {
  return absl::Status(error.code(), absl::StrCat("collective ", number, " (", name, ") on rank ",
                                                 rank, " of ", size, ": ", error.message()));
}

int IndexIn(const RankGroup& group, int rank) {
  return static_cast<int>(std::lower_bound(group.begin(), group.end(), rank) - group.begin());
}

int64_t ReduceScatterScratchBytesFor(const ReduceRoom& room, int group_size, int64_t count) {
  const int64_t piece = std::min(count * static_cast<int64_t>(sizeof(float)), room.piece_bytes);
  return piece * std::min(group_size - 1, room.pieces);
}

int64_t AllReduceScratchBytesFor(int size, int64_t count) {
  return size == 1 ? 0 : size * count * static_cast<int64_t>(sizeof(double));
}

Traffic::Traffic(int rank, int size) : rank_(rank), size_(size), everyone_(AllRanks(size)) {
  UPIPE_CHECK(size >= 1 && size <= kMaxRanks && rank >= 0 && rank < size)
      << "rank " << rank << " of " << size;
  stats_.bytes_sent_to_peer.assign(size, 0);
}

absl::Status Traffic::AddAllToAllV(const AllToAllVParams& params) {
  UPIPE_RETURN_IF_ERROR(CheckBlocks(params.sends, "send", size_));
  UPIPE_RETURN_IF_ERROR(CheckBlocks(params.receives, "receive", size_));
  if (SizesWith(params.sends, rank_) != SizesWith(params.receives, rank_)) {
    return absl::InvalidArgumentError(absl::StrCat("all-to-all: the blocks rank ", rank_,
                                                   " sends to itself are not those it receives"));
  }
  std::lock_guard<std::mutex> lock(mutex_);
  const CommOperation operation = OperationOf(params);
  ++stats_.Of(operation).calls;
  for (const Block& send : params.sends) CountBytes(operation, send.peer, send.bytes);
  return absl::OkStatus();
}

absl::Status Traffic::AddAllGather(const RankGroup& group, const void* send, void* receive,
                                   int64_t bytes) {
  UPIPE_RETURN_IF_ERROR(CheckGroup("all-gather", group));
  UPIPE_RETURN_IF_ERROR(CheckMemory("all-gather", bytes, {send, receive}));
  CountToEach(CommOperation::kAllGather, group, bytes);
  return absl::OkStatus();
}

absl::Status Traffic::AddReduceScatter(const RankGroup& group, const float* send, float* receive,
                                       int64_t count, void* scratch) {
  UPIPE_RETURN_IF_ERROR(CheckGroup("reduce-scatter", group));
  UPIPE_RETURN_IF_ERROR(CheckMemory("reduce-scatter", count, {send, receive}));
  const int64_t landing_bytes = group.size() == 1 ? 0 : count * static_cast<int64_t>(sizeof(float));
  UPIPE_RETURN_IF_ERROR(CheckMemory("reduce-scatter scratch", landing_bytes, {scratch}));
  CountToEach(CommOperation::kReduceScatter, group, count * static_cast<int64_t>(sizeof(float)));
  return absl::OkStatus();
}

absl::Status Traffic::AddAllReduce(double* values, int64_t count, void* scratch) {
  UPIPE_RETURN_IF_ERROR(CheckMemory("all-reduce", count, {values}));
  UPIPE_RETURN_IF_ERROR(
      CheckMemory("all-reduce scratch", AllReduceScratchBytesFor(size_, count), {scratch}));
  CountToEach(CommOperation::kAllReduce, everyone_, count * static_cast<int64_t>(sizeof(double)));
  return absl::OkStatus();
}

absl::Status Traffic::AddBarrier() {
  CountToEach(CommOperation::kBarrier, everyone_, 0);
  return absl::OkStatus();
}

absl::Status Traffic::CheckGroup(const char* op, const RankGroup& group) const {
  const bool ascending =
      std::adjacent_find(group.begin(), group.end(), std::greater_equal<int>()) == group.end();
  const bool within = !group.empty() && group.front() >= 0 && group.back() < size_;
  if (ascending && within && std::binary_search(group.begin(), group.end(), rank_))
    return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(op, ": the group [", absl::StrJoin(group, " "),
                                                 "] must be ascending ranks of [0, ", size_,
                                                 ") with the caller's own, ", rank_));
}

void Traffic::CountToEach(CommOperation operation, const RankGroup& group, int64_t bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  ++stats_.Of(operation).calls;
  for (int peer : group) CountBytes(operation, peer, bytes);
}

void Traffic::CountBytes(CommOperation operation, int peer, int64_t bytes) {
  if (peer == rank_) return;
  stats_.bytes_sent_to_peer[peer] += bytes;
  stats_.Of(operation).bytes_sent += bytes;
}

void Traffic::AddSeconds(CommOperation operation, double seconds) {
  std::lock_guard<std::mutex> lock(mutex_);
  stats_.Of(operation).seconds += seconds;
}

CommStats Traffic::stats() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return stats_;
}

}  // namespace upipe::comm
