// Chrome trace-event JSON, which Perfetto and chrome://tracing open: the one writer of the format,
// for planned steps (planner/plan_trace.h) and measured ones (step_trace.h).
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

namespace upipe::trace {

// Events are written in the order of time; of equal times, in the order they were added, so that
// what encloses a slice is added before it. Times are microseconds, to the nanosecond, and not
// negative.
class TraceEvents {
 public:
  using Args = nlohmann::ordered_json;

  void NameProcess(int process, const std::string& name);
  // Threads are shown in the order of their numbers.
  void NameThread(int process, int thread, const std::string& name);
  // Ends before it begins: has no length.
  void AddSlice(int process, int thread, std::string name, double from, double to,
                Args args = Args::object());
  // From then on; each member of `values` is a track of its own.
  void AddCounter(int process, std::string name, double at, Args values);

  // `about` is an object of what the trace is of. Once.
  std::string Render(const Args& about);

 private:
  std::vector<std::string> names_;
  std::vector<std::pair<double, std::string>> events_;
};

// Microseconds, to the nanosecond.
double Rounded(double microseconds);

}  // namespace upipe::trace
