// upipe-worker: the daemon of one node. Reads flags and environment, prints the effective
// configuration, runs.
#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <iostream>
#include <string>
#include <thread>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "common/failpoint.h"
#include "common/log.h"
#include "common/machine.h"
#include "common/parse_arguments.h"
#include "common/status.h"
#include "common/units.h"
#include "worker/runtime/worker_daemon.h"

namespace upipe::worker {
namespace {

std::string BesideThisBinary(const std::string& name) {
  std::error_code error;
  return (std::filesystem::read_symlink("/proc/self/exe", error).parent_path() / name).string();
}

std::string DefaultStateDir(const std::string& worker) {
  if (const char* state = getenv("XDG_STATE_HOME"); state != nullptr)
    return absl::StrCat(state, "/upipe/", worker);
  if (const char* home = getenv("HOME"); home != nullptr)
    return absl::StrCat(home, "/.local/state/upipe/", worker);
  return "";
}

// What trainers inherit: everything but our own variables, tests' failpoints excepted, and the
// thread counts the plan pins.
std::vector<std::string> TrainerEnvironment() {
  std::vector<std::string> kept;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string text = *entry;
    if ((absl::StartsWith(text, "UPIPE_") && !absl::StartsWith(text, "UPIPE_FAILPOINT")) ||
        absl::StartsWith(text, "OMP_NUM_THREADS=") ||
        absl::StartsWith(text, "OPENBLAS_NUM_THREADS=") ||
        absl::StartsWith(text, "UCX_HANDLE_ERRORS=") ||
        absl::StartsWith(text, "CUDA_VISIBLE_DEVICES=") ||
        absl::StartsWith(text, "CUDA_DEVICE_ORDER=") || absl::StartsWith(text, "NCCL_ALGO=") ||
        absl::StartsWith(text, "NCCL_PROTO=")) {
      continue;
    }
    kept.push_back(text);
  }
  return kept;
}

// The best instruction set of this machine, by the name kernels::CapIsa knows it.
std::string BestIsa() {
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq")) {
    return __builtin_cpu_supports("avx512bf16") ? "AVX3_BF16" : "AVX3";
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return "AVX2";
  return __builtin_cpu_supports("sse4.1") ? "SSE4" : "SCALAR";
}

struct Flags {
  WorkerOptions options;
  std::string memory_per_rank;
  std::string log_bytes = "4GiB";
  std::string leave_grace = "10m";
  std::string nvml_library = "libnvidia-ml.so.1";
  bool slots_given = false;
};

void Declare(CLI::App& app, Flags& flags) {
  WorkerOptions& o = flags.options;
  app.add_option("--coordinator", o.coordinator, "host:port of the coordinator")->required();
  app.add_option("--name", o.name, "Unique name of this worker (default: the host name)");
  app.add_option("--node", o.node, "Ranks with equal nodes share memory (default: the host name)");
  app.add_option("--slots", o.num_slots,
                 "Trainer processes at a time (default: 1; on cuda one for each device)");
  app.add_option("--memory-per-rank", flags.memory_per_rank,
                 "Bytes each rank may allocate, e.g. 2GiB (default: available memory / slots)");
  app.add_option("--state-dir", o.state_dir,
                 "Journal, logs and step records (default: below the user's state folder)");
  app.add_option("--trainer-binary", o.trainer_binary,
                 "(default: upipe-trainer beside this binary)");
  app.add_option("--metrics-listen", o.metrics_listen, "Prometheus endpoint; port 0 = any")
      ->capture_default_str();
  app.add_option("--health-listen", o.health_listen,
                 "host:port of grpc.health.v1 for probes (default: none)");
  app.add_flag("--insecure-listen", o.insecure_listen,
               "Allow plaintext metrics and health on other addresses than loopback");
  app.add_option("--backend", o.backend, "Backend of this node's ranks")
      ->check(CLI::IsMember({"cpu", "cuda"}))
      ->capture_default_str();
  app.add_option("--nvml-library", flags.nvml_library,
                 "Where the backend is cuda: what tells of the devices and their health")
      ->capture_default_str();
  app.add_option("--transport-interface", o.transport_interface,
                 "Network interfaces between nodes, comma-separated, e.g. eth1")
      ->capture_default_str();
  app.add_option("--log-bytes", flags.log_bytes,
                 "Disk for logs and step records of ended ranks; the oldest attempts go first")
      ->capture_default_str();
  app.add_option("--leave-grace", flags.leave_grace,
                 "After SIGTERM: how long ranks have to checkpoint and leave before they are "
                 "killed; a second SIGTERM or SIGINT kills them at once")
      ->capture_default_str();
  app.add_flag("!--no-cgroup", o.allow_cgroup,
               "Hold trainers by subreaper although cgroup2 is writable");
  app.add_flag("!--no-cpu-placement", o.place_ranks,
               "Let the kernel choose the CPUs of ranks (default: each rank its own, where the "
               "node has enough for its job)");
}

// Slots, memory and health of the devices. Without NVIDIA's library the worker takes what it is
// told: which ordinals there are, and nothing of their health.
absl::Status FindDevices(Flags& flags) {
  WorkerOptions& o = flags.options;
  const char* visible = getenv("CUDA_VISIBLE_DEVICES");
  auto inventory = OpenNvmlInventory(flags.nvml_library,
                                     visible == nullptr || *visible == '\0'
                                         ? std::vector<std::string>()
                                         : std::vector<std::string>(absl::StrSplit(visible, ',')));
  if (absl::IsUnavailable(inventory.status())) {
    if (!flags.slots_given || flags.memory_per_rank.empty()) {
      return absl::InvalidArgumentError(
          absl::StrCat("--backend cuda: ", inventory.status().message(),
                       "; say how many devices there are with --slots, and what each rank may take "
                       "with --memory-per-rank"));
    }
    UPIPE_LOG(WARNING) << "the health of devices is not known: " << inventory.status().message();
    return absl::OkStatus();
  }
  UPIPE_RETURN_IF_ERROR(inventory.status());
  const std::vector<v1::SlotDevice> devices = (*inventory)->Read();
  const int count = static_cast<int>(devices.size());
  if (!flags.slots_given) o.num_slots = count;
  if (o.num_slots > count) {
    return absl::InvalidArgumentError(absl::StrCat("--slots ", o.num_slots, " on ", count,
                                                   " devices: every rank needs one of its own"));
  }
  o.inventory = *std::move(inventory);
  if (!flags.memory_per_rank.empty()) return absl::OkStatus();
  for (int slot = 0; slot < o.num_slots; ++slot) {
    const int64_t bytes = devices[slot].memory_bytes();
    if (bytes > 0 && (slot == 0 || bytes < o.memory_per_rank_bytes))
      o.memory_per_rank_bytes = bytes;
  }
  return absl::OkStatus();
}

absl::Status FillDefaults(Flags& flags) {
  WorkerOptions& o = flags.options;
  if (o.name.empty()) o.name = HostName();
  if (o.node.empty()) o.node = HostName();
  if (o.state_dir.empty()) o.state_dir = DefaultStateDir(o.name);
  if (o.state_dir.empty())
    return absl::InvalidArgumentError("no home folder known: give --state-dir");
  o.state_dir = std::filesystem::absolute(o.state_dir).lexically_normal().string();
  o.runtime_dir = std::filesystem::temp_directory_path().string();
  if (const char* dir = getenv("XDG_RUNTIME_DIR"); dir != nullptr && access(dir, W_OK) == 0)
    o.runtime_dir = dir;
  if (o.trainer_binary.empty()) o.trainer_binary = BesideThisBinary("upipe-trainer");
  if (o.backend == "cuda") UPIPE_RETURN_IF_ERROR(FindDevices(flags));
  if (flags.memory_per_rank.empty() && o.backend != "cuda") {
    UPIPE_ASSIGN_OR_RETURN(const int64_t available, AvailableMemoryBytes());
    o.memory_per_rank_bytes = available / std::max(1, o.num_slots);
  } else if (!flags.memory_per_rank.empty()) {
    UPIPE_ASSIGN_OR_RETURN(o.memory_per_rank_bytes, ParseBytes(flags.memory_per_rank));
  }
  UPIPE_ASSIGN_OR_RETURN(o.log_bytes, ParseBytes(flags.log_bytes));
  if (!absl::ParseDuration(flags.leave_grace, &o.leave_grace)) {
    return absl::InvalidArgumentError(absl::StrCat("--leave-grace '", flags.leave_grace,
                                                   "' is no duration: write 90s, 10m or 1h30m"));
  }
  o.environment = TrainerEnvironment();
  o.isa = BestIsa();
  o.version = UPIPE_VERSION;
  return absl::OkStatus();
}

// SIGTERM and SIGINT, taken by a thread of their own; blocked in every other one.
class StopSignals {
 public:
  // `first` at the first signal, `again` at each later one.
  StopSignals(std::function<void()> first, std::function<void()> again) {
    thread_ = std::thread([this, first = std::move(first), again = std::move(again)] {
      for (bool seen = false;; seen = true) {
        int signal = 0;
        sigwait(&signals_, &signal);
        if (done_) return;
        (seen ? again : first)();
      }
    });
  }
  ~StopSignals() {
    done_ = true;
    pthread_kill(thread_.native_handle(), SIGTERM);
    thread_.join();
  }
  // Before any thread starts.
  static void Block() {
    const sigset_t signals = Signals();
    pthread_sigmask(SIG_BLOCK, &signals, nullptr);
    signal(SIGPIPE, SIG_IGN);
  }

