// What one step of a rank computes, copies and sends, by where in the step it does. Plain data:
// counts add up, so those of a long model can be made of shorter ones'.
#pragma once

#include <compare>
#include <map>

#include "common/position_page.h"
#include "engine/comm/dry/dry_traffic.h"
#include "kernels/dry/dry_counts.h"

namespace upipe::planner {

// A stretch of a step, as the engine marks it.
struct Section {
  StepPass pass = StepPass::kIdle;
  bool attention = false;  // the stages of an attention layer, the rest of the pass otherwise
  auto operator<=>(const Section&) const = default;
};

struct SectionCounts {
  kernels::DryCounts ops;
  comm::DryTraffic traffic;
};

struct StepCounts {
  std::map<Section, SectionCounts> sections;

  // Adds everything in `other` that many times, which may be negative: the whole of n layers is
  // that of two, and n - 2 times what the second added.
  void AddTimes(const StepCounts& other, int64_t times);
  // Of all sections.
  kernels::DryCounts ops() const;
  // Sections that count nothing are as good as absent.
  bool operator==(const StepCounts& other) const;
};

}  // namespace upipe::planner
