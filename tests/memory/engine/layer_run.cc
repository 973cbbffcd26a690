#include "tests/memory/engine/layer_run.h"

#include <set>
#include <utility>
#include <variant>

#include "common/status.h"
#include "engine/attention/head_chunk_attention.h"
#include "engine/comm/dry/dry_communicator.h"
#include "engine/model/mlp.h"
#include "kernels/device_factory.h"

namespace upipe::testing {

using kernels::DType;
using kernels::MemoryTag;
using kernels::TensorView;

namespace {

class AttentionScratch : public kernels::OpTable {
 public:
  absl::Status Enqueue(const kernels::OpParams&, kernels::Workspace, kernels::Stream&) override {
    return absl::UnimplementedError("ops of a dry device are not run");
  }
};

class OwnKernel final : public AttentionScratch {
 public:
  int64_t WorkspaceBytes(const kernels::OpParams& params) const override {
    const bool attends = std::holds_alternative<kernels::AttentionFwdParams>(params) ||
                         std::holds_alternative<kernels::AttentionBwdParams>(params);
    return attends ? cpu_->ops().WorkspaceBytes(params) : 0;
  }

 private:
  std::unique_ptr<kernels::DryDevice> cpu_ = *kernels::CreateDryDevice("cpu");
};

// Writes dq, dk and dv of a call in the storage type, to be added to the fp32 sums; reads O.
class CudnnKernel final : public AttentionScratch {
 public:
  int64_t WorkspaceBytes(const kernels::OpParams& params) const override {
    const auto* p = std::get_if<kernels::AttentionBwdParams>(&params);
    if (p == nullptr) return 0;
    const std::set<int32_t> kv_heads(p->kv_slot.begin(), p->kv_slot.end());
    return p->q.num_bytes() + static_cast<int64_t>(kv_heads.size()) *
                                  (p->k.num_bytes() + p->v.num_bytes()) / p->k.shape[1];
  }
  bool AttentionBwdReadsOutput() const override { return true; }
};

// Tensors nobody reads or writes, beside each other.
class NoMemory {
 public:
  TensorView Matrix(DType dtype, int64_t rows, int64_t columns) {
    return TensorView::Matrix(Take(rows * columns * SizeOf(dtype)), dtype, rows, columns);
  }
  TensorView Vector(DType dtype, int64_t n) {
    return TensorView::Vector(Take(n * SizeOf(dtype)), dtype, n);
  }

 private:
  void* Take(int64_t bytes) {
    void* taken = reinterpret_cast<void*>(next_);
    next_ += bytes;
    return taken;
  }
  uintptr_t next_ = uintptr_t{1} << 59;
};

struct LayerWeights {
  attention::AttentionWeights attention;
  model::MlpWeights mlp;
};

LayerWeights WeightsOf(const Point& p, DType dtype, NoMemory& memory) {
  const int64_t d = p.hidden_size, f = p.intermediate_size;
  const int64_t q = p.num_heads * p.head_dim, kv = p.num_kv_heads * p.head_dim;
  return {.attention = {.norm = memory.Vector(dtype, d),
                        .wq = memory.Matrix(dtype, q, d),
                        .wk = memory.Matrix(dtype, kv, d),
                        .wv = memory.Matrix(dtype, kv, d),
                        .wo = memory.Matrix(dtype, d, q)},
          .mlp = {.norm = memory.Vector(dtype, d),
                  .gate = memory.Matrix(dtype, f, d),
                  .up = memory.Matrix(dtype, f, d),
                  .down = memory.Matrix(dtype, d, f)}};
}

absl::StatusOr<v1::HeadChunkSchedule> ScheduleOf(const Point& p) {
  return parallel::MakeHeadChunkSchedule({.num_heads = p.num_heads,
                                          .num_kv_heads = p.num_kv_heads,
                                          .ulysses_ranks = p.ulysses_ranks,
                                          .heads_per_rank = p.u(),
                                          .ring_ranks = p.ring_ranks,
                                          .query_chunks = p.query_chunks,
                                          .overlap = p.policy.overlap});
}

// Peaks of what runs between Begin and End.
class Watch {
 public:
  explicit Watch(kernels::Device& device) : device_(device) {}
  void Begin() {
    device_.allocator().ResetPeaks();
    device_.host_allocator().ResetPeaks();
  }
  PassMemory End() const { return {device_.allocator().stats(), device_.host_allocator().stats()}; }

