// upipe-coordinator: accepts jobs, plans and queues them, and schedules their ranks over workers.
// SIGTERM ends it cleanly; what runs goes on at the workers and is adopted by the next coordinator
// on the same state directory.
#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <iostream>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/failpoint.h"
#include "common/log.h"
#include "common/loopback.h"
#include "common/parse_arguments.h"
#include "common/rpc/health_server.h"
#include "common/status.h"
#include "common/units.h"
#include "coordinator/rpc/server.h"
#include "coordinator/runtime/backup.h"
#include "coordinator/runtime/loop.h"
#include "coordinator/runtime/restore.h"
#include "coordinator/runtime/step_recorder.h"
#include "coordinator/store/sqlite_store.h"

namespace upipe::coordinator {
namespace {

constexpr int64_t kBallastBytes = 16 << 20;
constexpr int64_t kMetricsLeaveBytes = 2 * kBallastBytes;  // metrics.jsonl must not cost a submit
constexpr const char* kReadyService = "upipe.v1.JobService";  // of health: calls are answered
constexpr int kExitStoreFailed = 74;                          // EX_IOERR

struct Flags {
  std::string listen = "127.0.0.1:0";
  std::string state_dir;
  std::string address_file;
  std::string metrics_listen = "127.0.0.1:0";
  std::string health_listen;
  std::string plan_binary;
  bool insecure_listen = false;
  double heartbeat_seconds = 2;
  double kill_bound_seconds = 10;
  double autonomy_seconds = 300;
  double margin_seconds = 10;
  double start_deadline_seconds = 120;
  double backoff_seconds = 1;
  double backoff_longest_seconds = 300;
  double stall_floor_seconds = 30;
  double settle_seconds = 10;
  double drain_grace_seconds = 600;
  int64_t keep_jobs = 10'000;
  double keep_days = 90;
  std::string restore;
  std::string restore_sha256;

