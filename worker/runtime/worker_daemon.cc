#include "worker/runtime/worker_daemon.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <mutex>
#include <set>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "common/bounded_queue.h"
#include "common/clock.h"
#include "common/cpu_placement.h"
#include "common/failpoint.h"
#include "common/ids.h"
#include "common/log.h"
#include "common/loopback.h"
#include "common/metrics/step_line.h"
#include "common/metrics/timeline_line.h"
#include "common/rpc/health_server.h"
#include "common/status.h"
#include "common/units.h"
#include "worker/agent/agent.h"
#include "worker/agent/reporting.h"
#include "worker/launcher/posix_launcher.h"
#include "worker/rpc/coordinator_session.h"
#include "worker/rpc/log_uploads.h"
#include "worker/rpc/trainer_server.h"
#include "worker/runtime/metrics_endpoint.h"

namespace upipe::worker {
namespace {

constexpr size_t kEventsMax = 8192;
constexpr const char* kReadyService = "upipe.v1.WorkerService";  // of health: ranks may live here
constexpr size_t kSocketPathMax = 100;                           // sun_path holds 108 bytes
constexpr size_t kAttemptsKept = 1000;                           // of ended ranks

template <typename... Kinds>
struct Overloaded : Kinds... {
  using Kinds::operator()...;
};

absl::Status Validate(const WorkerOptions& options) {
  std::vector<std::string> wrong;
  const bool plain = std::all_of(options.name.begin(), options.name.end(), [](char c) {
    return absl::ascii_isalnum(c) || c == '.' || c == '_' || c == '-';
  });
  if (options.name.empty() || options.name.size() > 63 || !plain) {
    wrong.push_back(absl::StrCat("--name '", options.name,
                                 "' must be 1 to 63 of a-z, A-Z, 0-9, '.', '_', '-'"));
  }
  if (options.node.empty()) wrong.push_back("--node must not be empty");
  if (options.num_slots < 1 || options.num_slots > 1024) {
    wrong.push_back(absl::StrCat("--slots ", options.num_slots, " must be 1 to 1,024"));
  }
  if (options.memory_per_rank_bytes <= 0) {
    wrong.push_back(absl::StrCat("--memory-per-rank ", options.memory_per_rank_bytes,
                                 " must be above 0 bytes"));
  }
  if (options.leave_grace < absl::ZeroDuration() || options.leave_grace > absl::Hours(24 * 7)) {
    wrong.push_back(absl::StrCat("--leave-grace ", absl::FormatDuration(options.leave_grace),
                                 " must be 0s to 168h"));
  }
  if (options.log_bytes < (1 << 20)) {
    wrong.push_back(absl::StrCat("--log-bytes ", options.log_bytes, " must be at least 1 MiB"));
  }
  if (access(options.trainer_binary.c_str(), X_OK) != 0) {
    wrong.push_back(
        absl::StrCat("--trainer-binary '", options.trainer_binary, "' is no executable file"));
  }
  if (!options.insecure_listen && !IsLoopback(options.metrics_listen)) {
    wrong.push_back(absl::StrCat("--metrics-listen ", options.metrics_listen,
                                 " is plaintext off loopback: add --insecure-listen to allow it"));
  }
  if (!options.health_listen.empty()) {
    const absl::Status health = CheckListen(options.health_listen, options.insecure_listen);
    if (!health.ok()) wrong.push_back(absl::StrCat("--health-listen: ", health.message()));
  }
  if (wrong.empty()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrJoin(wrong, "; "));
}

absl::StatusOr<std::string> SocketPath(const WorkerOptions& options,
                                       const std::string& incarnation) {
  const std::string beside = absl::StrCat(options.state_dir, "/trainers.sock");
  if (beside.size() <= kSocketPathMax) return beside;
  const std::string elsewhere =
      absl::StrCat(options.runtime_dir, "/upipe-", incarnation.substr(0, 12), ".sock");
  if (elsewhere.size() <= kSocketPathMax) return elsewhere;
  return absl::InvalidArgumentError(
      absl::StrCat("--state-dir '", options.state_dir, "' is too long for a unix socket (",
                   kSocketPathMax, " characters), and so is ", options.runtime_dir));
}

// Which log folders belong to ranks that still run: read by upload threads.
class LiveRanks {
 public:
  void Add(const std::string& dir) {
    std::lock_guard lock(mutex_);
    dirs_.insert(dir);
  }
  void Remove(const std::string& dir) {
    std::lock_guard lock(mutex_);
    dirs_.erase(dir);
  }
  bool Contains(const std::string& dir) const {
    std::lock_guard lock(mutex_);
    return dirs_.contains(dir);
  }

