#include "engine/rank_context.h"

#include "absl/strings/str_cat.h"
#include "common/status.h"

namespace upipe::engine {

absl::Status RankContext::Run(const kernels::OpParams& params) const {
  const int64_t bytes = device_.ops().WorkspaceBytes(params);
  if (bytes == 0) return device_.ops().Enqueue(params, {}, stream_);
  UPIPE_ASSIGN_OR_RETURN(kernels::Buffer scratch, Allocate(kernels::MemoryTag::kWorkspace, bytes));
  return device_.ops().Enqueue(params, {scratch.data(), bytes}, stream_);
}

void RankContext::Mark(int64_t step, StepPass pass, int layer, int stage) const {
  std::string moment = NameOf(pass);
  if (layer >= 0) absl::StrAppend(&moment, " layer ", layer);
  if (stage >= 0) absl::StrAppend(&moment, " stage ", stage);
  device_.allocator().set_moment(std::move(moment));
  if (position_ == nullptr) return;
  stream_.Submit([page = position_, step, pass, layer, stage](kernels::ExecContext&) {
    page->step.store(step, std::memory_order_relaxed);
    page->pass.store(static_cast<uint32_t>(pass), std::memory_order_relaxed);
    page->layer.store(layer, std::memory_order_relaxed);
    page->stage.store(stage, std::memory_order_relaxed);
    page->sequence.fetch_add(1, std::memory_order_release);
    return absl::OkStatus();
  });
}

}  // namespace upipe::engine