  std::string store() const { return state_dir + "/coordinator.sqlite"; }
};

// What becomes of jobs that fail, stand still or have ended.
void DeclareCare(CLI::App& app, Flags& flags) {
  app.add_option("--backoff", flags.backoff_seconds,
                 "seconds before a failed job starts again; doubles while it makes no progress")
      ->capture_default_str();
  app.add_option("--backoff-longest", flags.backoff_longest_seconds,
                 "seconds at which the doubling ends")
      ->capture_default_str();
  app.add_option("--stall-floor", flags.stall_floor_seconds,
                 "shortest time in seconds that all ranks may stand still; longer for long stages")
      ->capture_default_str();
  app.add_option("--settle", flags.settle_seconds,
                 "seconds that workers heard of so lately are waited for")
      ->capture_default_str();
  app.add_option("--drain-grace", flags.drain_grace_seconds,
                 "seconds jobs of a drained worker, or past their time limit, have to checkpoint")
      ->capture_default_str();
  app.add_option("--keep-jobs", flags.keep_jobs, "records of ended jobs that are kept, the newest")
      ->check(CLI::Range(int64_t{1}, int64_t{1'000'000}))
      ->capture_default_str();
  app.add_option("--keep-days", flags.keep_days, "days after which records of ended jobs go")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
}

void Declare(CLI::App& app, Flags& flags) {
  app.add_option("--listen", flags.listen, "host:port to serve on; port 0 = any free one")
      ->capture_default_str();
  app.add_option("--state-dir", flags.state_dir, "folder of the durable state, made if missing")
      ->required();
  app.add_option("--address-file", flags.address_file, "file to write host:port into once serving");
  app.add_option("--metrics-listen", flags.metrics_listen, "host:port of the Prometheus endpoint")
      ->capture_default_str();
  app.add_option("--health-listen", flags.health_listen,
                 "host:port of grpc.health.v1 for probes (default: none but on --listen)");
  app.add_option("--plan-binary", flags.plan_binary,
                 "upipe-plan to run (default: the one beside this binary)");
  app.add_flag("--insecure-listen", flags.insecure_listen, "allow plaintext beyond loopback");
  app.add_option("--heartbeat", flags.heartbeat_seconds, "H: seconds between heartbeats")
      ->capture_default_str();
  app.add_option("--kill-bound", flags.kill_bound_seconds, "K: seconds to prove a killed rank gone")
      ->capture_default_str();
  app.add_option("--autonomy", flags.autonomy_seconds,
                 "A: seconds a worker goes on without its coordinator")
      ->capture_default_str();
  app.add_option("--margin", flags.margin_seconds, "M: seconds added to the expiry")
      ->capture_default_str();
  app.add_option("--start-deadline", flags.start_deadline_seconds,
                 "seconds from launch until every rank must be ready")
      ->capture_default_str();
  DeclareCare(app, flags);
  app.add_option("--restore", flags.restore,
                 "make the state of a new --state-dir from this file of `upipe admin backup`, then "
                 "exit")
      ->check(CLI::ExistingFile);
  app.add_option("--restore-sha256", flags.restore_sha256,
                 "refuse the file unless this is its checksum")
      ->needs("--restore");
}

Timing TimingOf(const Flags& flags) {
  return {.heartbeat = absl::Seconds(flags.heartbeat_seconds),
          .kill_bound = absl::Seconds(flags.kill_bound_seconds),
          .autonomy = absl::Seconds(flags.autonomy_seconds),
          .margin = absl::Seconds(flags.margin_seconds),
          .start_deadline = absl::Seconds(flags.start_deadline_seconds),
          .backoff_first = absl::Seconds(flags.backoff_seconds),
          .backoff_longest = absl::Seconds(flags.backoff_longest_seconds),
          .stall_floor = absl::Seconds(flags.stall_floor_seconds),
          .settle = absl::Seconds(flags.settle_seconds),
          .drain_grace = absl::Seconds(flags.drain_grace_seconds)};
}

// Readers see the whole address or no file.
absl::Status WriteAddressFile(const std::string& path, const std::string& address) {
  const std::string temporary = absl::StrCat(path, ".tmp");
  FILE* file = std::fopen(temporary.c_str(), "we");
  if (file == nullptr) {
    return absl::UnavailableError(
        absl::StrCat("cannot write ", temporary, ": ", std::strerror(errno)));
  }
  const bool written = std::fprintf(file, "%s\n", address.c_str()) > 0;
  if (std::fclose(file) != 0 || !written || std::rename(temporary.c_str(), path.c_str()) != 0) {
    return absl::UnavailableError(absl::StrCat("cannot write ", path, ": ", std::strerror(errno)));
  }
  return absl::OkStatus();
}

// Makes the folder when it is missing, so that a loss of power does not take it away again.
absl::Status MakeStateDir(const std::string& state_dir) {
  namespace fs = std::filesystem;
  std::error_code error;
  if (fs::create_directories(state_dir, error)) {
    fs::permissions(state_dir, fs::perms::owner_all, error);
    for (fs::path folder = fs::absolute(state_dir); folder != folder.root_path();) {
      folder = folder.parent_path();
      const int descriptor = open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
      if (descriptor < 0) break;  // not ours to read, so not ours to have made it
      fsync(descriptor);
      close(descriptor);
    }
  }
  if (!error) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat("cannot create ", state_dir, ": ", error.message()));
}

absl::Status FindPlanner(Flags& flags) {
  std::error_code error;
  if (flags.plan_binary.empty()) {
    const auto self = std::filesystem::read_symlink("/proc/self/exe", error);
    flags.plan_binary = (self.parent_path() / "upipe-plan").string();
  }
  if (access(flags.plan_binary.c_str(), X_OK) != 0) {
    return absl::FailedPreconditionError(
        absl::StrCat("no planner at ", flags.plan_binary, "; give --plan-binary"));
  }
  return absl::OkStatus();
}

// Planners of an earlier coordinator died with it; what they left goes. Needs the store's lock.
absl::Status PreparePlanDir(const std::string& dir) {
  std::error_code error;
  std::filesystem::remove_all(dir, error);
  if (!error) std::filesystem::create_directory(dir, error);
  if (!error) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat("cannot empty ", dir, ": ", error.message()));
}

