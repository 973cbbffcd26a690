#include "planner/plan_trace.h"

#include <algorithm>
#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/trace/trace_events.h"

namespace upipe::planner {
namespace {

using Json = nlohmann::ordered_json;
using kernels::TagBytes;
using trace::Rounded;

constexpr int kProcess = 1;

// Threads of the trace's one process.
enum Track : int { kStep = 1, kCompute, kExchange, kCopies };
constexpr const char* kTrackNames[] = {"", "step", "compute", "exchange", "host copies"};

// Moments from `begin` that are alike in what `same` compares.
template <typename Same>
size_t EndOfRun(const std::vector<TimelineMoment>& moments, size_t begin, Same same) {
  size_t end = begin + 1;
  while (end < moments.size() && same(moments[begin].at, moments[end].at)) ++end;
  return end;
}

class Trace {
 public:
  Trace(const Timeline& timeline, const v1::RunPlan& plan)
      : timeline_(timeline), moments_(timeline.moments), plan_(plan) {
    double end = 0;
    starts_.push_back(0);
    for (const TimelineMoment& moment : moments_) {
      end += Extent(timeline, moment);
      starts_.push_back(end);
    }
    const double scale = timeline.timed ? 1e6 : 1e6 / std::max(end, 1e-300);
    for (double& start : starts_) start = Rounded(start * scale);
  }

  std::string Render() {
    AddStep();
    if (timeline_.timed) AddWork();
    AddCounters("device memory", &TimelineMoment::device, timeline_.device_peaks);
    if (moments_[FullestOnHost(moments_)].host.total_bytes > 0) {
      AddCounters("host memory", &TimelineMoment::host, timeline_.host_peaks);
    }
    AddNames();
    return events_.Render(About());
  }

 private:
  // One past the last part of the moment that begins at `begin`.
  size_t EndOfMoment(size_t begin) const {
    return EndOfRun(moments_, begin, std::equal_to<engine::Moment>());
  }
  TimelineMoment Whole(size_t begin, size_t end) const {
    TimelineMoment whole = moments_[begin];
    for (size_t i = begin + 1; i < end; ++i) Absorb(whole, moments_[i]);
    return whole;
  }

  void AddSlice(Track track, std::string name, double from, double to, Json args = Json::object()) {
    events_.AddSlice(kProcess, track, std::move(name), from, to, std::move(args));
  }

  // Passes, in them layers, in them stages: what encloses comes first.
  void AddStep() {
    const auto same_pass = [](const auto& a, const auto& b) { return a.pass == b.pass; };
    const auto same_layer = [](const auto& a, const auto& b) {
      return a.pass == b.pass && a.layer == b.layer;
    };
    for (size_t pass = 0; pass < moments_.size();) {
      const size_t pass_end = EndOfRun(moments_, pass, same_pass);
      AddSlice(kStep, NameOf(moments_[pass].at.pass), starts_[pass], starts_[pass_end]);
      while (pass < pass_end) {
        const size_t layer_end = EndOfRun(moments_, pass, same_layer);
        AddLayer(pass, layer_end);
        pass = layer_end;
      }
    }
  }

  void AddLayer(size_t begin, size_t end) {
    const int layer = moments_[begin].at.layer;
    if (layer >= 0) AddSlice(kStep, absl::StrCat("layer ", layer), starts_[begin], starts_[end]);
    for (size_t next, i = begin; i < end; i = next) {
      next = EndOfMoment(i);
      const TimelineMoment moment = Whole(i, next);
      const std::string name = moment.at.stage >= 0 ? absl::StrCat("stage ", moment.at.stage)
                               : layer >= 0         ? "mlp"
                                                    : NameOf(moment.at);
      AddSlice(kStep, name, starts_[i], starts_[next],
               {{"ops", moment.ops},
                {"flops", moment.flops},
                {"bytes_sent", moment.bytes_sent},
                {"bytes_to_host", moment.bytes_to_host},
                {"bytes_from_host", moment.bytes_from_host},
                {"device_bytes", moment.device.total_bytes},
                {"host_bytes", moment.host.total_bytes}});
    }
  }

  // Computation begins with its moment, exchange ends with it: what both take beyond the moment's
  // length they do side by side.
  void AddWork() {
    for (size_t next, i = 0; i < moments_.size(); i = next) {
      next = EndOfMoment(i);
      const MomentSeconds seconds = Whole(i, next).seconds;
      const double from = starts_[i], to = starts_[next];
      const auto until = [&](double length) { return std::min(to, Rounded(from + length * 1e6)); };
      const std::string name = NameOf(moments_[i].at);
      const auto add = [&](Track track, double length, double begin, double end) {
        if (length > 0) AddSlice(track, name, begin, end, {{"seconds", length}});
      };
      add(kCompute, seconds.compute, from, until(seconds.compute));
      add(kExchange, seconds.exchange, std::max(from, Rounded(to - seconds.exchange * 1e6)), to);
      add(kCopies, seconds.copies, from, until(seconds.copies));
    }
  }

  void AddCounters(const std::string& name, PoolMoment TimelineMoment::*pool,
                   const TagBytes& peaks) {
    for (size_t i = 0; i < moments_.size(); ++i) {
      Json args = {{"total", (moments_[i].*pool).total_bytes}};
      for (int tag = 0; tag < kernels::kNumMemoryTags; ++tag) {
        if (peaks[tag] > 0) args[kernels::kMemoryTagNames[tag]] = (moments_[i].*pool).bytes[tag];
      }
      events_.AddCounter(kProcess, name, starts_[i], std::move(args));
    }
  }

  void AddNames() {
    events_.NameProcess(kProcess,
                        absl::StrCat("rank ", timeline_.rank, " of ", plan_.spec().name()));
    for (int track = kStep; track <= (timeline_.timed ? kCopies : kStep); ++track) {
      events_.NameThread(kProcess, track, kTrackNames[track]);
    }
  }

  Json About() const {
    const size_t peak = FullestOnDevice(moments_);
    return {{"job", plan_.spec().name()},
            {"context", plan_.spec().train().context()},
            {"device", plan_.device()},
            {"time", timeline_.timed ? "by the device description's rates"
                                     : "no rates: one second shared out by FLOPs"},
            {"peak_moment", NameOf(moments_[peak].at)},
            {"peak_bytes", moments_[peak].device.total_bytes},
            {"limit_bytes", plan_.budget().device_bytes()}};
  }

  const Timeline& timeline_;
  const std::vector<TimelineMoment>& moments_;
  const v1::RunPlan& plan_;
  std::vector<double> starts_;  // microseconds; one more for the end
  trace::TraceEvents events_;
};

}  // namespace

std::string PlanTrace(const Timeline& timeline, const v1::RunPlan& plan) {
  return Trace(timeline, plan).Render();
}

}  // namespace upipe::planner
