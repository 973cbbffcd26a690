// How many layers a step in work has behind it, out of where its rank is.
#pragma once

#include <cstdint>

#include "upipe/v1/plan.pb.h"
#include "upipe/v1/report.pb.h"

namespace upipe::worker {

class LayerProgress {
 public:
  LayerProgress() = default;
  explicit LayerProgress(const v1::RunPlan& plan);

  // Of both passes, of one micro-step.
  int64_t layers() const { return 2 * layers_; }
  // Never ahead: layers that are rebuilt together count when all of them are through.
  int64_t DoneAt(const v1::RankPosition& position);

 private:
  int64_t layers_ = 0;  // of the model
  int64_t group_ = 1;   // layers from one kept input to the next
  int64_t step_ = 0;    // of the position before
  int64_t done_ = 0;
};

}  // namespace upipe::worker
