// A real coordinator and real workers as child processes on loopback, with the fast timing of docs
// (H = 0.2 s, K = 2 s, A = 3 s, M = 1 s), and the `upipe` client run against them. For tests of the
// built binaries.
#pragma once

#include <sys/types.h>

#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/time/time.h"

namespace upipe::testing {

struct CommandResult {
  int exit_code = -1;  // 128 + signal when killed
  std::string output;  // stdout
  std::string errors;  // stderr
};

// Runs a program to its end. Kills it after `limit` (exit code 137).
CommandResult RunCommand(const std::vector<std::string>& arguments,
                         absl::Duration limit = absl::Seconds(60));

class Cluster {
 public:
  explicit Cluster(const std::string& folder);  // made; removed with the object
  ~Cluster();                                   // SIGTERM, then SIGKILL, to what still runs

  // Before a daemon is started: words in front of its command line that run it elsewhere in the
  // same process. name: a worker's, "coordinator", or "upipe" for the client.
  void PutOn(const std::string& name, std::vector<std::string> words);
  // Before the coordinator is started: an address of its host that is no loopback.
  void ListenOn(const std::string& host);

  // Each waits until the daemon is ready, or fails the test.
  void StartCoordinator(double autonomy_seconds = 3, const std::vector<std::string>& flags = {});
  void StartWorker(const std::string& name, int slots,
                   const std::string& memory_per_rank = "512MiB",
                   const std::vector<std::string>& flags = {});
  void KillCoordinator();  // SIGKILL, reaped
  // Waits until the coordinator has ended by itself: its exit code, 128 + signal when killed.
  int ReapCoordinator();
  void KillWorker(const std::string& name);
  void Signal(const std::string& name, int signal) const;  // a worker, or "coordinator"
  // Daemons that ended by themselves since they were started or last asked about, reaped.
  std::vector<std::string> TakeEnded();

  // `upipe --coordinator ADDRESS arguments...`
  CommandResult Upipe(const std::vector<std::string>& arguments,
                      absl::Duration limit = absl::Seconds(60)) const;
  nlohmann::json Describe(const std::string& job) const;
  nlohmann::json Nodes() const;
  // Polls until done() or fails the test naming `what`.
  void Await(const std::string& what, absl::Duration limit,
             const std::function<bool()>& done) const;
  void AwaitState(const std::string& job, const std::string& shown_state,
                  absl::Duration limit) const;
  // Until the job has reported a step.
  void AwaitStep(const std::string& job, absl::Duration limit) const;

  // Below it: <worker>/ and coordinator/, the daemons' state; <worker>.log and coordinator.log.
  const std::string& folder() const { return folder_; }
  const std::string& address() const { return address_; }  // of the coordinator
  // A packed corpus of generated text, made on first use.
  std::string Data();
  // A job file of a tiny model; returns its path.
  std::string JobFile(const std::string& name, int ranks, int steps, const std::string& extra = "");

 private:
  struct Daemon {
    std::string name;
    pid_t pid = -1;
  };
  pid_t Spawn(const std::string& name, const std::vector<std::string>& arguments);
  std::vector<std::string> Placed(const std::string& name,
                                  const std::vector<std::string>& arguments) const;
  void Kill(Daemon& daemon, int signal);

  std::string folder_;
  std::map<std::string, std::vector<std::string>> places_;
  std::string listen_ = "127.0.0.1:0";
  std::vector<std::string> listen_flags_;
  std::string address_;
  Daemon coordinator_;
  std::vector<Daemon> workers_;
};

// Pids of processes started for this job, by their environment.
std::vector<pid_t> TrainersOf(const std::string& job_id);
// The rank in a trainer's environment, or -1.
int RankOf(pid_t trainer);
// System V segments of this machine whose creator is gone: other programs come and go meanwhile.
int NumSharedMemorySegments();

std::string BinDir();

}  // namespace upipe::testing
