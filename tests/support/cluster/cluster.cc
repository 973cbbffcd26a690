#include "tests/support/cluster/cluster.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <sstream>
#include <thread>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"

namespace upipe::testing {
namespace {

namespace fs = std::filesystem;

std::string ReadFile(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  std::stringstream text;
  text << in.rdbuf();
  return text.str();
}

// In the child, after fork: nothing but async-signal-safe calls.
[[noreturn]] void Exec(const std::vector<char*>& argv, int out, int err) {
  setpgid(0, 0);
  prctl(PR_SET_PDEATHSIG, SIGKILL);  // a test that aborts leaves nothing behind
  dup2(out, STDOUT_FILENO);
  dup2(err, STDERR_FILENO);
  execvp(argv[0], argv.data());
  _exit(127);
}

std::vector<char*> Argv(const std::vector<std::string>& arguments) {
  std::vector<char*> argv;
  for (const std::string& argument : arguments) argv.push_back(const_cast<char*>(argument.c_str()));
  argv.push_back(nullptr);
  return argv;
}

int ExitCodeOf(int status) {
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

}  // namespace

std::string BinDir() {
  const char* dir = std::getenv("UPIPE_BIN_DIR");
  return dir != nullptr ? dir : "bin";
}

CommandResult RunCommand(const std::vector<std::string>& arguments, absl::Duration limit) {
  int out[2], err[2];
  EXPECT_EQ(pipe2(out, O_CLOEXEC), 0);
  EXPECT_EQ(pipe2(err, O_CLOEXEC), 0);
  const std::vector<char*> argv = Argv(arguments);
  const pid_t pid = fork();
  if (pid == 0) Exec(argv, out[1], err[1]);
  close(out[1]);
  close(err[1]);
  CommandResult result;
  const absl::Time deadline = absl::Now() + limit;
  pollfd pipes[2] = {{out[0], POLLIN, 0}, {err[0], POLLIN, 0}};
  std::string* const texts[2] = {&result.output, &result.errors};
  int open_pipes = 2;
  while (open_pipes > 0 && absl::Now() < deadline) {
    poll(pipes, 2, 50);
    for (int i = 0; i < 2; ++i) {
      if (pipes[i].fd < 0 || pipes[i].revents == 0) continue;
      char buffer[4096];
      const ssize_t count = read(pipes[i].fd, buffer, sizeof(buffer));
      if (count > 0) {
        texts[i]->append(buffer, static_cast<size_t>(count));
      } else {
        pipes[i].fd = -1;
        --open_pipes;
      }
    }
  }
  if (open_pipes > 0) kill(-pid, SIGKILL);
  int status = 0;
  waitpid(pid, &status, 0);
  close(out[0]);
  close(err[0]);
  result.exit_code = ExitCodeOf(status);
  return result;
}

Cluster::Cluster(const std::string& folder) : folder_(folder) {
  fs::remove_all(folder_);
  fs::create_directories(folder_);
}

Cluster::~Cluster() {
  for (Daemon& worker : workers_) {
    if (worker.pid > 0) kill(worker.pid, SIGINT);  // the second of two ends its ranks at once
    Kill(worker, SIGTERM);
  }
  Kill(coordinator_, SIGTERM);
  if (::testing::Test::HasFailure()) {
    for (const auto& entry : fs::directory_iterator(folder_)) {
      if (entry.path().extension() != ".log") continue;
      std::string text = ReadFile(entry.path());
      if (text.size() > 6000) text = text.substr(text.size() - 6000);
      std::fprintf(stderr, "--- %s\n%s\n", entry.path().c_str(), text.c_str());
    }
  }
  std::error_code ignored;
  fs::remove_all(folder_, ignored);
}

void Cluster::PutOn(const std::string& name, std::vector<std::string> words) {
  places_[name] = std::move(words);
}

void Cluster::ListenOn(const std::string& host) {
  listen_ = host + ":0";
  listen_flags_ = {"--insecure-listen"};
}

std::vector<std::string> Cluster::Placed(const std::string& name,
                                         const std::vector<std::string>& arguments) const {
  std::vector<std::string> words;
  if (const auto place = places_.find(name); place != places_.end()) words = place->second;
  words.insert(words.end(), arguments.begin(), arguments.end());
  return words;
}

pid_t Cluster::Spawn(const std::string& name, const std::vector<std::string>& arguments) {
  const std::string log = absl::StrCat(folder_, "/", name, ".log");
  const int file = open(log.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
  EXPECT_GE(file, 0) << log;
  const std::vector<std::string> words = Placed(name, arguments);
  const std::vector<char*> argv = Argv(words);
  const pid_t pid = fork();
  if (pid == 0) Exec(argv, file, file);
  close(file);
  return pid;
}

void Cluster::Kill(Daemon& daemon, int signal) {
  if (daemon.pid <= 0) return;
  kill(daemon.pid, signal);
  int status = 0;
  const absl::Time deadline = absl::Now() + absl::Seconds(15);
  while (waitpid(daemon.pid, &status, WNOHANG) == 0) {
    if (absl::Now() > deadline) {
      ADD_FAILURE() << daemon.name << " did not end within 15 s of signal " << signal;
      kill(daemon.pid, SIGKILL);
      waitpid(daemon.pid, &status, 0);
      break;
    }
    absl::SleepFor(absl::Milliseconds(10));
  }
  daemon.pid = -1;
}

void Cluster::StartCoordinator(double autonomy_seconds, const std::vector<std::string>& flags) {
  const std::string address_file = folder_ + "/address";
  fs::remove(address_file);
  // A restarted coordinator must be found where it was: workers keep dialling the same address.
  std::vector<std::string> arguments = {BinDir() + "/upipe-coordinator",
                                        "--listen",
                                        address_.empty() ? listen_ : address_,
                                        "--state-dir",
                                        folder_ + "/coordinator",
                                        "--address-file",
                                        address_file,
                                        "--heartbeat",
                                        "0.2",
                                        "--kill-bound",
                                        "2",
                                        "--autonomy",
                                        absl::StrCat(autonomy_seconds),
                                        "--margin",
                                        "1"};
  arguments.insert(arguments.end(), listen_flags_.begin(), listen_flags_.end());
  arguments.insert(arguments.end(), flags.begin(), flags.end());
  coordinator_ = {"coordinator", Spawn("coordinator", arguments)};
  Await("the coordinator's address", absl::Seconds(20), [&] { return fs::exists(address_file); });
  address_ = ReadFile(address_file);
  address_.erase(address_.find_last_not_of("\n") + 1);
}

void Cluster::StartWorker(const std::string& name, int slots, const std::string& memory_per_rank,
                          const std::vector<std::string>& flags) {
  const auto known = std::find_if(workers_.begin(), workers_.end(),
                                  [&](const Daemon& d) { return d.name == name; });
  Daemon& worker = known == workers_.end() ? workers_.emplace_back() : *known;
  std::vector<std::string> arguments = {BinDir() + "/upipe-worker",
                                        "--coordinator",
                                        address_,
                                        "--name",
                                        name,
                                        "--node",
                                        name,
                                        "--slots",
                                        absl::StrCat(slots),
                                        "--memory-per-rank",
                                        memory_per_rank,
                                        "--state-dir",
                                        folder_ + "/" + name};
  arguments.insert(arguments.end(), flags.begin(), flags.end());
  worker = {name, Spawn(name, arguments)};
  Await(absl::StrCat(name, " to be READY"), absl::Seconds(20), [&] {
    for (const auto& node : Nodes()) {
      if (node["worker"] == name && node.value("state", "") == "NODE_STATE_READY") return true;
    }
    return false;
  });
}

void Cluster::KillCoordinator() { Kill(coordinator_, SIGKILL); }

int Cluster::ReapCoordinator() {
  int status = 0;
  Await("the coordinator to end", absl::Seconds(20),
        [&] { return waitpid(coordinator_.pid, &status, WNOHANG) == coordinator_.pid; });
  coordinator_.pid = -1;
  return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
}

void Cluster::KillWorker(const std::string& name) {
  for (Daemon& worker : workers_) {
    if (worker.name == name) Kill(worker, SIGKILL);
  }
}

void Cluster::Signal(const std::string& name, int signal) const {
  pid_t pid = name == "coordinator" ? coordinator_.pid : -1;
  for (const Daemon& worker : workers_) {
    if (worker.name == name) pid = worker.pid;
  }
  ASSERT_GT(pid, 0) << name;
  EXPECT_EQ(kill(pid, signal), 0) << name;
}

std::vector<std::string> Cluster::TakeEnded() {
  std::vector<std::string> ended;
  const auto look = [&ended](Daemon& daemon) {
    if (daemon.pid <= 0 || waitpid(daemon.pid, nullptr, WNOHANG) != daemon.pid) return;
    daemon.pid = -1;
    ended.push_back(daemon.name);
  };
  look(coordinator_);
  for (Daemon& worker : workers_) look(worker);
  return ended;
}

CommandResult Cluster::Upipe(const std::vector<std::string>& arguments,
                             absl::Duration limit) const {
  std::vector<std::string> all = {BinDir() + "/upipe", "--coordinator", address_};
  all.insert(all.end(), arguments.begin(), arguments.end());
  return RunCommand(Placed("upipe", all), limit);
}

nlohmann::json Cluster::Describe(const std::string& job) const {
  const CommandResult result = Upipe({"describe", job, "-o", "json"});
  const auto json = nlohmann::json::parse(result.output, nullptr, /*allow_exceptions=*/false);
  EXPECT_TRUE(json.is_object()) << result.output << result.errors;
  return json.is_object() ? json : nlohmann::json::object();
}

nlohmann::json Cluster::Nodes() const {
  const CommandResult result = Upipe({"nodes", "-o", "json"});
  const auto json = nlohmann::json::parse(result.output, nullptr, /*allow_exceptions=*/false);
  return json.is_object() && json.contains("nodes") ? json["nodes"] : nlohmann::json::array();
}

void Cluster::Await(const std::string& what, absl::Duration limit,
                    const std::function<bool()>& done) const {
  const absl::Time deadline = absl::Now() + limit;
  while (!done()) {
    if (absl::Now() > deadline) {
      FAIL() << "waited " << limit << " for " << what;
    }
    absl::SleepFor(absl::Milliseconds(20));
  }
}

void Cluster::AwaitState(const std::string& job, const std::string& shown_state,
                         absl::Duration limit) const {
  Await(absl::StrCat(job, " to be ", shown_state), limit,
        [&] { return Describe(job).value("shown_state", "") == shown_state; });
}

void Cluster::AwaitStep(const std::string& job, absl::Duration limit) const {
  Await(absl::StrCat("a step of ", job), limit,
        [&] { return Describe(job).contains("last_report"); });
}

std::string Cluster::Data() {
  const std::string data = folder_ + "/data";
  if (fs::exists(data)) return data;
  fs::create_directories(folder_ + "/text");
  for (int file = 0; file < 12; ++file) {
    std::ofstream out(absl::StrCat(folder_, "/text/", file, ".txt"));
    for (int line = 0; line < 120; ++line)
      out << "line " << line << " of file " << file << ": a b c d e f g\n";
  }
  const CommandResult result =
      RunCommand({BinDir() + "/upipe-data", "pack", folder_ + "/text", "--output", data});
  EXPECT_EQ(result.exit_code, 0) << result.errors;
  return data;
}

std::string Cluster::JobFile(const std::string& name, int ranks, int steps,
                             const std::string& extra) {
  const std::string path = absl::StrCat(folder_, "/", name, ".yaml");
  std::ofstream out(path);
  out << "name: " << name << "\n"
      << "model: {vocab_size: 257, hidden_size: 32, num_layers: 2, num_heads: 8, num_kv_heads: 2, "
         "head_dim: 8, "
         "intermediate_size: 48}\n"
      << "data: {path: " << Data() << "}\n"
      << "parallel: {ranks: " << ranks << ", method: upipe, heads_per_stage: " << ranks << "}\n"
      << "train: {context: 256, steps: " << steps << "}\n"
      << extra;
  return path;
}

std::vector<pid_t> TrainersOf(const std::string& job_id) {
  std::vector<pid_t> pids;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator("/proc", error)) {
    pid_t pid = 0;
    if (!absl::SimpleAtoi(entry.path().filename().string(), &pid)) continue;
    const std::string environment = ReadFile(entry.path() / "environ");
    if (environment.find(absl::StrCat("UPIPE_JOB=", job_id)) != std::string::npos)
      pids.push_back(pid);
  }
  return pids;
}

int RankOf(pid_t trainer) {
  constexpr char kName[] = "UPIPE_RANK=";
  int rank = -1;
  for (const absl::string_view entry :
       absl::StrSplit(ReadFile(absl::StrCat("/proc/", trainer, "/environ")), '\0')) {
    if (absl::StartsWith(entry, kName))
      (void)absl::SimpleAtoi(entry.substr(sizeof(kName) - 1), &rank);
  }
  return rank;
}

int NumSharedMemorySegments() {
  std::ifstream table("/proc/sysvipc/shm");
  int count = 0;
  std::string line;
  std::getline(table, line);  // the heading
  while (std::getline(table, line)) {
    std::istringstream fields(line);
    int64_t key = 0, id = 0, bytes = 0;
    std::string permissions, creator;
    fields >> key >> id >> permissions >> bytes >> creator;
    count += !fs::exists("/proc/" + creator);
  }
  return count;
}

}  // namespace upipe::testing