 private:
  mutable std::mutex mutex_;
  std::set<std::string> dirs_;
};

class Daemon : public WorkerDaemon {
 public:
  explicit Daemon(const WorkerOptions& options)
      : options_(options),
        incarnation_(RandomNonce()),
        channel_(CoordinatorChannel(options.coordinator)) {}
  ~Daemon() override {
    events_.Close();
    // Its HTTP server needs up to two seconds to stop and has nothing to lose: it ends with the
    // process.
    metrics_.release();
  }

  absl::Status Initialize();
  absl::Status Run() override;
  void RequestLeave() override { events_.PushOverCapacity(Leave{}); }
  void RequestShutdown() override { events_.PushOverCapacity(Shutdown{}); }
  std::string Configuration() const override;

 private:
  std::string LogRoot() const { return options_.state_dir + "/ranks"; }
  std::string RankDir(const std::string& job, int64_t generation, int rank) const {
    return absl::StrCat(LogRoot(), "/", job, "/g", generation, "/r", rank);
  }
  std::string RankDir(const Rank& rank) const {
    const v1::RankRef& ref = rank.report.ref();
    return RankDir(ref.fence().job_id(), ref.fence().generation(), ref.rank());
  }
  void OnLaunchEvent(LaunchEvent event);
  void Handle(Event event);
  void Carry(const Actions& actions);
  void TellState();
  void ReadPositions(BootTime now);
  void PruneLogs();
  void WatchDevices();
  std::map<std::string, std::string> EnvironmentOf(const LaunchRank& action) const;
  void AddDeviceOf(int slot, std::map<std::string, std::string>& environment) const;

  void Do(const OpenSession& action) { session_->Open(action.session); }
  void Do(const CloseSession&) { session_->Close(); }
  void Do(const SendToCoordinator& action) { session_->Send(action.message); }
  void Do(const LaunchRank& action);
  void Do(const KillRank& action);
  void Do(const SendToTrainer& action) { trainers_->Send(action.connection, action.command); }
  void Do(const ReadTrainer& action) { trainers_->Read(action.connection); }
  void Do(const CloseTrainer& action) { trainers_->Close(action.connection); }
  void Do(const RecordStep& action);
  void Do(const RecordTimeline& action);
  void Do(const RecordCheckpoint& action) {
    metrics_->CountCheckpoint(action.slot, action.committed);
  }
  void Do(const RecordProblem& action) { metrics_->CountProblem(action.slot); }
  void Do(const RecordExit& action) { metrics_->CountExit(action.outcome); }
  void Do(const ReleaseRank& action);
  void Do(const UploadLog& action);
  void Do(const NodeEvent& action) { UPIPE_LOG(INFO) << action.text; }
  void Do(const ShutdownComplete&) { running_ = false; }

