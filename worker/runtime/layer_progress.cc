#include "worker/runtime/layer_progress.h"

#include <algorithm>

#include "common/position_page.h"

namespace upipe::worker {

LayerProgress::LayerProgress(const v1::RunPlan& plan)
    : layers_(plan.spec().model().num_layers()),
      group_(std::max(1, plan.spec().memory().checkpoint_stride())) {}

int64_t LayerProgress::DoneAt(const v1::RankPosition& position) {
  const std::string& pass = position.pass();
  const int64_t layer = std::clamp<int64_t>(position.layer(), 0, layers_);
  if (pass == NameOf(StepPass::kForward)) {
    done_ = layer;
  } else if (pass == NameOf(StepPass::kLoss)) {
    done_ = layers_;
  } else if (pass == NameOf(StepPass::kBackward)) {
    const int64_t last_of_group = std::min((layer / group_ + 1) * group_, layers_) - 1;
    done_ = 2 * layers_ - 1 - last_of_group;
  } else if (pass == NameOf(StepPass::kEmbed)) {  // before the first layer, and after the last one
    done_ = position.step() == step_ && done_ > layers_ ? layers() : 0;
  } else if (pass == NameOf(StepPass::kIdle) || pass == NameOf(StepPass::kStarting) ||
             pass == NameOf(StepPass::kRestoring)) {
    done_ = 0;
  } else {
    done_ = layers();
  }
  step_ = position.step();
  return done_;
}

}  // namespace upipe::worker
