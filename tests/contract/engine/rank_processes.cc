#include "tests/contract/engine/rank_processes.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"

namespace upipe::comm {

bool SendFrame(int fd, const std::string& text) {
  const uint32_t length = text.size();
  const std::string frame =
      std::string(reinterpret_cast<const char*>(&length), sizeof length) + text;
  return send(fd, frame.data(), frame.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(frame.size());
}

std::optional<std::string> ReceiveFrame(int fd) {
  uint32_t length = 0;
  if (recv(fd, &length, sizeof length, MSG_WAITALL) != sizeof length) return std::nullopt;
  std::string text(length, '\0');
  if (length > 0 && recv(fd, text.data(), length, MSG_WAITALL) != static_cast<ssize_t>(length))
    return std::nullopt;
  return text;
}

int RankProcessMain(int argc, char** argv, int (*run_rank)(const RankCase&)) {
  if (argc == 6 && std::string(argv[1]) == "--rank-process") {
    return run_rank({argv[2], std::atoi(argv[3]), std::atoi(argv[4]), std::atoi(argv[5])});
  }
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}

absl::StatusOr<std::unique_ptr<Communicator>> MeetPeers(UcxContext& context, const RankCase& self,
                                                        const CommOptions& options) {
  SendFrame(self.fd, context.address());
  PeerGroup group{
      .rank = self.rank, .addresses = {}, .node_ids = {}, .identity = {"job", 1, 0xF00D, "nonce"}};
  for (std::vector<std::string>* list : {&group.addresses, &group.node_ids}) {
    for (int rank = 0; rank < self.size; ++rank) {
      std::optional<std::string> word = ReceiveFrame(self.fd);
      if (!word.has_value()) return absl::UnavailableError("the supervisor is gone");
      list->push_back(*std::move(word));
    }
  }
  return context.Connect(group, options);
}

absl::Status ExchangeOnce(Communicator& comm, kernels::Stream& stream, int64_t bytes,
                          std::vector<char>* out, std::vector<char>* in) {
  AllToAllVParams params;
  for (int peer = 0; peer < comm.size(); ++peer) {
    std::memset(out->data() + peer * bytes, 1 + comm.rank() * comm.size() + peer, bytes);
    params.sends.push_back({peer, out->data() + peer * bytes, bytes});
    params.receives.push_back({peer, in->data() + peer * bytes, bytes});
  }
  comm.AllToAllV(params, stream).IgnoreError();
  if (absl::Status status = stream.Synchronize(); !status.ok()) return status;
  for (int peer = 0; peer < comm.size(); ++peer) {
    const char expected = static_cast<char>(1 + peer * comm.size() + comm.rank());
    for (int64_t i = 0; i < bytes; ++i) {
      if ((*in)[peer * bytes + i] != expected)
        return absl::DataLossError(absl::StrCat("byte ", i, " from ", peer));
    }
  }
  return absl::OkStatus();
}

RankProcesses::RankProcesses(const std::string& scenario, std::vector<std::string> node_of_rank,
                             const std::function<std::vector<std::string>(int)>& prefix)
    : node_of_rank_(std::move(node_of_rank)) {
  for (int rank = 0; rank < static_cast<int>(node_of_rank_.size()); ++rank)
    Start(scenario, rank, prefix ? prefix(rank) : std::vector<std::string>());
  for (int fd : fds_) addresses_.push_back(ReceiveFrame(fd).value_or(""));
}

RankProcesses::~RankProcesses() {
  for (size_t rank = 0; rank < pids_.size(); ++rank) {
    if (pids_[rank] != 0) kill(pids_[rank], SIGKILL);
    Reap(rank);
    close(fds_[rank]);
    if (testing::Test::HasFailure()) std::fputs(Output(rank).c_str(), stderr);
    close(outputs_[rank]);
  }
}

void RankProcesses::Introduce() {
  for (int fd : fds_) {
    for (const std::string& address : addresses_) SendFrame(fd, address);
    for (const std::string& node : node_of_rank_) SendFrame(fd, node);
  }
}

void RankProcesses::Signal(int rank, int signal) const {
  ASSERT_GT(pids_[rank], 0);
  ASSERT_EQ(0, kill(pids_[rank], signal));
}

int RankProcesses::Reap(int rank) {
  int status = 0;
  if (pids_[rank] != 0) waitpid(pids_[rank], &status, 0);
  ended_.push_back(pids_[rank]);
  pids_[rank] = 0;
  return status;
}

void RankProcesses::EndAll() {
  for (size_t rank = 0; rank < pids_.size(); ++rank) Tell(rank, "end");
  for (size_t rank = 0; rank < pids_.size(); ++rank) {
    if (pids_[rank] == 0) continue;
    EXPECT_EQ(0, Reap(rank)) << "rank " << rank;
  }
}

std::string RankProcesses::Output(int rank) const {
  struct stat now = {};
  fstat(outputs_[rank], &now);
  std::string text(now.st_size, '\0');
  const ssize_t count = pread(outputs_[rank], text.data(), text.size(), 0);
  text.resize(std::max<ssize_t>(count, 0));
  return text;
}

void RankProcesses::ExpectNothingLeft() const {
  std::ifstream segments("/proc/sysvipc/shm");
  std::string line;
  while (std::getline(segments, line)) {
    std::istringstream fields(line);
    int64_t key = 0, id = 0, bytes = 0, creator = 0;
    std::string permissions;
    if (!(fields >> key >> id >> permissions >> bytes >> creator)) continue;
    EXPECT_EQ(0, std::count(ended_.begin(), ended_.end(), creator))
        << "segment " << id << " of " << bytes;
  }
  for (const auto& entry : std::filesystem::directory_iterator("/dev/shm")) {
    EXPECT_FALSE(absl::StartsWith(entry.path().filename().string(), "ucx_shm")) << entry.path();
  }
}

void RankProcesses::Start(const std::string& scenario, int rank,
                          const std::vector<std::string>& prefix) {
  int pair[2];
  ASSERT_EQ(0, socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair));
  const int output = memfd_create("output", MFD_CLOEXEC);
  ASSERT_GE(output, 0);
  std::vector<std::string> words = prefix;
  for (const std::string& word :
       {std::filesystem::read_symlink("/proc/self/exe").string(), std::string("--rank-process"),
        scenario, absl::StrCat(rank), absl::StrCat(node_of_rank_.size()), absl::StrCat(pair[1])}) {
    words.push_back(word);
  }
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  const pid_t pid = fork();
  if (pid == 0) {
    fcntl(pair[1], F_SETFD, 0);
    dup2(output, STDOUT_FILENO);  // where UCX complains
    dup2(output, STDERR_FILENO);
    if (rank == 0) unsetenv("UCX_HANDLE_ERRORS");  // one rank lets UCX install its handlers
    execvp(argv[0], argv.data());
    _exit(127);
  }
  close(pair[1]);
  pids_.push_back(pid);
  fds_.push_back(pair[0]);
  outputs_.push_back(output);
}

}  // namespace upipe::comm
