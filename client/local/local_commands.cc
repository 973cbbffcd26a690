#include "client/local/local_commands.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <csignal>
#include <deque>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "client/commands.h"
#include "client/local/cluster_file.h"
#include "client/render.h"
#include "common/check.h"
#include "common/clock.h"
#include "common/machine.h"
#include "common/status.h"
#include "common/units.h"

namespace upipe::client {
namespace {

constexpr absl::Duration kStartLimit =
    absl::Seconds(60);  // of the coordinator, then of all workers
constexpr absl::Duration kPollInterval = absl::Milliseconds(20);
constexpr absl::Duration kKillLimit = absl::Seconds(5);  // after SIGKILL

// Held for the length of one `up` or `down`, so that two of them do not meet.
class StateLock {
 public:
  static absl::StatusOr<StateLock> Take(const std::string& state_dir) {
    std::error_code error;
    std::filesystem::create_directories(state_dir + "/logs", error);
    if (error)
      return absl::UnavailableError(
          absl::StrCat("cannot create ", state_dir, ": ", error.message()));
    const std::string path = absl::StrCat(state_dir, "/lock");
    const int fd = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0) return absl::ErrnoToStatus(errno, absl::StrCat("cannot open ", path));
    StateLock lock(fd);
    if (flock(fd, LOCK_EX | LOCK_NB) != 0) {
      return absl::FailedPreconditionError(absl::StrCat("another `upipe local` is at work in ",
                                                        state_dir, "; try again when it is done"));
    }
    return lock;
  }
  StateLock(StateLock&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  ~StateLock() {
    if (fd_ >= 0) close(fd_);
  }

 private:
  explicit StateLock(int fd) : fd_(fd) {}
  int fd_;
};

std::vector<std::string> AliveNames(const LocalCluster& cluster) {
  std::vector<std::string> names;
  for (const LocalDaemon& daemon : cluster.daemons) {
    if (IsAlive(daemon.process))
      names.push_back(absl::StrCat(daemon.name, " (pid ", daemon.process.pid, ")"));
  }
  return names;
}

std::string ReadText(const std::string& path) {
  std::ifstream file(path);
  return std::string(std::istreambuf_iterator<char>(file), {});
}

// The end of a daemon's log, for an error message.
std::string LogTail(const LocalDaemon& daemon) {
  std::vector<std::string> lines =
      absl::StrSplit(ReadText(daemon.log_path), '\n', absl::SkipEmpty());
  const size_t skip = lines.size() > 10 ? lines.size() - 10 : 0;
  std::string tail;
  for (size_t i = skip; i < lines.size(); ++i) absl::StrAppend(&tail, "\n  ", Printable(lines[i]));
  return tail;
}

// Asks every daemon of `cluster` to end, workers before the coordinator: once, so that jobs
// checkpoint and ranks leave, then a second time, at which a worker kills its ranks and proves them
// gone, then with SIGKILL. Returns a sentence for each daemon and each time that once was not
// enough.
std::vector<std::string> StopDaemons(const LocalCluster& cluster, const LocalConsole& console) {
  std::vector<std::string> remarks;
  const auto stop = [&](const std::vector<const LocalDaemon*>& daemons) {
    std::vector<std::pair<const LocalDaemon*, LiveProcess>> live;
    for (const LocalDaemon* daemon : daemons) {
      absl::StatusOr<LiveProcess> process = LiveProcess::Find(daemon->process);
      if (!process.ok()) continue;
      (void)process->Signal(SIGTERM);
      live.emplace_back(daemon, *std::move(process));
    }
    const auto name = [](const LocalDaemon& daemon) {
      return absl::StrCat(daemon.name, " (pid ", daemon.process.pid, ")");
    };
    BootTime end = SystemClock().Now() + console.stop_limit;
    bool hurried = false;
    for (const auto& [daemon, process] : live) {
      if (process.AwaitExit(end - SystemClock().Now())) continue;
      (void)process.Signal(SIGTERM);
      hurried = true;
      remarks.push_back(absl::StrCat(name(*daemon), " did not end within ",
                                     FormatTimeSpan(console.stop_limit), " and was told again"));
    }
    if (hurried) end = SystemClock().Now() + console.hurry_limit;
    for (const auto& [daemon, process] : live) {
      if (process.AwaitExit(end - SystemClock().Now())) continue;
      const absl::Status killed = process.Signal(SIGKILL);
      const bool ended = process.AwaitExit(kKillLimit);
      remarks.push_back(absl::StrCat(name(*daemon), " did not end within ",
                                     FormatTimeSpan(console.hurry_limit), " more and was killed",
                                     ended ? "" : "; it is still there",
                                     killed.ok() ? "" : absl::StrCat(": ", killed.message())));
    }
  };
  std::vector<const LocalDaemon*> workers;
  for (const LocalDaemon& daemon : cluster.daemons) {
    if (daemon.name != "coordinator") workers.push_back(&daemon);
  }
  stop(workers);
  for (const LocalDaemon& daemon : cluster.daemons) {
    if (daemon.name == "coordinator") stop({&daemon});
  }
  return remarks;
}

// Brings one cluster up, recording each daemon as soon as it runs.
class ClusterStarter {
 public:
  ClusterStarter(const LocalConsole& console, const LocalUpOptions& options)
      : console_(console), options_(options) {}