 private:
  kernels::Device& device_;
};

}  // namespace

std::unique_ptr<kernels::OpTable> OwnAttentionKernel() { return std::make_unique<OwnKernel>(); }
std::unique_ptr<kernels::OpTable> CudnnAttentionKernel() { return std::make_unique<CudnnKernel>(); }

absl::StatusOr<LayerMemory> RunLayerDry(const Point& p, int rank,
                                        std::unique_ptr<kernels::OpTable> kernel) {
  constexpr float kEps = 1e-5f;
  kernels::DryDevice device("layer", std::move(kernel));
  comm::DryCommunicator comm(rank, p.ranks());
  const engine::RankStreams streams = engine::RankStreams::Create(device, rank);
  const engine::RankContext context(
      {.device = device,
       .streams = streams,
       .comm = comm,
       .storage = p.StoredType(),
       .mesh = {.ring_ranks = p.ring_ranks, .ulysses_ranks = p.ulysses_ranks}});
  UPIPE_ASSIGN_OR_RETURN(const v1::HeadChunkSchedule schedule, ScheduleOf(p));
  const auto tokens = parallel::TokenMap::Make({.context = p.context,
                                                .ulysses_ranks = p.ulysses_ranks,
                                                .ring_ranks = p.ring_ranks,
                                                .query_chunks = p.query_chunks});
  const attention::HeadChunkAttention attention(context, {.schedule = &schedule,
                                                          .tokens = tokens,
                                                          .policy = p.policy,
                                                          .hidden_size = p.hidden_size,
                                                          .head_dim = p.head_dim});
  NoMemory nowhere;
  const attention::Sequence sequence{.positions = nowhere.Vector(DType::kInt64, p.N()),
                                     .mask = tokens.Mask(/*causal=*/true, {}, {0})};
  const LayerWeights weights = WeightsOf(p, p.StoredType(), nowhere);
  const LayerWeights gradients = WeightsOf(p, DType::kFloat32, nowhere);
  const auto hidden = [&](engine::Place place) {
    return engine::TokenTensor::Allocate(
        context, place, MemoryTag::kResidual,
        {.tokens = p.N(), .columns = p.hidden_size, .dtype = p.StoredType()});
  };
  LayerMemory memory;
  Watch watch(device);
  UPIPE_ASSIGN_OR_RETURN(const engine::TokenTensor stream, hidden(p.policy.hidden_stream));
  watch.Begin();
  UPIPE_ASSIGN_OR_RETURN(attention::AttentionOutput output,
                         attention.Forward(stream, weights.attention, sequence, {}));
  UPIPE_RETURN_IF_ERROR(
      model::MlpForward(context, {.x = stream, .out = output.out, .wo = weights.attention.wo},
                        weights.mlp, kEps, stream));
  memory.forward = watch.End();
  UPIPE_ASSIGN_OR_RETURN(const engine::TokenTensor input, hidden(p.policy.layer_inputs));
  watch.Begin();
  UPIPE_RETURN_IF_ERROR(model::MlpBackward(
      context, {.x = input, .out = output.out, .wo = weights.attention.wo}, weights.mlp, kEps,
      stream, {.mlp = gradients.mlp, .wo = gradients.attention.wo}));
  memory.mlp_backward = watch.End();
  watch.Begin();
  UPIPE_RETURN_IF_ERROR(attention.Backward(input, stream, weights.attention, gradients.attention,
                                           std::move(output), sequence, {}));
  memory.attention_backward = watch.End();
  memory.counts = device.counts();
  for (int64_t bytes : comm.stats().bytes_sent_to_peer) memory.bytes_sent += bytes;
  return memory;
}

}  // namespace upipe::testing
