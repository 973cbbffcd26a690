#include "engine/rank_context.h"

#include "absl/strings/str_cat.h"
#include "common/check.h"
#include "common/status.h"
#include "engine/step_clock.h"

namespace upipe::engine {

std::string NameOf(const Moment& moment) {
  std::string name = NameOf(moment.pass);
  if (moment.layer >= 0) absl::StrAppend(&name, " layer ", moment.layer);
  if (moment.stage >= 0) absl::StrAppend(&name, " stage ", moment.stage);
  return name;
}

RankStreams RankStreams::Create(kernels::Device& device, int rank) {
  const auto create = [&](const char* name) {
    return device.CreateStream(absl::StrCat(name, rank));
  };
  return {.compute = create("compute"),
          .side = create("side"),
          .ring = create("ring"),
          .copy = create("copy"),
          .host = device.CreateHostStream(absl::StrCat("host", rank)),
          .gather = create("gather")};
}

RankContext::RankContext(const RankContextParams& params)
    : params_(params),
      at_(params.mesh.Of(params.comm.rank())),
      stream_(params.streams.compute.get()) {
  UPIPE_CHECK(params.mesh.num_ranks() == params.comm.size())
      << "a mesh of " << params.mesh.num_ranks() << " ranks on a communicator of "
      << params.comm.size();
}

RankContext RankContext::On(kernels::Stream& stream) const {
  RankContext other = *this;
  other.stream_ = &stream;
  return other;
}

absl::Status RankContext::Run(const kernels::OpParams& params) const {
  const int64_t bytes = params_.device.ops().WorkspaceBytes(params);
  if (bytes == 0) return params_.device.ops().Enqueue(params, {}, *stream_);
  UPIPE_ASSIGN_OR_RETURN(kernels::Buffer scratch, Allocate(kernels::MemoryTag::kWorkspace, bytes));
  return params_.device.ops().Enqueue(params, {scratch.data(), bytes}, *stream_);
}

absl::Status RankContext::RunOnHost(const kernels::OpParams& params) const {
  kernels::Device& device = params_.device;
  kernels::Stream& stream = *params_.streams.host;
  const int64_t bytes = device.host_ops().WorkspaceBytes(params);
  if (bytes == 0) return device.host_ops().Enqueue(params, {}, stream);
  UPIPE_ASSIGN_OR_RETURN(
      kernels::Buffer scratch,
      device.host_allocator().Allocate(kernels::MemoryTag::kWorkspace, bytes, stream));
  return device.host_ops().Enqueue(params, {scratch.data(), bytes}, stream);
}

absl::Status RankContext::Settle() const {
  const RankStreams& streams = params_.streams;
  for (kernels::Stream* stream : {streams.compute.get(), streams.side.get(), streams.ring.get(),
                                  streams.copy.get(), streams.host.get(), streams.gather.get()}) {
    UPIPE_RETURN_IF_ERROR(stream->Synchronize());
  }
  params_.device.allocator().Settle();
  params_.device.host_allocator().Settle();
  return absl::OkStatus();
}

void RankContext::Mark(int64_t step, StepPass pass, int layer, int stage) const {
  const Moment moment = {pass, layer, stage};
  if (params_.observer != nullptr) params_.observer->Begin(moment);
  if (params_.clock != nullptr) params_.clock->set_moment(moment);
  params_.device.host_allocator().set_moment(NameOf(moment));
  params_.device.allocator().set_moment(NameOf(moment));
  if (params_.position == nullptr) return;
  stream_->Submit([page = params_.position, step, pass, layer, stage](kernels::ExecContext&) {
    page->step.store(step, std::memory_order_relaxed);
    page->pass.store(static_cast<uint32_t>(pass), std::memory_order_relaxed);
    page->layer.store(layer, std::memory_order_relaxed);
    page->stage.store(stage, std::memory_order_relaxed);
    page->sequence.fetch_add(1, std::memory_order_release);
    return absl::OkStatus();
  });
}

}  // namespace upipe::engine
