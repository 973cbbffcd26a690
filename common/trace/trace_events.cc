#include "common/trace/trace_events.h"

#include <algorithm>
#include <cmath>

namespace upipe::trace {
namespace {

using Json = TraceEvents::Args;

// On one line; text that is no UTF-8 is mended.
std::string Line(const Json& json) {
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

Json Naming(const char* kind, int process, int thread, Json args) {
  return {
      {"name", kind}, {"ph", "M"}, {"pid", process}, {"tid", thread}, {"args", std::move(args)}};
}

}  // namespace

double Rounded(double microseconds) { return std::round(microseconds * 1e3) / 1e3; }

void TraceEvents::NameProcess(int process, const std::string& name) {
  names_.push_back(Line(Naming("process_name", process, 0, {{"name", name}})));
}

void TraceEvents::NameThread(int process, int thread, const std::string& name) {
  names_.push_back(Line(Naming("thread_name", process, thread, {{"name", name}})));
  names_.push_back(Line(Naming("thread_sort_index", process, thread, {{"sort_index", thread}})));
}

void TraceEvents::AddSlice(int process, int thread, std::string name, double from, double to,
                           Args args) {
  const double begin = Rounded(from);
  events_.emplace_back(begin, Line({{"name", std::move(name)},
                                    {"ph", "X"},
                                    {"pid", process},
                                    {"tid", thread},
                                    {"ts", begin},
                                    {"dur", Rounded(std::max(0.0, Rounded(to) - begin))},
                                    {"args", std::move(args)}}));
}

void TraceEvents::AddCounter(int process, std::string name, double at, Args values) {
  const double begin = Rounded(at);
  events_.emplace_back(begin, Line({{"name", std::move(name)},
                                    {"ph", "C"},
                                    {"pid", process},
                                    {"ts", begin},
                                    {"args", std::move(values)}}));
}

std::string TraceEvents::Render(const Args& about) {
  std::stable_sort(events_.begin(), events_.end(),
                   [](const auto& a, const auto& b) { return a.first < b.first; });
  std::string out =
      "{\"displayTimeUnit\": \"ms\", \"otherData\": " + Line(about) + ", \"traceEvents\": [\n";
  const char* between = "";
  for (const std::string& name : names_) {
    out.append(between).append(name);
    between = ",\n";
  }
  for (const auto& [at, event] : events_) {
    out.append(between).append(event);
    between = ",\n";
  }
  return out + "\n]}\n";
}

}  // namespace upipe::trace
