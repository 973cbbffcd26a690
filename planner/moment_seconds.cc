#include "planner/moment_seconds.h"

#include <utility>

#include "common/status.h"
#include "planner/step_time.h"

namespace upipe::planner {
namespace {

// What is left of counts when only copies, or all but copies, are kept.
kernels::DryCounts OnlyCopies(const kernels::DryCounts& counts) {
  kernels::DryCounts copies;
  copies.copies_to_host = counts.copies_to_host;
  copies.bytes_to_host = counts.bytes_to_host;
  copies.copies_from_host = counts.copies_from_host;
  copies.bytes_from_host = counts.bytes_from_host;
  return copies;
}
kernels::DryCounts WithoutCopies(kernels::DryCounts counts) {
  counts.AddTimes(OnlyCopies(counts), -1);
  return counts;
}

}  // namespace

PriceMoment PriceBy(const v1::RunPlan& plan, const v1::DeviceFile& device) {
  return [shape = StepShape::From(plan),
          device](const MomentWork& work) -> absl::StatusOr<MomentSeconds> {
    const auto seconds = [&](SectionCounts counts) -> absl::StatusOr<double> {
      StepCounts step;
      step.sections[{work.at.pass, work.at.stage >= 0}] = std::move(counts);
      UPIPE_ASSIGN_OR_RETURN(const v1::StepTime time, TimeStep(step, shape, device));
      return time.seconds();
    };
    MomentSeconds result;
    UPIPE_ASSIGN_OR_RETURN(result.elapsed, seconds(work.counts));
    UPIPE_ASSIGN_OR_RETURN(result.compute, seconds({.ops = WithoutCopies(work.counts.ops)}));
    UPIPE_ASSIGN_OR_RETURN(result.exchange, seconds({.traffic = work.counts.traffic}));
    UPIPE_ASSIGN_OR_RETURN(result.copies, seconds({.ops = OnlyCopies(work.counts.ops)}));
    return result;
  };
}

}  // namespace upipe::planner
