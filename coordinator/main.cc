// upipe-coordinator: accepts jobs, plans and queues them, and schedules their ranks over workers.
// SIGTERM ends it cleanly; what runs goes on at the workers and is adopted by the next coordinator
// on the same state directory.
#include <signal.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <iostream>
#include <thread>

#include "absl/strings/str_cat.h"
#include "common/log.h"
#include "common/loopback.h"
#include "common/status.h"
#include "common/units.h"
#include "coordinator/rpc/server.h"
#include "coordinator/runtime/loop.h"
#include "coordinator/runtime/step_recorder.h"
#include "coordinator/store/sqlite_store.h"

namespace upipe::coordinator {
namespace {

constexpr int64_t kBallastBytes = 16 << 20;
constexpr int64_t kMetricsLeaveBytes = 2 * kBallastBytes;  // metrics.jsonl must not cost a submit
constexpr int kExitStoreFailed = 74;                       // EX_IOERR

struct Flags {
  std::string listen = "127.0.0.1:0";
  std::string state_dir;
  std::string address_file;
  std::string metrics_listen = "127.0.0.1:0";
  std::string plan_binary;
  bool insecure_listen = false;
  double heartbeat_seconds = 2;
  double kill_bound_seconds = 10;
  double autonomy_seconds = 300;
  double margin_seconds = 10;
  double start_deadline_seconds = 120;
};

void Declare(CLI::App& app, Flags& flags) {
  app.add_option("--listen", flags.listen, "host:port to serve on; port 0 = any free one")
      ->capture_default_str();
  app.add_option("--state-dir", flags.state_dir, "folder of the durable state, made if missing")
      ->required();
  app.add_option("--address-file", flags.address_file, "file to write host:port into once serving");
  app.add_option("--metrics-listen", flags.metrics_listen, "host:port of the Prometheus endpoint")
      ->capture_default_str();
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
}

Timing TimingOf(const Flags& flags) {
  return {.heartbeat = absl::Seconds(flags.heartbeat_seconds),
          .kill_bound = absl::Seconds(flags.kill_bound_seconds),
          .autonomy = absl::Seconds(flags.autonomy_seconds),
          .margin = absl::Seconds(flags.margin_seconds),
          .start_deadline = absl::Seconds(flags.start_deadline_seconds)};
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

absl::Status PrepareStateDir(Flags& flags) {
  std::error_code error;
  if (std::filesystem::create_directories(flags.state_dir, error)) {
    std::filesystem::permissions(flags.state_dir, std::filesystem::perms::owner_all, error);
  }
  if (error) {
    return absl::UnavailableError(
        absl::StrCat("cannot create ", flags.state_dir, ": ", error.message()));
  }
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

void PrintConfiguration(const Flags& flags, const Loop& loop, const std::string& address,
                        const std::string& metrics_address) {
  const Timing timing = TimingOf(flags);
  UPIPE_LOG(INFO) << "serving on " << address << " (plaintext"
                  << (flags.insecure_listen ? ", --insecure-listen: beyond loopback allowed" : "")
                  << "), metrics on " << metrics_address << ", epoch " << loop.epoch();
  UPIPE_LOG(INFO) << "configuration: state-dir=" << flags.state_dir
                  << " plan-binary=" << flags.plan_binary
                  << " heartbeat=" << absl::FormatDuration(timing.heartbeat)
                  << " kill-bound=" << absl::FormatDuration(timing.kill_bound)
                  << " autonomy=" << absl::FormatDuration(timing.autonomy)
                  << " margin=" << absl::FormatDuration(timing.margin)
                  << " expiry=" << absl::FormatDuration(timing.Expiry())
                  << " start-deadline=" << absl::FormatDuration(timing.start_deadline)
                  << " ballast=" << FormatBytes(kBallastBytes) << " metrics=" << flags.state_dir
                  << "/jobs/JOB/metrics.jsonl, leaving " << FormatBytes(kMetricsLeaveBytes);
}

// Signals are blocked in every thread; returns the one that came.
int AwaitSignal(const sigset_t& signals) {
  int signal = 0;
  sigwait(&signals, &signal);
  return signal;
}

absl::Status Serve(Flags flags) {
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  sigaddset(&signals, SIGINT);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  signal(SIGPIPE, SIG_IGN);
  UPIPE_RETURN_IF_ERROR(TimingOf(flags).Validate());
  UPIPE_RETURN_IF_ERROR(PrepareStateDir(flags));
  UPIPE_ASSIGN_OR_RETURN(std::unique_ptr<SqliteStore> store,
                         SqliteStore::Open(flags.state_dir + "/coordinator.sqlite"));
  UPIPE_RETURN_IF_ERROR(PreparePlanDir(flags.state_dir + "/plan"));
  Ballast ballast(flags.state_dir, kBallastBytes);
  // On a full disk this makes room for the start itself; submits are judged later.
  if (const absl::Status room = ballast.Check(); !room.ok()) {
    UPIPE_LOG(WARNING) << room.message();
  }
  if (!flags.insecure_listen && !IsLoopback(flags.metrics_listen)) {
    return absl::FailedPreconditionError(
        absl::StrCat("metrics are plaintext and served on loopback only, not on ",
                     flags.metrics_listen, "; use 127.0.0.1 or give --insecure-listen"));
  }
  UPIPE_ASSIGN_OR_RETURN(std::unique_ptr<Metrics> metrics, Metrics::Serve(flags.metrics_listen));
  StepRecorder steps({.jobs_dir = flags.state_dir + "/jobs", .min_free_bytes = kMetricsLeaveBytes});
  LogRelay logs;
  Loop::Options options;
  options.timing = TimingOf(flags);
  options.planner.binary = flags.plan_binary;
  options.planner.work_dir = flags.state_dir + "/plan";
  options.insecure_listen = flags.insecure_listen;
  options.on_tick = [&logs, patience = options.timing.kill_bound](BootTime now) {
    logs.Expire(now, patience);
  };
  options.on_report = [&steps](const std::string& job_id, const v1::StepReport& report) {
    steps.Record(job_id, report);
  };
  options.on_failed = [](absl::Status status) {
    UPIPE_LOG(ERROR) << "the store failed, ending at once: " << status;
    _exit(kExitStoreFailed);
  };
  UPIPE_ASSIGN_OR_RETURN(std::unique_ptr<Loop> loop,
                         Loop::Create(std::move(options), *store, ballast, metrics.get()));
  UPIPE_ASSIGN_OR_RETURN(std::unique_ptr<Server> server,
                         Server::Listen({flags.listen, flags.insecure_listen}, *loop, logs));
  PrintConfiguration(flags, *loop, server->address(), metrics->address());
  std::thread deciding([&] { loop->Run(); });
  absl::Status status;
  if (!flags.address_file.empty()) status = WriteAddressFile(flags.address_file, server->address());
  if (status.ok()) {
    UPIPE_LOG(INFO) << "signal " << AwaitSignal(signals) << ": ending; jobs go on at the workers";
  }
  loop->Stop();
  deciding.join();
  logs.End(Stopping());
  server->Shutdown(absl::Milliseconds(500));
  // Its HTTP server needs up to two seconds to stop and has nothing to lose: it ends with the
  // process.
  (void)metrics.release();
  return status;
}

}  // namespace
}  // namespace upipe::coordinator

int main(int argc, char** argv) {
  upipe::SetLogComponent("coordinator");
  CLI::App app{"UPipe coordinator: accepts, plans, queues and schedules training jobs."};
  upipe::coordinator::Flags flags;
  upipe::coordinator::Declare(app, flags);
  CLI11_PARSE(app, argc, argv);
  const absl::Status status = upipe::coordinator::Serve(flags);
  if (status.ok()) return 0;
  std::cerr << "upipe-coordinator: " << status.message() << std::endl;
  return 1;
}
