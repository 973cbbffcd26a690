#include "client/top_view.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "client/render.h"
#include "client/terminal_text.h"
#include "common/units.h"

namespace upipe::client {
namespace {

constexpr size_t kNarrowest = 20;  // columns

// "####....", with '|' at `mark`, a share of the width, when it is not filled that far.
std::string Bar(double share, double mark, size_t width) {
  std::string bar(width, '.');
  const auto cells = [width](double part) {
    const double of = std::isfinite(part) ? std::clamp(part, 0.0, 1.0) : 0;
    return static_cast<size_t>(std::lround(of * static_cast<double>(width)));
  };
  std::fill_n(bar.begin(), cells(share), '#');
  if (mark > 0 && mark < 1 && cells(mark) < width) bar[cells(mark)] = '|';
  return bar;
}

double Share(int64_t part, int64_t whole) {
  return whole > 0 ? static_cast<double>(part) / static_cast<double>(whole) : 0;
}

const v1::RankPlan* PlanOf(const v1::Job& job, int rank) {
  return rank >= 0 && rank < job.plan().ranks_size() ? &job.plan().ranks(rank) : nullptr;
}

int64_t Restarts(const v1::Job& job) {
  return job.restarts().infrastructure() + job.restarts().application();
}

// "backward, layer 3 of 32, stage 2".
std::string PositionText(const v1::Job& job, const v1::RankPosition& position) {
  std::string text = position.pass().empty() ? "-" : position.pass();
  if (position.layer() >= 0) {
    const int64_t layers = job.plan().spec().model().num_layers();
    absl::StrAppend(&text, ", layer ", position.layer() + 1);
    if (layers > 0) absl::StrAppend(&text, " of ", layers);
    if (position.stage() >= 0) absl::StrAppend(&text, ", stage ", position.stage() + 1);
  }
  return text;
}

// The same in few columns: "backward layer 3/32 s2".
std::string ShortPosition(const v1::Job& job, const v1::RankPosition& position) {
  std::string text = position.pass().empty() ? "-" : position.pass();
  if (position.layer() < 0) return text;
  absl::StrAppend(&text, " layer ", position.layer() + 1);
  const int64_t layers = job.plan().spec().model().num_layers();
  if (layers > 0) absl::StrAppend(&text, "/", layers);
  if (position.stage() >= 0) absl::StrAppend(&text, " s", position.stage() + 1);
  return text;
}

// The rank that holds most, by its last report; null: none has reported.
const v1::RankStatus* Fullest(const v1::Job& job) {
  const v1::RankStatus* fullest = nullptr;
  for (const v1::RankStatus& rank : job.ranks()) {
    if (!rank.has_last_report()) continue;
    if (fullest == nullptr ||
        rank.last_report().memory().peak_bytes() > fullest->last_report().memory().peak_bytes()) {
      fullest = &rank;
    }
  }
  return fullest;
}

std::string MemoryText(const v1::Job& job) {
  const v1::RankStatus* fullest = Fullest(job);
  if (fullest == nullptr) return "";
  const int64_t peak = fullest->last_report().memory().peak_bytes();
  const v1::RankPlan* plan = PlanOf(job, fullest->rank());
  if (plan == nullptr) return absl::StrCat("peak ", FormatBytes(peak));
  const int64_t planned = plan->memory().peak_bytes();
  return absl::StrCat("peak [", Bar(Share(peak, planned), 0, 8), "] ", FormatBytes(peak), " of ",
                      FormatBytes(planned));
}

std::string StepsText(const v1::Job& job) {
  const v1::StepReport& report = job.last_report();
  if (report.total_steps() == 0) return "";
  return absl::StrFormat("step %d/%d [%s] %.0f %%", report.step(), report.total_steps(),
                         Bar(Share(report.step(), report.total_steps()), 0, 10),
                         std::floor(100 * Share(report.step(), report.total_steps())));
}

// Loss, speed and what is left, as they are known.
std::string PaceText(const v1::Job& job, const Progress& pace) {
  if (!job.has_last_report()) return "";
  const v1::StepReport& report = job.last_report();
  std::string text = absl::StrFormat("loss %.4f  ", report.loss());
  const double rate = report.tokens_per_second();
  absl::StrAppend(&text, FormatCount(std::isfinite(rate) ? std::llround(rate) : 0), " tokens/s");
  if (!IsTerminal(job.state())) {
    absl::StrAppend(&text, "  left ", FormatTimeSpan(pace.TimeLeft()));
  }
  return text;
}

// Where the job is in its step: the rank that is furthest behind.
std::string StepPosition(const v1::Job& job) {
  const v1::RankPosition* behind = nullptr;
  for (const v1::RankStatus& rank : job.ranks()) {
    if (!rank.has_position()) continue;
    if (behind == nullptr || rank.position().collective() < behind->collective()) {
      behind = &rank.position();
    }
  }
  return behind == nullptr ? "" : PositionText(job, *behind);
}

std::string Heading(const v1::Job& job) {
  std::string text = absl::StrCat(Padded(job.id(), std::max<size_t>(20, ColumnsOf(job.id()))), " ",
                                  Padded(ShownState(job), 10));
  if (const int64_t restarts = Restarts(job); restarts > 0) {
    absl::StrAppend(&text, " ", restarts, restarts == 1 ? " restart " : " restarts");
  }
  return text;
}

std::string Join(const std::vector<std::string>& parts) {
  std::vector<std::string> there;
  for (const std::string& part : parts) {
    if (!part.empty()) there.push_back(part);
  }
  return absl::StrJoin(there, "  ");
}

std::vector<std::string> JobLines(const v1::Job& job,
                                  const std::map<std::string, Progress>& paces) {
  std::vector<std::string> lines = {absl::StrCat(Heading(job), " ", StepsText(job))};
  if (IsTerminal(job.state())) {
    if (job.state() == v1::JOB_STATE_FAILED) lines[0] += " " + job.cause().message();
    return lines;
  }
  if (!job.has_last_report()) {
    if (!job.reason().empty()) lines.push_back("  " + job.reason());
    return lines;
  }
  const auto pace = paces.find(job.id());
  lines.push_back(
      "  " + Join({PaceText(job, pace == paces.end() ? Progress() : pace->second), job.reason()}));
  const std::string inside = Join({StepPosition(job), MemoryText(job)});
  if (!inside.empty()) lines.push_back("  " + inside);
  return lines;
}

std::string ClusterLine(const TopCluster& cluster, absl::Time now) {
  std::map<v1::SlotState, int> slots;
  int away = 0, cordoned = 0, total = 0;
  for (const v1::Node& node : cluster.nodes.nodes()) {
    away += node.state() != v1::NODE_STATE_READY;
    cordoned += node.cordoned();
    total += node.slots_size();
    for (const v1::Slot& slot : node.slots()) ++slots[slot.state()];
  }
  int queued = 0, running = 0;
  for (const v1::Job& job : cluster.jobs) {
    queued += job.state() == v1::JOB_STATE_QUEUED || job.state() == v1::JOB_STATE_PLANNING;
    running += job.state() == v1::JOB_STATE_RUNNING || job.state() == v1::JOB_STATE_STARTING ||
               job.state() == v1::JOB_STATE_STOPPING;
  }
  const int nodes = cluster.nodes.nodes_size();
  std::string text = absl::StrCat(absl::FormatTime("%H:%M:%S", now, absl::LocalTimeZone()), "  ",
                                  nodes, nodes == 1 ? " worker" : " workers");
  if (away > 0) absl::StrAppend(&text, " (", away, " away)");
  if (cordoned > 0) absl::StrAppend(&text, " (", cordoned, " cordoned)");
  const int busy = slots[v1::SLOT_STATE_BUSY], free = slots[v1::SLOT_STATE_FREE];
  absl::StrAppend(&text, "  ", busy, " of ", total, " slots busy, ", free, " free");
  if (busy + free < total) absl::StrAppend(&text, ", ", total - busy - free, " out of use");
  return absl::StrCat(text, "  jobs: ", running, " running, ", queued, " queued");
}

// Cuts to the size; the last line counts the lines that have no room.
std::vector<std::string> FitTo(std::vector<std::string> lines, TerminalSize size,
                               const std::string& what) {
  const size_t columns = std::max(size.columns, kNarrowest);
  const size_t most = std::max<size_t>(size.lines, 3);
  if (lines.size() > most) {
    const size_t left_out = lines.size() - (most - 1);
    lines.resize(most - 1);
    lines.push_back(absl::StrCat(".. ", left_out, " more lines of ", what));
  }
  for (std::string& line : lines) {
    line = Fitted(line, columns);
    line.erase(line.find_last_not_of(' ') + 1);
  }
  return lines;
}

// One letter for each category of memory, and '.' for what is free.
char LetterOf(const std::string& tag) {
  if (absl::StartsWith(tag, "attn_")) return 'A';
  if (tag == "offload_host") return 'H';
  if (tag == "workspace") return 'S';  // W is weights
  return tag.empty() ? '?' : static_cast<char>(tag[0] >= 'a' && tag[0] <= 'z' ? tag[0] - 32 : '?');
}

// What the bars of a job's ranks end at: the limit, unless it is so far up that nothing could be
// told apart below it.
struct BarScale {
  int64_t limit = 0;  // 0: not known
  int64_t end = 1;
  bool ends_at_limit = false;
};

BarScale ScaleOf(const v1::Job& job) {
  BarScale scale = {.limit = job.plan().budget().device_bytes()};
  for (const v1::RankPlan& rank : job.plan().ranks()) {
    scale.end = std::max(scale.end, rank.memory().peak_bytes());
  }
  for (const v1::RankStatus& rank : job.ranks()) {
    scale.end = std::max(scale.end, rank.last_report().memory().peak_bytes());
  }
  scale.ends_at_limit = scale.limit >= scale.end && scale.limit / 4 <= scale.end;
  if (scale.ends_at_limit) scale.end = scale.limit;
  return scale;
}

// A rank at its fullest by category: "WWWGGOOOAAAA....|...", '|' at the planned peak.
std::string CategoryBar(const v1::MemoryUsage& usage, int64_t planned, const BarScale& scale,
                        size_t width) {
  const auto cells = [&](int64_t bytes) {
    return static_cast<size_t>(
        std::lround(std::clamp(Share(bytes, scale.end), 0.0, 1.0) * static_cast<double>(width)));
  };
  std::string bar;
  int64_t bytes = 0;
  for (const v1::TagBytes& tag : usage.tags()) {
    bytes += tag.at_peak_bytes();
    if (cells(bytes) > bar.size()) bar.append(cells(bytes) - bar.size(), LetterOf(tag.tag()));
  }
  bar.resize(width, '.');
  if (planned > 0 && cells(planned) < width) bar[cells(planned)] = '|';
  return bar;
}

std::string RankLine(const v1::Job& job, const v1::RankStatus& rank, const BarScale& scale,
                     size_t columns) {
  const v1::StepReport& report = rank.last_report();
  const v1::RankPlan* plan = PlanOf(job, rank.rank());
  const int64_t planned = plan == nullptr ? 0 : plan->memory().peak_bytes();
  std::string at = rank.has_position() ? ShortPosition(job, rank.position())
                                       : v1::RankState_Name(rank.state()).substr(11);
  if (rank.has_position() && rank.position().seconds_in_place() >= 10) {
    absl::StrAppend(&at, " since ",
                    FormatTimeSpan(absl::Seconds(rank.position().seconds_in_place())));
  }
  const std::string own =
      rank.has_last_report()
          ? FormatTimeSpan(absl::Seconds(report.step_seconds() - report.comm_seconds()))
          : "-";
  const size_t spare = columns > 80 ? columns - 80 : 0;
  const size_t bar = 12 + spare / 2;
  std::string line = absl::StrCat(Padded(absl::StrCat(rank.rank()), 4), " ",
                                  Padded(absl::StrCat(rank.node(), "/", rank.slot()), 11), " ",
                                  Padded(at, 25 + spare / 2), " ", Padded(own, 7), " ");
  if (rank.has_last_report()) {
    absl::StrAppend(&line, "[", CategoryBar(report.memory(), planned, scale, bar), "] ",
                    FormatBytes(report.memory().peak_bytes()));
  }
  return line;
}

// What the bars end at, and their letters; nothing before the first report.
std::vector<std::string> Legend(const v1::Job& job, const BarScale& scale) {
  const v1::RankStatus* fullest = Fullest(job);
  if (fullest == nullptr) return {};
  std::vector<std::string> names;
  bool attention = false;
  for (const v1::TagBytes& tag : fullest->last_report().memory().tags()) {
    if (tag.at_peak_bytes() == 0) continue;
    const bool of_attention = absl::StartsWith(tag.tag(), "attn_");
    if (of_attention && std::exchange(attention, true)) continue;
    names.push_back(absl::StrCat(std::string(1, LetterOf(tag.tag())), " ",
                                 of_attention ? "attention" : tag.tag()));
  }
  std::string ends = absl::StrCat("Peaks by category; bars end at ", FormatBytes(scale.end));
  if (scale.ends_at_limit) {
    absl::StrAppend(&ends, ", the limit; | is the plan");
  } else if (scale.limit > 0) {
    absl::StrAppend(&ends, ", the limit is ", FormatBytes(scale.limit));
  }
  return {ends, absl::StrJoin(names, ", ")};
}

// Who keeps the others waiting.
std::string Slowest(const v1::Job& job) {
  const v1::RankStatus* slowest = nullptr;
  const auto own = [](const v1::RankStatus& rank) {
    return rank.last_report().step_seconds() - rank.last_report().comm_seconds();
  };
  for (const v1::RankStatus& rank : job.ranks()) {
    if (rank.has_last_report() && (slowest == nullptr || own(rank) > own(*slowest))) {
      slowest = &rank;
    }
  }
  if (slowest == nullptr || job.ranks_size() < 2) return "";
  return absl::StrCat("slowest of ", job.ranks_size(), ": rank ", slowest->rank(), " on ",
                      slowest->node(), ", ", FormatTimeSpan(absl::Seconds(own(*slowest))));
}

}  // namespace

std::vector<std::string> RenderTop(const TopCluster& cluster, const std::string& notice,
                                   absl::Time now, TerminalSize size) {
  std::vector<std::string> lines;
  if (!notice.empty()) lines.push_back(notice);
  lines.push_back(ClusterLine(cluster, now));
  for (const v1::Node& node : cluster.nodes.nodes()) {
    if (node.state() == v1::NODE_STATE_READY && !node.cordoned() && !node.leaving()) continue;
    lines.push_back(absl::StrCat("  ", node.worker(), ": ", NodeStateText(node),
                                 node.cordon_reason().empty() ? "" : ", ", node.cordon_reason()));
  }
  if (cluster.jobs.empty()) lines.push_back("No jobs.");
  for (const v1::Job& job : cluster.jobs) {
    for (std::string& line : JobLines(job, cluster.paces)) lines.push_back(std::move(line));
  }
  return FitTo(std::move(lines), size, "jobs; `upipe list` has all");
}

std::vector<std::string> RenderTopJob(const v1::Job& job, const Progress& pace,
                                      const std::string& notice, absl::Time now,
                                      TerminalSize size) {
  std::vector<std::string> lines;
  if (!notice.empty()) lines.push_back(notice);
  lines.push_back(
      absl::StrCat(absl::FormatTime("%H:%M:%S", now, absl::LocalTimeZone()), "  ", Heading(job)));
  if (!job.reason().empty()) lines.push_back("  " + job.reason());
  if (job.state() == v1::JOB_STATE_FAILED) lines.push_back("  " + job.cause().message());
  if (job.has_last_report()) {
    lines.push_back("  " + Join({StepsText(job), PaceText(job, pace)}));
    lines.push_back("  " + Join({MemoryText(job), Slowest(job)}));
  }
  if (job.has_last_commit()) {
    lines.push_back("  last checkpoint: " + CheckpointText(job.last_commit()));
  }
  if (job.ranks_size() == 0) return FitTo(std::move(lines), size, "ranks");
  const BarScale scale = ScaleOf(job);
  for (std::string& line : Legend(job, scale)) lines.push_back(std::move(line));
  const size_t spare = size.columns > 80 ? size.columns - 80 : 0;
  lines.push_back(
      absl::StrCat("RANK NODE/SLOT   ", Padded("AT", 25 + spare / 2), " OWN     MEMORY"));
  for (const v1::RankStatus& rank : job.ranks()) {
    lines.push_back(RankLine(job, rank, scale, std::max(size.columns, kNarrowest)));
  }
  return FitTo(std::move(lines), size, "ranks");
}

}  // namespace upipe::client