  absl::Status Start() {
    UPIPE_RETURN_IF_ERROR(StartCoordinator());
    for (int i = 0; i < options_.workers; ++i) UPIPE_RETURN_IF_ERROR(StartWorker(i));
    return AwaitReady();
  }

  const LocalCluster& cluster() const { return cluster_; }

 private:
  std::string InState(absl::string_view name) const {
    return absl::StrCat(console_.state_dir, "/", name);
  }

  absl::Status Launch(const std::string& name, std::vector<std::string> arguments) {
    const std::string log = InState(absl::StrCat("logs/", name, ".log"));
    UPIPE_ASSIGN_OR_RETURN(ProcessIdentity process, StartDaemon(arguments, log));
    cluster_.daemons.push_back({name, std::move(process), log});
    return WriteCluster(console_.state_dir, cluster_);
  }

  // An error naming the first daemon that has ended.
  absl::Status CheckAlive() const {
    for (const LocalDaemon& daemon : cluster_.daemons) {
      if (IsAlive(daemon.process)) continue;
      return absl::UnavailableError(absl::StrCat(daemon.name,
                                                 " ended while starting; last lines of ",
                                                 daemon.log_path, ":", LogTail(daemon)));
    }
    return absl::OkStatus();
  }

  absl::Status StartCoordinator() {
    const std::string address_file = InState("coordinator.address");
    std::error_code error;
    std::filesystem::remove(address_file, error);
    UPIPE_RETURN_IF_ERROR(Launch(
        "coordinator", {console_.binary_dir + "/upipe-coordinator", "--listen", "127.0.0.1:0",
                        "--state-dir", InState("coordinator"), "--address-file", address_file}));
    const BootTime end = SystemClock().Now() + kStartLimit;
    while (cluster_.address.empty()) {
      UPIPE_RETURN_IF_ERROR(CheckAlive());
      if (SystemClock().Now() > end) {
        return absl::DeadlineExceededError(absl::StrCat("the coordinator did not serve within ",
                                                        FormatTimeSpan(kStartLimit), "; see ",
                                                        cluster_.daemons[0].log_path));
      }
      absl::SleepFor(kPollInterval);
      cluster_.address = std::string(absl::StripAsciiWhitespace(ReadText(address_file)));
    }
    return WriteCluster(console_.state_dir, cluster_);
  }

  absl::Status StartWorker(int index) {
    const std::string name = absl::StrCat("worker-", index);
    const int64_t ranks = int64_t{options_.workers} * options_.ranks_per_worker;
    const int64_t memory =
        options_.memory_per_rank.value_or(AvailableMemoryBytes().value_or(0) / ranks);
    return Launch(
        name, {console_.binary_dir + "/upipe-worker", "--coordinator", cluster_.address, "--name",
               name, "--node", HostName(), "--slots", absl::StrCat(options_.ranks_per_worker),
               "--memory-per-rank", absl::StrCat(memory), "--state-dir", InState(name)});
  }

  absl::Status AwaitReady() {
    const std::unique_ptr<CoordinatorClient> coordinator = console_.connect(cluster_.address);
    const BootTime end = SystemClock().Now() + kStartLimit;
    while (true) {
      UPIPE_RETURN_IF_ERROR(CheckAlive());
      const absl::StatusOr<v1::ListNodesResponse> nodes = coordinator->ListNodes();
      int ready = 0;
      for (int i = 0; nodes.ok() && i < options_.workers; ++i) {
        const std::string name = absl::StrCat("worker-", i);
        ready +=
            std::any_of(nodes->nodes().begin(), nodes->nodes().end(), [&](const v1::Node& node) {
              return node.worker() == name && node.state() == v1::NODE_STATE_READY;
            });
      }
      if (ready == options_.workers) return absl::OkStatus();
      if (SystemClock().Now() > end) {
        return absl::DeadlineExceededError(
            absl::StrCat(ready, " of ", options_.workers, " workers were ready within ",
                         FormatTimeSpan(kStartLimit), "; see ", InState("logs")));
      }
      absl::SleepFor(kPollInterval);
    }
  }

