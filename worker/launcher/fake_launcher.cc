#include "worker/launcher/fake_launcher.h"

#include <unistd.h>

#include <csignal>
#include <utility>

#include "absl/strings/str_cat.h"

namespace upipe::worker {

void FakeLauncher::Launch(LaunchSpec spec) {
  if (access(spec.binary.c_str(), X_OK) != 0) {
    due_.push_back(TreeLaunchFailed{
        spec.key, absl::NotFoundError(absl::StrCat("cannot start ", spec.binary))});
    return;
  }
  live_[spec.key] = {};
  due_.push_back(TreeStarted{spec.key, next_pid_++});
}

void FakeLauncher::Exit(const RankKey& key, ProcessExit exit) {
  if (live_.erase(key) == 0) return;
  due_.push_back(TreeExited{key, std::move(exit)});
  due_.push_back(TreeGone{key});
}

void FakeLauncher::Terminate(const RankKey& key) {
  const auto found = live_.find(key);
  if (found != live_.end() && !found->second.ignores_terminate)
    Exit(key, ProcessExit{.signal = SIGTERM});
}

void FakeLauncher::Kill(const RankKey& key) { Exit(key, ProcessExit{.signal = SIGKILL}); }

void FakeLauncher::KillSuperseded(const RankKey& key, const std::string&, int64_t) { Kill(key); }

std::vector<RankPosition> FakeLauncher::ReadPositions(const std::string& nonce) {
  std::vector<RankPosition> positions;
  for (const auto& [key, process] : live_) {
    if (key.nonce != nonce) continue;
    positions.push_back(
        {key.rank, process.collective, absl::StrCat("collective ", process.collective)});
  }
  return positions;
}

bool FakeLauncher::Pump() {
  if (due_.empty()) return false;
  LaunchEvent event = std::move(due_.front());
  due_.pop_front();
  sink_(std::move(event));
  return true;
}

}  // namespace upipe::worker
