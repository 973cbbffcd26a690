// One rank as a process tree: how core and launcher name it and what they tell each other about it.
#pragma once

#include <compare>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace upipe::worker {

// One rank of one attempt: the process tree, its journal entry, its log.
struct RankKey {
  std::string nonce;  // of the attempt
  int rank = 0;
  auto operator<=>(const RankKey&) const = default;
};

// How a trainer process ended, as the launcher saw it.
struct ProcessExit {
  std::optional<int> exit_code;
  std::optional<int> signal;
  std::string oom_evidence;         // non-empty: the best sign that the kernel killed it for memory
  bool died_before_kill = false;    // it was ending before the launcher was told to kill it
  bool oom_counters_known = false;  // false: no counter was readable, so a stray SIGKILL may be one
  std::vector<std::string> log_tail;
};

}  // namespace upipe::worker