  const LocalConsole& console_;
  const LocalUpOptions& options_;
  LocalCluster cluster_;
};

int Fail(const LocalConsole& console, const absl::Status& status) {
  console.err << "upipe: " << status.message() << "\n";
  return kExitFailed;
}

}  // namespace

int LocalUp(const LocalConsole& console, const LocalUpOptions& options) {
  const absl::StatusOr<StateLock> lock = StateLock::Take(console.state_dir);
  if (!lock.ok()) return Fail(console, lock.status());
  const absl::StatusOr<LocalCluster> before = ReadCluster(console.state_dir);
  if (before.ok()) {
    const std::vector<std::string> alive = AliveNames(*before);
    if (!alive.empty()) {
      return Fail(console, absl::FailedPreconditionError(absl::StrCat(
                               "already up at ", before->address, ": ", absl::StrJoin(alive, ", "),
                               "; `upipe local down` ends it")));
    }
  } else if (!absl::IsNotFound(before.status())) {
    return Fail(console, before.status());
  }
  ClusterStarter starter(console, options);
  const absl::Status started = starter.Start();
  if (!started.ok()) {
    Fail(console, started);
    for (const std::string& remark : StopDaemons(starter.cluster(), console))
      console.err << remark << "\n";
    const absl::Status removed = RemoveCluster(console.state_dir);
    if (!removed.ok()) Fail(console, removed);
    return kExitFailed;
  }
  console.out << "Up: coordinator at " << starter.cluster().address
              << ", workers: " << options.workers << ", slots of each: " << options.ranks_per_worker
              << "\nLogs: " << console.state_dir << "/logs   end with: upipe local down\n";
  return kExitDone;
}

int LocalDown(const LocalConsole& console) {
  const absl::StatusOr<StateLock> lock = StateLock::Take(console.state_dir);
  if (!lock.ok()) return Fail(console, lock.status());
  const absl::StatusOr<LocalCluster> cluster = ReadCluster(console.state_dir);
  if (absl::IsNotFound(cluster.status())) {
    console.out << "Nothing is up in " << console.state_dir << ".\n";
    return kExitDone;
  }
  if (!cluster.ok()) return Fail(console, cluster.status());
  for (const std::string& remark : StopDaemons(*cluster, console)) console.err << remark << "\n";
  const std::vector<std::string> left = AliveNames(*cluster);
  if (!left.empty()) {
    return Fail(console,
                absl::InternalError(absl::StrCat("still running: ", absl::StrJoin(left, ", "))));
  }
  const absl::Status removed = RemoveCluster(console.state_dir);
  if (!removed.ok()) return Fail(console, removed);
  console.out << "Down: " << cluster->daemons.size() << " daemons ended.\n";
  return kExitDone;
}

int LocalStatus(const LocalConsole& console) {
  const absl::StatusOr<LocalCluster> cluster = ReadCluster(console.state_dir);
  if (absl::IsNotFound(cluster.status())) {
    console.out << "Nothing is up in " << console.state_dir << ".\n";
    return kExitFailed;
  }
  if (!cluster.ok()) return Fail(console, cluster.status());
  std::vector<std::vector<std::string>> rows = {{"DAEMON", "PID", "STATE", "LOG"}};
  bool all_alive = true;
  for (const LocalDaemon& daemon : cluster->daemons) {
    const bool alive = IsAlive(daemon.process);
    all_alive &= alive;
    rows.push_back({daemon.name, absl::StrCat(daemon.process.pid), alive ? "running" : "gone",
                    daemon.log_path});
  }
  console.out << "Coordinator at "
              << (cluster->address.empty() ? "no address yet" : cluster->address) << "\n"
              << RenderTable(rows);
  return all_alive ? kExitDone : kExitFailed;
}

std::optional<std::string> LocalAddress(const std::string& state_dir) {
  const absl::StatusOr<LocalCluster> cluster = ReadCluster(state_dir);
  if (!cluster.ok() || cluster->address.empty()) return std::nullopt;
  return cluster->address;
}

}  // namespace upipe::client
