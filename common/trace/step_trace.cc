#include "common/trace/step_trace.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <map>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/metrics/names.h"
#include "common/trace/trace_events.h"

namespace upipe::trace {
namespace {

using Slice = v1::StepTimeline::Slice;
using Args = TraceEvents::Args;

std::string LaneName(int lane) {
  return lane >= 0 && lane < static_cast<int>(std::size(kLaneNames))
             ? kLaneNames[lane]
             : absl::StrCat("stream ", lane);
}

// Numbers of processes begin at 1: 0 means something else to some readers. Those of threads lie
// above all of them (a job has 1,024 ranks at most): Perfetto takes a thread with its process's
// number for the main one, and shows it first.
constexpr int kFirstThread = 2001;
int ProcessOf(int rank) { return rank + 1; }
int ThreadOf(int lane) { return kFirstThread + lane; }

// Slices of one stream, in the order of time.
using Lane = std::vector<const Slice*>;

// The slices of a stream that are worth drawing: named, whole, and not inside the one before.
std::map<int, Lane> LanesOf(const v1::StepTimeline& step) {
  std::map<int, Lane> lanes;
  for (const Slice& slice : step.slices()) {
    if (slice.stage_name() < 0 || slice.stage_name() >= step.stages_size()) continue;
    if (slice.begin_nanos() < 0 || slice.end_nanos() < slice.begin_nanos()) continue;
    lanes[slice.lane()].push_back(&slice);
  }
  for (auto& [number, lane] : lanes) {
    std::stable_sort(lane.begin(), lane.end(), [](const Slice* a, const Slice* b) {
      return a->begin_nanos() < b->begin_nanos();
    });
    Lane apart;
    for (const Slice* slice : lane) {
      if (apart.empty() || slice->begin_nanos() >= apart.back()->end_nanos())
        apart.push_back(slice);
    }
    lane = std::move(apart);
  }
  return lanes;
}

// Draws one step of one rank.
class StepDrawing {
 public:
  StepDrawing(const v1::StepTimeline& step, int64_t origin_micros, TraceEvents& events)
      : step_(step),
        origin_(static_cast<double>(step.start_unix_micros() - origin_micros)),
        events_(events) {}

  void Draw() {
    for (const auto& [number, lane] : LanesOf(step_)) DrawLane(number, lane);
    DrawMemory(false);
    DrawMemory(true);
  }

 private:
  double At(int64_t nanos) const { return origin_ + static_cast<double>(nanos) / 1e3; }

  void Add(int lane, std::string name, int64_t from, int64_t to, Args args = Args::object()) {
    events_.AddSlice(ProcessOf(step_.rank()), ThreadOf(lane), std::move(name), At(from), At(to),
                     std::move(args));
  }

  // Runs of slices that are alike in their pass, in them those of one layer, in them those of one
  // stage.
  void DrawLane(int number, const Lane& lane) {
    Add(number, absl::StrCat("step ", step_.step()), lane.front()->begin_nanos(),
        lane.back()->end_nanos(), {{"step", step_.step()}, {"generation", step_.generation()}});
    const auto same_pass = [](const Slice& a, const Slice& b) { return a.pass() == b.pass(); };
    const auto same_layer = [&](const Slice& a, const Slice& b) {
      return same_pass(a, b) && a.layer() == b.layer();
    };
    const auto same_stage = [&](const Slice& a, const Slice& b) {
      return same_layer(a, b) && a.stage() == b.stage();
    };
    for (size_t pass = 0, layer = 0, stage = 0, i = 0; i < lane.size(); ++i) {
      const Slice& slice = *lane[i];
      if (i == pass) {
        pass = EndOfRun(lane, i, same_pass);
        Add(number, slice.pass().empty() ? "no pass" : slice.pass(), slice.begin_nanos(),
            lane[pass - 1]->end_nanos());
      }
      if (i == layer) {
        layer = EndOfRun(lane, i, same_layer);
        if (slice.layer() >= 0) {
          Add(number, absl::StrCat("layer ", slice.layer()), slice.begin_nanos(),
              lane[layer - 1]->end_nanos());
        }
      }
      if (i == stage) {
        stage = EndOfRun(lane, i, same_stage);
        if (slice.stage() >= 0) {
          Add(number, absl::StrCat("stage ", slice.stage()), slice.begin_nanos(),
              lane[stage - 1]->end_nanos());
        }
      }
      Add(number, step_.stages(slice.stage_name()), slice.begin_nanos(), slice.end_nanos());
    }
  }

  template <typename Same>
  static size_t EndOfRun(const Lane& lane, size_t begin, Same same) {
    size_t end = begin + 1;
    while (end < lane.size() && same(*lane[begin], *lane[end])) ++end;
    return end;
  }

  // What changed at one time is one event.
  void DrawMemory(bool host) {
    const char* name = host ? "host memory" : "device memory";
    Args changed = Args::object();
    int64_t at = 0;
    const auto flush = [&] {
      if (!changed.empty()) {
        events_.AddCounter(ProcessOf(step_.rank()), name, At(at), std::move(changed));
      }
      changed = Args::object();
    };
    for (const v1::StepTimeline::MemorySample& sample : step_.memory()) {
      const bool known = sample.tag() >= 0 && sample.tag() < step_.tags_size();
      if (sample.host() != host || !known || sample.nanos() < at) continue;
      if (sample.nanos() != at) flush();
      at = sample.nanos();
      changed[step_.tags(sample.tag())] = sample.bytes();
    }
    flush();
  }

  const v1::StepTimeline& step_;
  const double origin_;
  TraceEvents& events_;
};

}  // namespace

std::string StepTrace(const std::string& job, const std::vector<v1::StepTimeline>& steps) {
  TraceEvents events;
  int64_t origin = std::numeric_limits<int64_t>::max();
  std::map<int, std::set<int>> lanes;  // by rank
  for (const v1::StepTimeline& step : steps) {
    origin = std::min(origin, step.start_unix_micros());
    for (const Slice& slice : step.slices()) lanes[step.rank()].insert(slice.lane());
    lanes[step.rank()];
  }
  for (const auto& [rank, numbers] : lanes) {
    events.NameProcess(ProcessOf(rank), absl::StrCat("rank ", rank, " of ", job));
    for (const int lane : numbers) {
      events.NameThread(ProcessOf(rank), ThreadOf(lane), LaneName(lane));
    }
  }
  int64_t dropped = 0;
  for (const v1::StepTimeline& step : steps) {
    StepDrawing(step, origin, events).Draw();
    dropped += step.dropped_slices();
  }
  return events.Render({{"job", job}, {"dropped_slices", dropped}});
}

}  // namespace upipe::trace