// What this coordinator runs with, every default filled in.
std::vector<std::string> ConfigurationOf(const Flags& flags) {
  const Timing timing = TimingOf(flags);
  const auto span = [](const char* name, absl::Duration duration) {
    return absl::StrCat(name, "=", absl::FormatDuration(duration));
  };
  return {absl::StrCat("state-dir=", flags.state_dir),
          absl::StrCat("plan-binary=", flags.plan_binary),
          absl::StrCat("insecure-listen=", flags.insecure_listen ? "true" : "false"),
          absl::StrCat("health-listen=", flags.health_listen),
          span("heartbeat", timing.heartbeat),
          span("kill-bound", timing.kill_bound),
          span("autonomy", timing.autonomy),
          span("margin", timing.margin),
          span("expiry", timing.Expiry()),
          span("start-deadline", timing.start_deadline),
          span("backoff", timing.backoff_first),
          span("backoff-longest", timing.backoff_longest),
          span("stall-floor", timing.stall_floor),
          span("settle", timing.settle),
          span("drain-grace", timing.drain_grace),
          absl::StrCat("keep-jobs=", flags.keep_jobs),
          absl::StrCat("keep-days=", flags.keep_days),
          absl::StrCat("ballast-bytes=", kBallastBytes),
          absl::StrCat("metrics-leave-bytes=", kMetricsLeaveBytes)};
}

void PrintConfiguration(const Flags& flags, const Loop& loop, const std::string& address,
                        const std::string& metrics_address) {
  UPIPE_LOG(INFO) << "serving on " << address << " (plaintext"
                  << (flags.insecure_listen ? ", --insecure-listen: beyond loopback allowed" : "")
                  << "), metrics on " << metrics_address << ", epoch " << loop.epoch();
  UPIPE_LOG(INFO) << "configuration: " << absl::StrJoin(ConfigurationOf(flags), " ");
}

// Signals are blocked in every thread; returns the one that came.
int AwaitSignal(const sigset_t& signals) {
  int signal = 0;
  sigwait(&signals, &signal);
  return signal;
}

// All but the callbacks.
Loop::Options LoopOptionsOf(const Flags& flags, const std::string& metrics_address) {
  Loop::Options options;
  options.timing = TimingOf(flags);
  options.retention = {flags.keep_jobs, absl::Hours(24) * flags.keep_days};
  options.planner.binary = flags.plan_binary;
  options.planner.work_dir = flags.state_dir + "/plan";
  options.insecure_listen = flags.insecure_listen;
  options.version = UPIPE_VERSION;
  options.metrics_address = metrics_address;
  options.configuration = ConfigurationOf(flags);
  return options;
}

// Null when none is asked for; `flags` then knows the port in use.
absl::StatusOr<std::unique_ptr<HealthServer>> ListenForProbes(Flags& flags) {
  if (flags.health_listen.empty()) return nullptr;
  auto health = HealthServer::Listen(flags.health_listen, flags.insecure_listen);
  if (health.ok()) flags.health_listen = (*health)->address();
  return health;
}

absl::StatusOr<std::unique_ptr<Metrics>> ServeMetrics(const Flags& flags) {
  if (!flags.insecure_listen && !IsLoopback(flags.metrics_listen)) {
    return absl::FailedPreconditionError(
        absl::StrCat("metrics are plaintext and served on loopback only, not on ",
                     flags.metrics_listen, "; use 127.0.0.1 or give --insecure-listen"));
  }
  return Metrics::Serve({flags.metrics_listen, UPIPE_VERSION});
}

