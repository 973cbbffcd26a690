#include "benchmarks/coordinator/coordinator_process.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <grpcpp/grpcpp.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <limits>
#include <sstream>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "common/status.h"
#include "upipe/v1/node_service.grpc.pb.h"

namespace upipe::bench {
namespace {

constexpr absl::Duration kStartLimit = absl::Minutes(2);

std::string BinDir() { return std::filesystem::read_symlink("/proc/self/exe").parent_path(); }

std::string ReadAll(const std::string& path) {
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

double NumberOf(absl::string_view text) {
  double number = 0;
  return absl::SimpleAtod(text, &number) ? number : 0;
}

// Of the label `name` in name="value".
std::string LabelOf(const std::string& line, const std::string& name) {
  const size_t begin = line.find(name + "=\"");
  if (begin == std::string::npos) return "";
  const size_t value = begin + name.size() + 2;
  return line.substr(value, line.find('"', value) - value);
}

}  // namespace

Histogram Histogram::Since(const Histogram& earlier) const {
  Histogram difference = *this;
  difference.count -= earlier.count;
  difference.sum -= earlier.sum;
  for (auto& [bound, number] : difference.up_to) {
    const auto before = earlier.up_to.find(bound);
    if (before != earlier.up_to.end()) number -= before->second;
  }
  return difference;
}

double Histogram::Bound(double share) const {
  for (const auto& [bound, number] : up_to) {
    if (number >= share * count) return bound;
  }
  return std::numeric_limits<double>::infinity();
}

void CoordinatorProcess::Exec() const {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  const std::string bin = BinDir();
  const std::vector<std::string> arguments = {bin + "/upipe-coordinator",
                                              "--state-dir",
                                              options_.folder + "/state",
                                              "--address-file",
                                              options_.folder + "/address",
                                              "--plan-binary",
                                              bin + "/../tests/upipe-fake-plan",
                                              "--listen",
                                              address_,
                                              "--heartbeat",
                                              absl::StrCat(options_.heartbeat_seconds),
                                              "--settle",
                                              absl::StrCat(options_.settle_seconds)};
  std::vector<char*> argv;
  for (const std::string& argument : arguments) argv.push_back(const_cast<char*>(argument.data()));
  argv.push_back(nullptr);
  const int log = open((options_.folder + "/coordinator.log").c_str(),
                       O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
  dup2(log, STDOUT_FILENO);
  dup2(log, STDERR_FILENO);
  setenv("LD_PRELOAD", (bin + "/upipe_bench_slow_fsync.so").c_str(), 1);
  setenv("UPIPE_BENCH_FSYNC_MICROSECONDS",
         absl::StrCat(absl::ToInt64Microseconds(options_.fsync)).c_str(), 1);
  execv(argv[0], argv.data());
  _exit(127);
}

absl::Status CoordinatorProcess::Start() {
  std::filesystem::remove(options_.folder + "/address");
  pid_ = fork();
  if (pid_ == 0) Exec();
  const absl::Time deadline = absl::Now() + kStartLimit;
  while (!std::filesystem::exists(options_.folder + "/address")) {
    if (waitpid(pid_, nullptr, WNOHANG) == pid_) {
      pid_ = -1;
      return absl::InternalError(absl::StrCat("the coordinator ended at its start: ",
                                              ReadAll(options_.folder + "/coordinator.log")));
    }
    if (absl::Now() > deadline) {
      return absl::DeadlineExceededError(
          absl::StrCat("the coordinator serves not after ", absl::FormatDuration(kStartLimit)));
    }
    absl::SleepFor(absl::Milliseconds(2));
  }
  std::ifstream(options_.folder + "/address") >> address_;
  return FindMetrics();
}

absl::Status CoordinatorProcess::FindMetrics() {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(-1);
  const auto nodes = v1::NodeService::NewStub(
      grpc::CreateCustomChannel(address_, grpc::InsecureChannelCredentials(), arguments));
  grpc::ClientContext context;
  context.set_wait_for_ready(true);
  context.set_deadline(absl::ToChronoTime(absl::Now() + kStartLimit));
  v1::ListNodesResponse response;
  const grpc::Status status = nodes->ListNodes(&context, {}, &response);
  if (!status.ok()) return absl::UnavailableError(status.error_message());
  metrics_address_ = response.coordinator_metrics_address();
  return absl::OkStatus();
}

void CoordinatorProcess::Kill() {
  if (pid_ < 0) return;
  kill(pid_, SIGKILL);
  waitpid(pid_, nullptr, 0);
  pid_ = -1;
}

double CoordinatorProcess::CpuSeconds() const {
  const std::string text = ReadAll(absl::StrCat("/proc/", pid_, "/stat"));
  // After the name in brackets, which may hold spaces: utime and stime are the 12th and 13th.
  const std::vector<std::string> fields = absl::StrSplit(text.substr(text.rfind(')') + 2), ' ');
  if (fields.size() < 13) return 0;
  return (NumberOf(fields[11]) + NumberOf(fields[12])) / sysconf(_SC_CLK_TCK);
}

double CoordinatorProcess::RssBytes() const {
  const std::vector<std::string> fields =
      absl::StrSplit(ReadAll(absl::StrCat("/proc/", pid_, "/statm")), ' ');
  return fields.size() < 2 ? 0 : NumberOf(fields[1]) * sysconf(_SC_PAGESIZE);
}

absl::StatusOr<std::string> CoordinatorProcess::Scrape() const {
  const std::pair<std::string, std::string> place = absl::StrSplit(metrics_address_, ':');
  sockaddr_in address{.sin_family = AF_INET,
                      .sin_port = htons(static_cast<uint16_t>(NumberOf(place.second)))};
  inet_pton(AF_INET, place.first.c_str(), &address.sin_addr);
  const int socket_fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  std::string text;
  if (connect(socket_fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0) {
    constexpr absl::string_view kRequest = "GET /metrics HTTP/1.0\r\n\r\n";
    if (write(socket_fd, kRequest.data(), kRequest.size()) > 0) {
      char buffer[1 << 16];
      for (ssize_t got; (got = read(socket_fd, buffer, sizeof(buffer))) > 0;) {
        text.append(buffer, got);
      }
    }
  }
  close(socket_fd);
  if (text.find("upipe_jobs") == std::string::npos) {
    return absl::UnavailableError("the metrics endpoint does not answer");
  }
  return text;
}

std::map<std::string, Histogram> StepSeconds(const std::string& scrape) {
  std::map<std::string, Histogram> steps;
  for (const auto part : absl::StrSplit(scrape, '\n')) {
    const std::string line(part);
    if (line.rfind("upipe_coordinator_step_seconds_", 0) != 0) continue;
    Histogram& histogram = steps[LabelOf(line, "event")];
    const double value = NumberOf(absl::StripAsciiWhitespace(line.substr(line.rfind(' ') + 1)));
    if (line.find("_sum{") != std::string::npos) histogram.sum = value;
    if (line.find("_count{") != std::string::npos) histogram.count = value;
    if (line.find("_bucket{") == std::string::npos || LabelOf(line, "le") == "+Inf") continue;
    histogram.up_to[NumberOf(LabelOf(line, "le"))] = value;
  }
  return steps;
}

double Value(const std::string& scrape, const std::string& series) {
  const size_t begin = scrape.find("\n" + series + " ");
  if (begin == std::string::npos) return 0;
  const size_t value = begin + series.size() + 2;
  return NumberOf(
      absl::StripAsciiWhitespace(scrape.substr(value, scrape.find('\n', value) - value)));
}

}  // namespace upipe::bench
