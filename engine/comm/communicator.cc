#include "engine/comm/communicator.h"

#include <numeric>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/status.h"

namespace upipe::comm {
namespace {

absl::Status CompareWithRank0(const uint64_t* values, int size, const char* what) {
  std::vector<std::string> differing;
  for (int rank = 1; rank < size; ++rank) {
    if (values[rank] != values[0])
      differing.push_back(absl::StrCat(rank, " (", absl::Hex(values[rank]), ")"));
  }
  if (differing.empty()) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "the ", what, " differs between ranks: rank 0 has ", absl::Hex(values[0]), ", not so rank ",
      absl::StrJoin(differing, ", "), "; all ranks must run the same plan with the same build"));
}

}  // namespace

RankGroup AllRanks(int size) {
  RankGroup ranks(size);
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

Communicator::Communicator(int size) : everyone_(AllRanks(size)) {}

// The device's memory is written and read by tasks of its stream, which a dry stream drops.
absl::Status VerifySameOnAllRanks(Communicator& comm, uint64_t value, const char* what,
                                  void* scratch, kernels::Stream& stream) {
  auto* values = static_cast<uint64_t*>(scratch);
  const int rank = comm.rank();
  const int size = comm.size();
  stream.Submit([values, rank, value](kernels::ExecContext&) {
    values[rank] = value;
    return absl::OkStatus();
  });
  UPIPE_RETURN_IF_ERROR(
      comm.AllGather(comm.everyone(), values + rank, values, sizeof(uint64_t), stream));
  absl::Status verdict;
  stream.Submit([&verdict, values, size, what](kernels::ExecContext&) {
    verdict = CompareWithRank0(values, size, what);
    return absl::OkStatus();
  });
  UPIPE_RETURN_IF_ERROR(stream.Synchronize());
  return verdict;
}

}  // namespace upipe::comm
