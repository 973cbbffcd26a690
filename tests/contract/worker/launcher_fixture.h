// A launcher under test and everything it said, in order.
#pragma once

#include <condition_variable>
#include <filesystem>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/ids.h"
#include "gtest/gtest.h"
#include "worker/launcher/posix_launcher.h"
#include "worker/launcher/rank_log.h"

namespace upipe::worker {

class EventRecord {
 public:
  void Add(LaunchEvent event) {
    std::lock_guard lock(mutex_);
    events_.push_back(std::move(event));
    changed_.notify_all();
  }
  // The n-th event (from 0) of `Kind` for `key`; nothing after 15 s.
  template <typename Kind>
  std::optional<Kind> Wait(const RankKey& key) {
    std::optional<Kind> found;
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, std::chrono::seconds(15), [&] {
      for (const LaunchEvent& event : events_) {
        const auto* kind = std::get_if<Kind>(&event);
        if (kind != nullptr && kind->key == key) found = *kind;
      }
      return found.has_value();
    });
    return found;
  }
  // Waits for the event that ends a key's story: the proof or the failed launch. False after 15 s.
  bool WaitForEnd(const RankKey& key) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, std::chrono::seconds(15), [&] {
      for (const LaunchEvent& event : events_) {
        if (const auto* gone = std::get_if<TreeGone>(&event); gone != nullptr && gone->key == key)
          return true;
        if (const auto* failed = std::get_if<TreeLaunchFailed>(&event);
            failed != nullptr && failed->key == key) {
          return true;
        }
      }
      return false;
    });
  }
  // "started exited gone", of one key.
  std::string Story(const RankKey& key) {
    static constexpr const char* kWords[] = {"started", "failed", "exited", "gone"};
    std::lock_guard lock(mutex_);
    std::string story;
    for (const LaunchEvent& event : events_) {
      if (!std::visit([&](const auto& kind) { return kind.key == key; }, event)) continue;
      absl::StrAppend(&story, story.empty() ? "" : " ", kWords[event.index()]);
    }
    return story;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<LaunchEvent> events_;
};

inline std::string MakeTestFolder() {
  std::string pattern = (std::filesystem::temp_directory_path() / "launcher-XXXXXX").string();
  EXPECT_NE(mkdtemp(pattern.data()), nullptr);
  return pattern;
}

inline LaunchSpec FakeTrainerSpec(const RankKey& key, const std::string& mode,
                                  const std::string& dir) {
  return {key,
          "job",
          1,
          FAKE_TRAINER,
          {absl::StrCat("UPIPE_NONCE=", key.nonce), absl::StrCat("UPIPE_RANK=", key.rank),
           absl::StrCat("FAKE_TRAINER_MODE=", mode)},
          absl::StrCat(dir, "/r", key.rank)};
}

// Waits until the rank's output holds `text`; the output, or "" after 15 s.
inline std::string WaitForOutput(const std::string& dir, int rank, const std::string& text) {
  for (int i = 0; i < 3000; ++i) {
    const absl::StatusOr<LogPiece> log = ReadRankLog(absl::StrCat(dir, "/r", rank), 0, 1 << 20);
    if (log.ok() && log->data.find(text) != std::string::npos) return log->data;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return "";
}

}  // namespace upipe::worker
