#include "client/live_view.h"

#include "absl/strings/str_cat.h"
#include "client/render.h"
#include "common/units.h"

namespace upipe::client {
namespace {

constexpr absl::Duration kRedrawInterval = absl::Milliseconds(100);
constexpr absl::Duration kLineInterval = absl::Seconds(1);

}  // namespace

void LiveView::Show(const v1::WatchResponse& message) {
  const v1::JobState before = job().state();
  if (message.has_job()) progress_.Take(message.job());
  if (message.has_report()) progress_.Take(message.report());
  const std::vector<std::string> events = progress_.TakeNewEvents();
  const bool important =
      job().state() != before || !events.empty() || message.report().has_held_out_loss() ||
      (message.has_report() && message.report().step() == message.report().total_steps());
  const BootTime now = console_.clock.Now();
  const absl::Duration interval =
      console_.terminal_width.has_value() ? kRedrawInterval : kLineInterval;
  if (!important && now - last_shown_ < interval) return;
  last_shown_ = now;
  if (console_.terminal_width.has_value()) {
    ShowOnTerminal(events);
  } else {
    ShowAsLines(events, job().state() != before);
  }
}

void LiveView::ShowOnTerminal(const std::vector<std::string>& events) {
  std::string text = EraseBlock();
  for (const std::string& event : events) absl::StrAppend(&text, event, "\n");
  const std::vector<std::string> block = progress_.Block(*console_.terminal_width - 1);
  for (const std::string& line : block) absl::StrAppend(&text, line, "\n");
  block_lines_ = block.size();
  console_.out << text << std::flush;
}

void LiveView::ShowAsLines(const std::vector<std::string>& events, bool state_changed) {
  for (const std::string& event : events) console_.out << event << "\n";
  if (state_changed) {
    console_.out << job().id() << "  " << ShownState(job()) << (job().reason().empty() ? "" : "  ")
                 << Printable(job().reason()) << "\n";
  }
  std::string line = progress_.Line();
  if (!line.empty() && line != last_line_) console_.out << line << "\n";
  last_line_ = std::move(line);
  console_.out << std::flush;
}

// Cursor to the block's first line, then erase to the end of the screen.
std::string LiveView::EraseBlock() {
  return block_lines_ == 0 ? "" : absl::StrCat("\x1b[", block_lines_, "A\x1b[J");
}

void LiveView::Finish() {
  if (console_.terminal_width.has_value()) {
    ShowOnTerminal({});
  } else {
    ShowAsLines({}, false);
  }
  if (!IsTerminal(job().state())) return;
  console_.out << EndLine(job()) << "\n" << std::flush;
}

}  // namespace upipe::client
