// Ranks as processes of a test binary that starts itself once per rank, and their supervisor: what
// a worker and its trainers are, without gRPC.
#pragma once

#include <sys/types.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/comm/communicator.h"
#include "engine/comm/ucx/ucx_communicator.h"

namespace upipe::comm {

// Framed strings over a socket pair: how a rank and its supervisor talk.
bool SendFrame(int fd, const std::string& text);
// Nothing when the other end is gone.
std::optional<std::string> ReceiveFrame(int fd);

struct RankCase {
  std::string scenario;
  int rank = 0;
  int size = 0;
  int fd = -1;  // to the supervisor
};

// Main of such a test binary: the tests, or one rank when the supervisor started it. run_rank's
// result is the exit code.
int RankProcessMain(int argc, char** argv, int (*run_rank)(const RankCase&));

// A rank's side of RankProcesses::Introduce.
absl::StatusOr<std::unique_ptr<Communicator>> MeetPeers(UcxContext& context, const RankCase& self,
                                                        const CommOptions& options);

// `bytes` to and from everyone, through buffers of size() * bytes; the status of the operation, or
// DataLoss when a byte is wrong.
absl::Status ExchangeOnce(Communicator& comm, kernels::Stream& stream, int64_t bytes,
                          std::vector<char>* out, std::vector<char>* in);

class RankProcesses {
 public:
  // Starts them and takes their addresses. prefix(rank): words before the command line that run
  // it somewhere else in the same process.
  RankProcesses(const std::string& scenario, std::vector<std::string> node_of_rank,
                const std::function<std::vector<std::string>(int rank)>& prefix = nullptr);
  ~RankProcesses();

  // What the rank said first: its address, or why it has none.
  const std::string& Address(int rank) const { return addresses_[rank]; }
  // Tells every rank the addresses and nodes of all.
  void Introduce();

  std::string Result(int rank) { return ReceiveFrame(fds_[rank]).value_or("died"); }
  void Tell(int rank, const std::string& order) { SendFrame(fds_[rank], order); }
  void Signal(int rank, int signal) const;
  // Blocks until the process has ended; its wait status.
  int Reap(int rank);
  // Healthy ranks are told to leave and must do so with code 0.
  void EndAll();

  // What it wrote so far.
  std::string Output(int rank) const;
  // System V segments made by our ranks, and files UCX might leave.
  void ExpectNothingLeft() const;

 private:
  void Start(const std::string& scenario, int rank, const std::vector<std::string>& prefix);

  const std::vector<std::string> node_of_rank_;
  std::vector<std::string> addresses_;
  std::vector<pid_t> pids_;  // 0: reaped
  std::vector<pid_t> ended_;
  std::vector<int> fds_;
  std::vector<int> outputs_;  // memory files
};

}  // namespace upipe::comm