  const WorkerOptions options_;
  const std::string incarnation_;
  std::string socket_path_;
  State state_;
  std::optional<BootTime> told_deadline_;     // the trainers' copy of the autonomy deadline
  std::pair<bool, SlotCounts> told_metrics_;  // whether connected
  bool told_ready_ = false;
  bool running_ = true;
  LiveRanks live_;
  // Only the coordinator can write without bound, and only its messages are refused when full. The
  // rest is few (one message per trainer stream until Read, four events per launch, one end per
  // session) and never waits: it comes from threads that must not block.
  BoundedQueue<Event> events_{kEventsMax};
  const std::shared_ptr<grpc::Channel> channel_;
  // Destroyed in reverse: everything that pushes events goes before the queue.
  std::unique_ptr<MetricsEndpoint> metrics_;
  std::unique_ptr<HealthServer> health_;  // null: none was asked for
  RankRecorder recorder_;
  std::unique_ptr<PosixLauncher> launcher_;
  std::unique_ptr<TrainerServer> trainers_;
  std::unique_ptr<CoordinatorSession> session_;
  std::unique_ptr<LogUploads> uploads_;
  std::unique_ptr<DeviceWatch> devices_;
};

absl::Status Daemon::Initialize() {
  UPIPE_RETURN_IF_ERROR(Validate(options_));
  std::error_code error;
  std::filesystem::create_directories(options_.state_dir, error);
  if (error || chmod(options_.state_dir.c_str(), 0700) != 0) {
    return absl::UnavailableError(absl::StrCat("cannot create --state-dir ", options_.state_dir));
  }
  UPIPE_ASSIGN_OR_RETURN(socket_path_, SocketPath(options_, incarnation_));
  PosixLauncherOptions launcher_options{options_.state_dir, LogRoot(), options_.allow_cgroup};
  UPIPE_ASSIGN_OR_RETURN(
      launcher_, PosixLauncher::Create(launcher_options, recorder_, [this](LaunchEvent event) {
        OnLaunchEvent(std::move(event));
      }));
  UPIPE_ASSIGN_OR_RETURN(
      metrics_, MetricsEndpoint::Start(options_.metrics_listen, {.worker = options_.name,
                                                                 .node = options_.node,
                                                                 .num_slots = options_.num_slots,
                                                                 .version = options_.version,
                                                                 .backend = options_.backend,
                                                                 .isa = options_.isa}));
  if (!options_.health_listen.empty()) {
    UPIPE_ASSIGN_OR_RETURN(health_,
                           HealthServer::Listen(options_.health_listen, options_.insecure_listen));
  }
  TrainerServer::Callbacks from_trainers{
      [this](uint64_t connection, v1::TrainerMessage message) {
        events_.PushOverCapacity(FromTrainer{connection, std::move(message)});
      },
      [this](uint64_t connection) { events_.PushOverCapacity(TrainerClosed{connection}); }};
  UPIPE_ASSIGN_OR_RETURN(trainers_, TrainerServer::Start(socket_path_, std::move(from_trainers)));
  CoordinatorSession::Callbacks from_coordinator{
      [this](uint64_t session, v1::CoordinatorMessage message) {
        return events_.TryPush(FromCoordinator{session, std::move(message)});
      },
      [this](uint64_t session, const std::string& reason) {
        events_.PushOverCapacity(SessionClosed{session, reason});
      }};
  session_ = std::make_unique<CoordinatorSession>(channel_, std::move(from_coordinator));
  uploads_ = std::make_unique<LogUploads>(channel_);

  v1::Hello& identity = state_.identity;
  identity.set_worker(options_.name);
  identity.set_node_id(options_.node);
  identity.set_incarnation(incarnation_);
  identity.set_state_id(launcher_->state_id());
  identity.set_start_number(launcher_->start_number());
  identity.set_num_slots(options_.num_slots);
  identity.set_memory_per_rank_bytes(options_.memory_per_rank_bytes);
  identity.set_metrics_address(metrics_->address());
  identity.set_containment(launcher_->containment());
  identity.set_isa(options_.isa);
  identity.set_version(options_.version);
  identity.set_backend(options_.backend);
  identity.set_insecure_listen(options_.insecure_listen);
  WatchDevices();
  state_.leave_grace = options_.leave_grace;
  state_.newest_generation = launcher_->generations();
  PruneLogs();
  state_.reconnect_at = SystemClock().Now();
  return absl::OkStatus();
}

void Daemon::OnLaunchEvent(LaunchEvent event) {
  events_.PushOverCapacity(std::visit(
      Overloaded{[](TreeStarted& kind) -> Event {
                   return ProcessStarted{kind.key, kind.pid};
                 },
                 [](TreeLaunchFailed& kind) -> Event {
                   return ProcessLaunchFailed{kind.key, kind.status};
                 },
                 [](TreeExited& kind) -> Event {
                   return ProcessExited{kind.key, std::move(kind.exit), std::move(kind.positions)};
                 },
                 [](TreeGone& kind) -> Event { return ProcessGone{kind.key}; }},
      event));
}

absl::Status Daemon::Run() {
  while (running_) {
    const BootTime now = SystemClock().Now();
    std::optional<Event> event =
        events_.PopFor(std::max(absl::ZeroDuration(), NextWake(state_, now) - now));
    Handle(event.has_value() ? *std::move(event) : Event(Tick{}));
  }
  for (const auto& [key, rank] : state_.ranks) {
    if (rank.report.state() == v1::RANK_STATE_GONE) continue;
    return absl::DeadlineExceededError(
        absl::StrCat("rank ", key.rank, " of ", rank.report.ref().fence().job_id(),
                     " was not proven gone; the next worker on ", options_.state_dir,
                     " will kill it before it says hello"));
  }
  return absl::OkStatus();
}

void Daemon::Handle(Event event) {
  if (std::holds_alternative<FromCoordinator>(event))
    Failpoint(failpoints::kWorkerOrder).IgnoreError();
  // The first act after a pause is the deadline: it is looked at with whatever comes first.
  const BootTime now = SystemClock().Now();
  if (PositionsDue(state_, now)) ReadPositions(now);
  Carry(Step(state_, event, now));
  TellState();
  if (!state_.last_acknowledged.has_value()) return;
  const BootTime deadline = *state_.last_acknowledged + state_.timing.autonomy;
  if (deadline == told_deadline_) return;
  told_deadline_ = deadline;
  launcher_->SetDeadline(deadline);
}

// Ready: new ranks may come, or those that are here may go on without the coordinator.
void Daemon::TellState() {
  const bool ready = state_.phase == SessionPhase::kOpen ||
                     (state_.last_acknowledged.has_value() && !state_.autonomous);
  if (health_ != nullptr && ready != told_ready_) health_->SetServing(kReadyService, ready);
  told_ready_ = ready;
  const std::pair now(state_.phase == SessionPhase::kOpen, CountSlots(state_));
  if (now == told_metrics_) return;
  told_metrics_ = now;
  metrics_->SetWorker(now.first, now.second);
}

void Daemon::Carry(const Actions& actions) {
  for (const Action& action : actions) std::visit([this](const auto& kind) { Do(kind); }, action);
}

void Daemon::ReadPositions(BootTime now) {
  PositionsRead read;
  for (const auto& [key, rank] : state_.ranks) {
    if (!read.attempts.contains(key.nonce))
      read.attempts[key.nonce] = launcher_->ReadPositions(key.nonce);
  }
  Carry(Step(state_, read, now));
  for (const auto& [key, rank] : state_.ranks) {
    if (IsLive(rank) && rank.position_read_at.has_value())
      metrics_->SetPosition(rank.report.slot(), rank.position, rank.in_place);
  }
}

// Old ones go when new ones come, and at the start.
void Daemon::PruneLogs() {
  recorder_.KeepWithin({LogRoot(), options_.log_bytes, kAttemptsKept}, [this](std::string job) {
    events_.PushOverCapacity(JobLogsDeleted{std::move(job)});
  });
}

void Daemon::WatchDevices() {
  if (options_.inventory == nullptr) return;
  std::vector<v1::SlotDevice> devices = options_.inventory->Read();
  devices.resize(std::min<size_t>(devices.size(), options_.num_slots));
  state_.identity.mutable_devices()->Assign(devices.begin(), devices.end());
  devices_ = std::make_unique<DeviceWatch>(options_.inventory, std::move(devices),
                                           [this](std::vector<v1::SlotDevice> read) {
                                             events_.PushOverCapacity(DevicesRead{std::move(read)});
                                           });
}

// The rank's process sees the device of its slot and no other. NCCL's ways are pinned, as the
// number of its channels is.
void Daemon::AddDeviceOf(int slot, std::map<std::string, std::string>& environment) const {
  if (options_.backend != "cuda") return;
  const auto& devices = state_.identity.devices();
  const std::string uuid = slot < devices.size() ? devices[slot].uuid() : "";
  environment["CUDA_VISIBLE_DEVICES"] = uuid.empty() ? absl::StrCat(slot) : uuid;
  environment["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID";
  environment["NCCL_ALGO"] = "Ring";
  environment["NCCL_PROTO"] = "Simple";
  if (options_.transport_interface != "all")
    environment["NCCL_SOCKET_IFNAME"] = absl::StrCat("=", options_.transport_interface);
}

std::map<std::string, std::string> Daemon::EnvironmentOf(const LaunchRank& action) const {
  std::map<std::string, std::string> environment = {
      {"UPIPE_SOCKET", socket_path_},
      {"UPIPE_NONCE", action.key.nonce},
      {"UPIPE_JOB", action.job},
      {"UPIPE_GENERATION", absl::StrCat(action.generation)},
      {"UPIPE_RANK", absl::StrCat(action.key.rank)},
      {"UPIPE_CPU_PLACEMENT", options_.place_ranks ? "own" : "off"},
      {"UPIPE_TRANSPORT_INTERFACE", options_.transport_interface},
      // A machine that answers nothing for so long is lost to its peers.
      {"UPIPE_PEER_SILENCE", absl::StrCat(absl::ToDoubleSeconds(state_.timing.kill_bound * 3))},
      {"OMP_NUM_THREADS", absl::StrCat(action.threads)},
      {"OPENBLAS_NUM_THREADS", absl::StrCat(action.threads)},
      {"UCX_HANDLE_ERRORS", "none"}};
  AddDeviceOf(action.slot, environment);
  return environment;
}

void Daemon::Do(const LaunchRank& action) {
  const Rank& rank = state_.ranks.at(action.key);
  metrics_->BeginAttempt(*rank.start);
  LaunchSpec spec{action.key,
                  action.job,
                  action.generation,
                  options_.trainer_binary,
                  {},
                  RankDir(action.job, action.generation, action.key.rank)};
  for (const auto& [name, value] : EnvironmentOf(action))
    spec.environment.push_back(absl::StrCat(name, "=", value));
  spec.environment.insert(spec.environment.end(), options_.environment.begin(),
                          options_.environment.end());
  live_.Add(spec.log_dir);
  PruneLogs();
  launcher_->Launch(std::move(spec));
}

void Daemon::Do(const KillRank& action) {
  if (action.fence_generation > 0) {
    launcher_->KillSuperseded(action.key, action.job, action.fence_generation);
  } else {
    launcher_->Kill(action.key);
  }
}

void Daemon::Do(const RecordStep& action) {
  metrics_->Observe(action.slot, action.report);
  recorder_.AppendLine(RankDir(state_.ranks.at(action.key)) + "/metrics.jsonl",
                       FormatStepLine({.rank = action.key.rank, .report = action.report}));
}

void Daemon::Do(const RecordTimeline& action) {
  recorder_.AppendLine(RankDir(state_.ranks.at(action.key)) + "/timeline.jsonl",
                       FormatTimelineLine(action.timeline));
}

void Daemon::Do(const ReleaseRank& action) {
  metrics_->EndAttempt(action.slot);
  live_.Remove(RankDir(state_.ranks.at(action.key)));
}

void Daemon::Do(const UploadLog& action) {
  const v1::RankRef& ref = action.request.ref();
  const std::string dir = RankDir(ref.fence().job_id(), ref.fence().generation(), ref.rank());
  uploads_->Start(action.request, dir, [this, dir] { return live_.Contains(dir); });
}

// What ranks choose from.
std::string DescribeCpus() {
  const absl::StatusOr<std::vector<int>> ids = AllowedCpus();
  if (!ids.ok()) return std::string(ids.status().message());
  std::set<int> cores, nodes;
  for (const Cpu& cpu : ReadCpus(kCpuFolder, *ids)) {
    cores.insert(cpu.core);
    nodes.insert(cpu.node);
  }
  return absl::StrCat(FormatCpuList(*ids), " (", ids->size(), " CPUs, ", cores.size(), " cores, ",
                      nodes.size(), " NUMA nodes)");
}

std::string DescribeDevices(const v1::Hello& identity) {
  std::vector<std::string> devices;
  for (const v1::SlotDevice& device : identity.devices()) {
    devices.push_back(
        absl::StrCat(device.name(), " ", device.uuid(), " (", FormatBytes(device.memory_bytes()),
                     ", ", device.nvlinks(), " NVLinks, ECC ", device.ecc() ? "on" : "off",
                     device.sick().empty() ? "" : absl::StrCat(", sick: ", device.sick()), ")"));
  }
  return devices.empty() ? "none" : absl::StrJoin(devices, "; ");
}

std::string Daemon::Configuration() const {
  const std::pair<const char*, std::string> lines[] = {
      {"name", options_.name},
      {"node", options_.node},
      {"incarnation", incarnation_},
      {"coordinator", options_.coordinator},
      {"slots", absl::StrCat(options_.num_slots)},
      {"memory_per_rank", FormatBytes(options_.memory_per_rank_bytes)},
      {"state_dir", options_.state_dir},
      {"trainer_binary", options_.trainer_binary},
      {"trainer_socket", socket_path_},
      {"transport_interface", options_.transport_interface},
      {"leave_grace", absl::FormatDuration(options_.leave_grace)},
      {"logs", absl::StrCat(FormatBytes(options_.log_bytes), " and ", kAttemptsKept,
                            " attempts of ended ranks")},
      {"metrics", absl::StrCat("http://", metrics_->address(), "/metrics")},
      {"health", health_ == nullptr ? "none" : health_->address()},
      {"insecure_listen",
       options_.insecure_listen ? "true: metrics and health are plaintext off loopback" : "false"},
      {"containment", launcher_->containment()},
      {"cpus", DescribeCpus()},
      {"cpu_placement", options_.place_ranks ? "each rank its own, where there are enough" : "off"},
      {"backend", options_.backend},
      {"devices", DescribeDevices(state_.identity)},
      {"isa", options_.isa},
      {"version", options_.version}};
  return absl::StrJoin(lines, "\n", absl::PairFormatter(" = "));
}

}  // namespace

absl::StatusOr<std::unique_ptr<WorkerDaemon>> WorkerDaemon::Create(const WorkerOptions& options) {
  auto daemon = std::make_unique<Daemon>(options);
  UPIPE_RETURN_IF_ERROR(daemon->Initialize());
  return daemon;
}

}  // namespace upipe::worker
