#include "engine/comm/communicator.h"

#include <numeric>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/status.h"

namespace upipe::comm {
namespace {

absl::Status CompareWithRank0(const std::vector<uint64_t>& values, const char* what) {
  std::vector<std::string> differing;
  for (size_t rank = 1; rank < values.size(); ++rank) {
    if (values[rank] != values[0])
      differing.push_back(absl::StrCat(rank, " (", absl::Hex(values[rank]), ")"));
  }
  if (differing.empty()) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "the ", what, " differs between ranks: rank 0 has ", absl::Hex(values[0]), ", not so rank ",
      absl::StrJoin(differing, ", "), "; all ranks must run the same plan with the same build"));
}

}  // namespace

const char* NameOf(CommOperation operation) {
  static constexpr const char* kNames[kNumCommOperations] = {
      "all-to-all", "ring", "all-gather", "reduce-scatter", "all-reduce", "barrier"};
  return kNames[static_cast<size_t>(operation)];
}

int64_t CommStats::num_collectives() const {
  int64_t calls = 0;
  for (const Use& use : by_operation) calls += use.calls;
  return calls;
}

double CommStats::seconds() const {
  double seconds = 0;
  for (const Use& use : by_operation) seconds += use.seconds;
  return seconds;
}

RankGroup AllRanks(int size) {
  RankGroup ranks(size);
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

ReduceRoom ReduceRoomOf(const std::string& backend) {
  return backend == "cuda" ? kDeviceReduceRoom : ReduceRoom();
}

Communicator::Communicator(int size) : everyone_(AllRanks(size)) {}

absl::Status VerifySameOnAllRanks(Communicator& comm, uint64_t value, const char* what,
                                  void* scratch, kernels::Device& device, kernels::Stream& stream) {
  auto* gathered = static_cast<uint64_t*>(scratch);
  uint64_t* own = gathered + comm.rank();
  // What a dry device, which copies nothing, leaves in place.
  std::vector<uint64_t> values(comm.size(), value);
  device.CopyFromHost(own, &value, sizeof(value), stream);
  UPIPE_RETURN_IF_ERROR(comm.AllGather(comm.everyone(), own, gathered, sizeof(value), stream));
  device.CopyToHost(values.data(), gathered, comm.size() * sizeof(value), stream);
  UPIPE_RETURN_IF_ERROR(stream.Synchronize());
  return CompareWithRank0(values, what);
}

}  // namespace upipe::comm