absl::Status Serve(Flags flags) {
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  sigaddset(&signals, SIGINT);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  signal(SIGPIPE, SIG_IGN);
  UPIPE_RETURN_IF_ERROR(TimingOf(flags).Validate());
  UPIPE_ASSIGN_OR_RETURN(const std::unique_ptr<HealthServer> health, ListenForProbes(flags));
  UPIPE_RETURN_IF_ERROR(MakeStateDir(flags.state_dir));
  UPIPE_RETURN_IF_ERROR(FindPlanner(flags));
  UPIPE_ASSIGN_OR_RETURN(std::unique_ptr<SqliteStore> store, SqliteStore::Open(flags.store()));
  UPIPE_RETURN_IF_ERROR(PreparePlanDir(flags.state_dir + "/plan"));
  Ballast ballast(flags.state_dir, kBallastBytes);
  // On a full disk this makes room for the start itself; submits are judged later.
  if (const absl::Status room = ballast.Check(); !room.ok()) {
    UPIPE_LOG(WARNING) << room.message();
  }
  UPIPE_ASSIGN_OR_RETURN(std::unique_ptr<Metrics> metrics, ServeMetrics(flags));
  const std::string jobs_dir = flags.state_dir + "/jobs";
  StepRecorder steps({.jobs_dir = jobs_dir, .min_free_bytes = kMetricsLeaveBytes});
  LogRelay logs(jobs_dir);
  Loop::Options options = LoopOptionsOf(flags, metrics->address());
  options.on_tick = [&logs, patience = options.timing.kill_bound](BootTime now) {
    logs.Expire(now, patience);
  };
  options.on_report = [&steps](const std::string& job_id, const v1::StepReport& report) {
    steps.Record(job_id, report);
  };
  options.on_failed = [](absl::Status status) {
    UPIPE_LOG(ERROR)
        << "the store failed and the coordinator ends, for what is durable is unknown: "
        << status.message() << "; start it again, jobs go on at the workers meanwhile";
    _exit(kExitStoreFailed);
  };
  UPIPE_ASSIGN_OR_RETURN(std::unique_ptr<Loop> loop,
                         Loop::Create(std::move(options), *store, ballast, metrics.get()));
  BackupThread backups({.store_path = flags.store(),
                        .copy_path = flags.state_dir + "/backup.sqlite",
                        .min_free_bytes = 2 * kBallastBytes},
                       *loop);
  UPIPE_ASSIGN_OR_RETURN(
      std::unique_ptr<Server> server,
      Server::Listen(
          {.listen = flags.listen,
           .insecure_listen = flags.insecure_listen,
           .on_call = [served = metrics.get()](
                          const std::string& method, absl::StatusCode code,
                          absl::Duration took) { served->ObserveCall(method, code, took); }},
          *loop, logs, backups));
  PrintConfiguration(flags, *loop, server->address(), metrics->address());
  std::thread deciding([&] { loop->Run(); });
  absl::Status status;
  if (!flags.address_file.empty()) status = WriteAddressFile(flags.address_file, server->address());
  if (health != nullptr) health->SetServing(kReadyService, true);
  if (status.ok()) {
    UPIPE_LOG(INFO) << "signal " << AwaitSignal(signals) << ": ending; jobs go on at the workers";
  }
  if (health != nullptr) health->SetServing(kReadyService, false);
  loop->Stop();
  deciding.join();
  logs.End(Stopping());
  server->Shutdown(absl::Milliseconds(500));
  // Its HTTP server needs up to two seconds to stop and has nothing to lose: it ends with the
  // process.
  (void)metrics.release();
  return status;
}

absl::Status Restore(const Flags& flags) {
  UPIPE_RETURN_IF_ERROR(MakeStateDir(flags.state_dir));
  UPIPE_ASSIGN_OR_RETURN(const Restored restored,
                         RestoreStore(flags.restore, flags.restore_sha256, flags.store()));
  std::cout << flags.store() << " restored from " << flags.restore << ": "
            << FormatBytes(restored.bytes) << ", revision " << restored.revision << ", "
            << restored.jobs << " jobs; start the coordinator on this --state-dir" << std::endl;
  return absl::OkStatus();
}

}  // namespace
}  // namespace upipe::coordinator

int main(int argc, char** argv) {
  upipe::SetLogComponent("coordinator");
  CLI::App app{"UPipe coordinator: accepts, plans, queues and schedules training jobs."};
  upipe::coordinator::Flags flags;
  upipe::coordinator::Declare(app, flags);
  if (const std::optional<int> over = upipe::ParseArguments(app, argc, argv)) return *over;
  if (const absl::Status armed =
          upipe::ArmFailpoints(getenv("UPIPE_FAILPOINT"), getenv("UPIPE_FAILPOINT_FILE"));
      !armed.ok()) {
    std::cerr << "upipe-coordinator: " << armed.message() << std::endl;
    return 1;
  }
  const absl::Status status =
      flags.restore.empty() ? upipe::coordinator::Serve(flags) : upipe::coordinator::Restore(flags);
  if (status.ok()) return 0;
  std::cerr << "upipe-coordinator: " << status.message() << std::endl;
  return 1;
}
