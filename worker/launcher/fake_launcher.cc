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
  const auto found = live_.find(key);
  if (found == live_.end() || std::exchange(found->second.ended, true)) return;
  due_.push_back(TreeExited{key, std::move(exit), ReadPositions(key.nonce)});
  due_.push_back(TreeGone{key});
}

void FakeLauncher::Kill(const RankKey& key) { Exit(key, ProcessExit{.signal = SIGKILL}); }

void FakeLauncher::KillSuperseded(const RankKey& key, const std::string&, int64_t) { Kill(key); }

std::vector<v1::RankPosition> FakeLauncher::ReadPositions(const std::string& nonce) {
  std::vector<v1::RankPosition> positions;
  for (const auto& [key, process] : live_) {
    if (key.nonce != nonce) continue;
    v1::RankPosition& position = positions.emplace_back();
    position.set_rank(key.rank);
    position.set_changes(process.changes);
    position.set_collective(process.collective);
  }
  return positions;
}

bool FakeLauncher::Pump() {
  if (due_.empty()) return false;
  LaunchEvent event = std::move(due_.front());
  due_.pop_front();
  if (const auto* gone = std::get_if<TreeGone>(&event); gone != nullptr) live_.erase(gone->key);
  sink_(std::move(event));
  return true;
}

}  // namespace upipe::worker
