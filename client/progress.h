// How a running job looks while it is watched: from the job and its step reports to lines of text.
// Pure.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "upipe/v1/job_service.pb.h"

namespace upipe::client {

class Progress {
 public:
  void Take(const v1::Job& job);
  void Take(const v1::StepReport& report);

  // Events that came since the last call, one sentence each.
  std::vector<std::string> TakeNewEvents();

  // One line: "step 12/60  loss 3.2145  held-out 3.3012 ..". Empty before the first report.
  std::string Line() const;

  // A block for a terminal `width` columns wide, no line longer: heading with a bar, loss, speed,
  // memory by category.
  std::vector<std::string> Block(size_t width) const;

  // What is left at the recent pace; infinite before the first report.
  absl::Duration TimeLeft() const;

  const v1::Job& job() const { return job_; }

 private:
  int FirstNewEvent() const;
  std::string Heading(size_t width) const;
  // Restarts and the last checkpoint, in one line; empty before either.
  std::string Course() const;
  void AppendMemory(size_t width, std::vector<std::string>& lines) const;

  v1::Job job_;
  std::optional<v1::StepReport> report_;
  std::optional<double> held_out_loss_;
  int64_t held_out_step_ = 0;
  double seconds_per_step_ = 0;             // exponential mean over about ten steps
  std::optional<v1::JobEvent> last_event_;  // told
};

}  // namespace upipe::client
