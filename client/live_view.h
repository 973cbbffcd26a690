// Shows a watched job as it goes: a block redrawn in place on a terminal, otherwise one line per
// report, at most one a second.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "client/commands.h"
#include "client/progress.h"

namespace upipe::client {

class LiveView {
 public:
  explicit LiveView(Console& console) : console_(console) {}

  void Show(const v1::WatchResponse& message);
  // The last word: how the job ended and after how long. Leaves the block standing.
  void Finish();

  const v1::Job& job() const { return progress_.job(); }

 private:
  void ShowOnTerminal(const std::vector<std::string>& events);
  void ShowAsLines(const std::vector<std::string>& events, bool important);
  std::string EraseBlock();

  Console& console_;
  Progress progress_;
  BootTime last_shown_{-absl::InfiniteDuration()};
  size_t block_lines_ = 0;  // on the screen
  std::string last_line_;   // printed
};

}  // namespace upipe::client