 private:
  static sigset_t Signals() {
    sigset_t signals;
    sigemptyset(&signals);
    sigaddset(&signals, SIGTERM);
    sigaddset(&signals, SIGINT);
    return signals;
  }
  const sigset_t signals_ = Signals();
  std::atomic<bool> done_{false};
  std::thread thread_;
};

int Main(int argc, char** argv) {
  SetLogComponent("worker");
  CLI::App app("The UPipe worker: starts and holds the trainer processes of one node.");
  app.set_version_flag("--version", UPIPE_VERSION);
  Flags flags;
  Declare(app, flags);
  if (const std::optional<int> over = ParseArguments(app, argc, argv)) return *over;
  flags.slots_given = app.count("--slots") > 0;
  if (absl::Status status = FillDefaults(flags); !status.ok()) {
    std::cerr << "upipe-worker: " << status.message() << "\n";
    return 2;
  }
  if (absl::Status status =
          ArmFailpoints(getenv("UPIPE_FAILPOINT"), getenv("UPIPE_FAILPOINT_FILE"));
      !status.ok()) {
    std::cerr << "upipe-worker: " << status.message() << "\n";
    return 2;
  }
  StopSignals::Block();
  absl::StatusOr<std::unique_ptr<WorkerDaemon>> daemon = WorkerDaemon::Create(flags.options);
  if (!daemon.ok()) {
    std::cerr << "upipe-worker: " << daemon.status().message() << "\n";
    return daemon.status().code() == absl::StatusCode::kInvalidArgument ? 2 : 1;
  }
  std::cout << (*daemon)->Configuration() << std::endl;
  absl::Status status;
  {
    const StopSignals stop([&] { (*daemon)->RequestLeave(); },
                           [&] { (*daemon)->RequestShutdown(); });
    status = (*daemon)->Run();
  }
  if (!status.ok()) {
    std::cerr << "upipe-worker: " << status.message() << "\n";
    return 1;
  }
  return 0;
}

}  // namespace
}  // namespace upipe::worker

int main(int argc, char** argv) { return upipe::worker::Main(argc, argv); }
