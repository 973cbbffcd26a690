#include "planner/step_counts.h"

namespace upipe::planner {

void StepCounts::AddTimes(const StepCounts& other, int64_t times) {
  for (const auto& [section, counts] : other.sections) {
    SectionCounts& sum = sections[section];
    sum.ops.AddTimes(counts.ops, times);
    sum.traffic.AddTimes(counts.traffic, times);
  }
}

kernels::DryCounts StepCounts::ops() const {
  kernels::DryCounts sum;
  for (const auto& [section, counts] : sections) sum.AddTimes(counts.ops, 1);
  return sum;
}

bool StepCounts::operator==(const StepCounts& other) const {
  StepCounts difference = *this;
  difference.AddTimes(other, -1);
  for (const auto& [section, counts] : difference.sections) {
    if (!(counts.ops == kernels::DryCounts()) || !(counts.traffic == comm::DryTraffic())) {
      return false;
    }
  }
  return true;
}

}  // namespace upipe::planner
