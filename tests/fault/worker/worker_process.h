// A real upipe-worker as a child of the test, in a folder of its own.
#pragma once

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <functional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "common/clock.h"
#include "gtest/gtest.h"

namespace upipe::worker {

// True as soon as `met` holds; false after 15 s.
inline bool Eventually(const std::function<bool()>& met) {
  const BootTime until = SystemClock().Now() + absl::Seconds(15);
  while (!met()) {
    if (SystemClock().Now() >= until) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return true;
}

class WorkerProcess {
 public:
  struct Options {
    std::string coordinator;
    std::string root;  // exists; state below `state`, output in `worker.log`
    std::string trainer_binary;
    bool cgroup = true;
    bool place = true;  // ranks on CPUs of their own
    std::string leave_grace = "1m";
    std::vector<std::string> more = {};  // words
  };
  explicit WorkerProcess(const Options& options) {
    std::vector<std::string> words = {WORKER_BINARY,
                                      "--coordinator",
                                      options.coordinator,
                                      "--name",
                                      "w1",
                                      "--node",
                                      "n1",
                                      "--slots",
                                      "2",
                                      "--memory-per-rank",
                                      "1GiB",
                                      "--state-dir",
                                      options.root + "/state",
                                      "--trainer-binary",
                                      options.trainer_binary,
                                      "--leave-grace",
                                      options.leave_grace};
    if (!options.cgroup) words.push_back("--no-cgroup");
    if (!options.place) words.push_back("--no-cpu-placement");
    words.insert(words.end(), options.more.begin(), options.more.end());
    std::vector<char*> arguments;
    for (std::string& word : words) arguments.push_back(word.data());
    arguments.push_back(nullptr);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_addopen(&actions, 1, (options.root + "/worker.log").c_str(),
                                     O_WRONLY | O_CREAT | O_APPEND, 0600);
    posix_spawn_file_actions_adddup2(&actions, 1, 2);
    EXPECT_EQ(posix_spawn(&pid_, WORKER_BINARY, &actions, nullptr, arguments.data(), environ), 0);
    posix_spawn_file_actions_destroy(&actions);
  }
  WorkerProcess(const WorkerProcess&) = delete;
  WorkerProcess& operator=(const WorkerProcess&) = delete;
  ~WorkerProcess() {
    if (pid_ == 0) return;
    Signal(SIGTERM);
    End(SIGINT);
  }
  int pid() const { return pid_; }
  void Signal(int signal) const { kill(pid_, signal); }
  // Its exit status, as waitpid gives it.
  int End(int signal) {
    Signal(signal);
    return Wait();
  }
  int Wait() {
    int status = 0;
    waitpid(std::exchange(pid_, 0), &status, 0);
    return status;
  }

 private:
  pid_t pid_ = 0;
};

}  // namespace upipe::worker
