// Processes played in memory: nothing is forked, the test says when and how each ends. Events are
// delivered by Pump, in the caller's thread.
#pragma once

#include <deque>
#include <map>

#include "worker/launcher/process_launcher.h"

namespace upipe::worker {

class FakeLauncher : public ProcessLauncher {
 public:
  explicit FakeLauncher(Sink sink) : sink_(std::move(sink)) {}

  std::string containment() const override { return "fake"; }
  // A binary that does not exist on disk fails to launch, as a real one would.
  void Launch(LaunchSpec spec) override;
  void Kill(const RankKey& key) override;
  void KillSuperseded(const RankKey& key, const std::string& job, int64_t generation) override;
  void SetDeadline(BootTime) override {}  // invented processes take no steps
  std::vector<v1::RankPosition> ReadPositions(const std::string& nonce) override;

  void Exit(const RankKey& key, ProcessExit exit);
  void SetPosition(const RankKey& key, int64_t collective) {
    live_.at(key).collective = collective;
    ++live_.at(key).changes;
  }
  // Delivers what is due; true when something was.
  bool Pump();

 private:
  struct Process {
    int64_t collective = 0;
    uint64_t changes = 0;
    bool ended = false;  // its position is there until the proof
  };
  const Sink sink_;
  int next_pid_ = 1000;
  std::map<RankKey, Process> live_;
  std::deque<LaunchEvent> due_;
};

}  // namespace upipe::worker
