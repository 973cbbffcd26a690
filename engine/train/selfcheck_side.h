// One side of a self check on one rank: the short job's steps and probes on whatever device and
// communicator it is given, so that the dry run of a check is the check itself.
#pragma once

#include <functional>
#include <string>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "engine/train/short_job.h"
#include "engine/train/step.h"

namespace upipe::train {

// Told what a side computes, on the thread that runs it. Gradients are of the summed losses.
class SideWatch {
 public:
  virtual ~SideWatch() = default;
  // Of a part of the labels (WithLabelsOf) of the first sequences, at the first weights. Not kJob.
  virtual void OnLossPart(double loss) = 0;
  virtual void OnStep(const StepResult& result) = 0;
  // After step 1, which came before.
  virtual absl::Status OnGradients(const engine::RankContext& context,
                                   const model::ShardedParameters& parameters) = 0;
  // Losses and gradients with a probe's tokens as they were, then changed. kJob only.
  struct Probed {
    size_t probe = 0;
    bool changed = false;
    const optim::StepScalars::ByPosition& losses;
  };
  virtual absl::Status OnProbe(const Probed& probed, const engine::RankContext& context,
                               const model::ShardedParameters& parameters) = 0;
};

// Blocking, collective. Null watch: nothing is looked at and no value touched, as on a dry device.
absl::Status RunSide(const ShortJob& job, Side side, kernels::Device& device,
                     comm::Communicator& comm, SideWatch* watch);

// Calls visit(name of the tensor, first element of the shard, values) over a shard of this rank,
// wherever it lives, in parts of a few MiB. Blocking.
using VisitPart = std::function<void(const std::string&, int64_t, absl::Span<float>)>;
absl::Status ForEachPart(const engine::RankContext& context,
                         const model::ShardedParameters& parameters,
                         const kernels::TensorView& shard, const VisitPart& visit);

}  // namespace upipe::train
