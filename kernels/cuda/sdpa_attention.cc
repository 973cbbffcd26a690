#include "kernels/cuda/sdpa_attention.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <map>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/rounding.h"
#include "common/status.h"
#include "kernels/cuda/attention_merge.h"
#include "kernels/cuda/sdpa_calls.h"
#include "kernels/cuda/sdpa_library.h"
#include "kernels/cuda/workspace_bytes.h"

namespace upipe::kernels {
namespace {

constexpr int64_t kScratchAlignment = 256;  // of what a library gets
static_assert(cuda::kCudnnFixedBytes % kScratchAlignment == 0);

// Of one head, the way to the next is nobody's; it must not make another key.
SdpaStrides StridesOf(const TensorView& view, int64_t heads, int64_t head_step = 1) {
  return {.head = heads > 1 ? view.stride[1] * head_step : view.shape[2], .row = view.stride[0]};
}

TensorView Heads(const TensorView& view, int64_t first, int64_t count) {
  TensorView part = view;
  part.data = view.At(0, first);
  part.shape[1] = count;
  return part;
}

// Rows [begin, end) of a [heads, rows].
TensorView Columns(const TensorView& lse, int64_t begin, int64_t end) {
  return TensorView::Matrix(lse.At(0, begin), lse.dtype, lse.shape[0], end - begin, lse.stride[0]);
}

// Ranges of rows that pieces cover, joined where they meet.
using Ranges = std::vector<std::pair<int64_t, int64_t>>;
Ranges Join(const std::vector<SdpaPiece>& pieces, bool keys) {
  Ranges ranges;
  for (const SdpaPiece& piece : pieces) {
    const int64_t begin = keys ? piece.key : piece.query;
    const int64_t end = keys ? piece.key_end : piece.query_end;
    if (!ranges.empty() && begin <= ranges.back().second) {
      ranges.back().second = std::max(ranges.back().second, end);
    } else {
      ranges.emplace_back(begin, end);
    }
  }
  return ranges;
}

// A call with the memory of its tensors. Of a dense one they begin at its rows, of a ragged one at
// the tensor's first.
template <typename Params>
SdpaBound Bind(const SdpaCall& call, const Params& p) {
  SdpaBound bound;
  SdpaPlanKey& key = bound.key;
  const SdpaHeads& heads = call.heads;
  const SdpaPiece& first = call.pieces[0];
  key.mask = call.mask;
  key.ragged = call.ragged;
  key.heads = heads.heads;
  key.kv_heads = static_cast<int64_t>(heads.kv_slots.size());
  key.head_dim = p.q.shape[2];
  key.scale = p.scale;
  key.q = StridesOf(p.q, key.heads);
  key.k = StridesOf(p.k, key.kv_heads, heads.slot_step());
  key.v = StridesOf(p.v, key.kv_heads, heads.slot_step());
  key.stats_head = key.heads > 1 ? p.lse.stride[0] : p.q.shape[0];
  int64_t query = 0, kv = 0;
  if (call.ragged) {
    key.total_queries = p.q.shape[0];
    key.total_keys = p.k.shape[0];
    // Where more is known to come, the plan is for that.
    const AttentionMask& mask = p.mask;
    int64_t queries = std::min(mask.document_length_max, key.total_queries);
    int64_t keys = std::min(mask.document_length_max, key.total_keys);
    for (const SdpaPiece& piece : call.pieces) {
      queries = std::max(queries, piece.queries());
      keys = std::max(keys, piece.keys());
    }
    const auto documents = static_cast<int64_t>(call.pieces.size());
    key.batch = SdpaBatch(std::max(documents, std::min(mask.documents_max, kSdpaDocumentsMax)));
    key.queries = SdpaLength(queries, key.total_queries);
    key.keys = SdpaLength(keys, key.total_keys);
  } else {
    key.queries = first.queries();
    key.keys = first.keys();
    query = first.query;
    kv = first.key;
  }
  bound[SdpaTensor::kQ] = p.q.At(query, heads.head);
  bound[SdpaTensor::kK] = p.k.At(kv, heads.kv_slots[0]);
  bound[SdpaTensor::kV] = p.v.At(kv, heads.kv_slots[0]);
  bound[SdpaTensor::kStats] = p.lse.At(heads.head, query);
  return bound;
}

// What a ragged call's plan reads beside the tensors: lengths of the pieces, and where each begins
// in every tensor, elements. On the host, then at `device`.
class Table {
 public:
  Table(const SdpaCall& call, SdpaBound& bound, char* device) : call_(call), device_(device) {
    const SdpaPlanKey& key = bound.key;
    std::vector<int32_t> queries(key.batch, 0), keys(key.batch, 0);
    for (size_t i = 0; i < call.pieces.size(); ++i) {
      queries[i] = static_cast<int32_t>(call.pieces[i].queries());
      keys[i] = static_cast<int32_t>(call.pieces[i].keys());
    }
    AddOffsets(bound, SdpaTensor::kQOffsets, key.q.row, /*of_keys=*/false);
    AddOffsets(bound, SdpaTensor::kOOffsets, key.o.row, false);
    AddOffsets(bound, SdpaTensor::kStatsOffsets, 1, false);
    AddOffsets(bound, SdpaTensor::kKOffsets, key.k.row, true);
    AddOffsets(bound, SdpaTensor::kVOffsets, key.v.row, true);
    if (key.backward) {
      AddOffsets(bound, SdpaTensor::kDoutOffsets, key.dout.row, false);
      AddOffsets(bound, SdpaTensor::kDqOffsets, key.dq.row, false);
      AddOffsets(bound, SdpaTensor::kDkOffsets, key.dk.row, true);
      AddOffsets(bound, SdpaTensor::kDvOffsets, key.dv.row, true);
    }
    bound[SdpaTensor::kQueryLengths] = Add(queries.data(), queries.size() * sizeof(int32_t));
    bound[SdpaTensor::kKeyLengths] = Add(keys.data(), keys.size() * sizeof(int32_t));
  }

  const std::vector<char>& bytes() const { return bytes_; }

 private:
  void* Add(const void* data, size_t bytes) {
    const size_t at = bytes_.size();
    bytes_.resize(at + bytes);
    std::memcpy(bytes_.data() + at, data, bytes);
    return device_ + at;
  }

  void AddOffsets(SdpaBound& bound, SdpaTensor tensor, int64_t row, bool of_keys) {
    std::vector<int64_t> offsets;
    for (const SdpaPiece& piece : call_.pieces) {
      offsets.push_back((of_keys ? piece.key : piece.query) * row);
    }
    const SdpaPiece& last = call_.pieces.back();
    offsets.resize(bound.key.batch + 1, (of_keys ? last.key_end : last.query_end) * row);
    bound[tensor] = Add(offsets.data(), offsets.size() * sizeof(int64_t));
  }

  const SdpaCall& call_;
  char* const device_;
  std::vector<char> bytes_;
};

// Scratch handed out from the front.
class Scratch {
 public:
  explicit Scratch(Workspace workspace)
      : next_(static_cast<char*>(workspace.data)), left_(workspace.size_bytes) {}
  void* Take(int64_t bytes) {
    void* taken = next_;
    next_ += bytes;
    left_ -= bytes;
    return taken;
  }
  Workspace rest() const { return {next_, std::max<int64_t>(left_, 0)}; }

 private:
  char* next_;
  int64_t left_;
};

// cuDNN's bf16 output, where it does not go into o itself.
int64_t OutputBytes(const AttentionFwdParams& p) {
  return p.o.dtype == DType::kFloat32 ? SizeOf(DType::kBFloat16) * p.q.num_elements() : 0;
}
int64_t LogSumExpBytes(const AttentionFwdParams& p) {
  return p.merge ? SizeOf(DType::kFloat32) * p.q.shape[0] * p.q.shape[1] : 0;
}

SdpaBound BindForward(const SdpaCall& call, const AttentionFwdParams& p, const TensorView& o,
                      const TensorView& lse) {
  AttentionFwdParams into = p;
  into.lse = lse;
  SdpaBound bound = Bind(call, into);
  bound.key.o = StridesOf(o, bound.key.heads);
  bound[SdpaTensor::kO] = o.At(call.ragged ? 0 : call.pieces[0].query, call.heads.head);
  return bound;
}

// Its bf16 gradients: dq of the call's query heads, dk and dv of its K/V heads, token by token.
struct Gradients {
  TensorView dq, dk, dv;
};

int64_t GradientBytes(const SdpaHeads& heads, const AttentionBwdParams& p) {
  const auto kv_heads = static_cast<int64_t>(heads.kv_slots.size());
  return SizeOf(DType::kBFloat16) * p.q.shape[2] *
         (heads.heads * p.q.shape[0] + 2 * kv_heads * p.k.shape[0]);
}

Gradients TakeGradients(const SdpaHeads& heads, const AttentionBwdParams& p, Scratch& scratch) {
  const auto take = [&](int64_t rows, int64_t count) {
    const int64_t dim = p.q.shape[2];
    void* data = scratch.Take(SizeOf(DType::kBFloat16) * rows * count * dim);
    return TensorView::Tensor3(data, DType::kBFloat16, {rows, count, dim}, count * dim, dim);
  };
  const auto kv_heads = static_cast<int64_t>(heads.kv_slots.size());
  Gradients gradients;
  gradients.dq = take(p.q.shape[0], heads.heads);
  gradients.dk = take(p.k.shape[0], kv_heads);
  gradients.dv = take(p.k.shape[0], kv_heads);
  return gradients;
}

SdpaBound BindBackward(const SdpaCall& call, const AttentionBwdParams& p,
                       const Gradients& gradients) {
  SdpaBound bound = Bind(call, p);
  const int64_t query = call.ragged ? 0 : call.pieces[0].query;
  const int64_t key = call.ragged ? 0 : call.pieces[0].key;
  bound.key.backward = true;
  bound.key.o = StridesOf(p.o, bound.key.heads);
  bound.key.dout = StridesOf(p.dout, bound.key.heads);
  bound.key.dq = StridesOf(gradients.dq, bound.key.heads);
  bound.key.dk = StridesOf(gradients.dk, bound.key.kv_heads);
  bound.key.dv = StridesOf(gradients.dv, bound.key.kv_heads);
  bound[SdpaTensor::kO] = p.o.At(query, call.heads.head);
  bound[SdpaTensor::kDout] = p.dout.At(query, call.heads.head);
  bound[SdpaTensor::kDq] = gradients.dq.At(query);
  bound[SdpaTensor::kDk] = gradients.dk.At(key);
  bound[SdpaTensor::kDv] = gradients.dv.At(key);
  return bound;
}

// Where cuDNN writes o and log-sum-exp: into ours, or beside an fp32 o.
struct Outputs {
  TensorView o, lse;
};

Outputs TakeOutputs(const AttentionFwdParams& p, Scratch& scratch) {
  Outputs outputs = {p.o, p.lse};
  if (p.o.dtype != DType::kFloat32) return outputs;
  const auto [rows, heads, dim] = p.q.shape;
  outputs.o = TensorView::Tensor3(scratch.Take(OutputBytes(p)), DType::kBFloat16, p.q.shape,
                                  heads * dim, dim);
  if (p.merge) {
    outputs.lse = TensorView::Matrix(scratch.Take(LogSumExpBytes(p)), DType::kFloat32, heads, rows);
  }
  return outputs;
}

// Brings rows of cuDNN's output into an fp32 o.
void Finish(const AttentionFwdParams& p, const Outputs& outputs, const SdpaCalls::Rows& rows,
            const cuda::LaunchContext& context) {
  const int64_t count = rows.end - rows.begin;
  const TensorView from = outputs.o.Rows(rows.begin, count);
  const TensorView to = p.o.Rows(rows.begin, count);
  if (!p.merge) return cuda::Run(StridedCopyParams{.src = from, .dst = to}, {}, context);
  cuda::Run(cuda::AttentionMergeParams{.part = from,
                                       .part_lse = Columns(outputs.lse, rows.begin, rows.end),
                                       .o = to,
                                       .lse = Columns(p.lse, rows.begin, rows.end)},
            context);
}

// Adds what one call gave to our fp32 gradients.
void Accumulate(const SdpaCall& call, const AttentionBwdParams& p, const Gradients& gradients,
                const cuda::LaunchContext& context) {
  const SdpaHeads& heads = call.heads;
  const auto kv_heads = static_cast<int64_t>(heads.kv_slots.size());
  const auto copy = [&](const TensorView& src, const TensorView& dst, bool accumulate) {
    cuda::Run(StridedCopyParams{.src = src, .dst = dst, .accumulate = accumulate}, {}, context);
  };
  for (const auto& [begin, end] : Join(call.pieces, /*keys=*/false)) {
    copy(gradients.dq.Rows(begin, end - begin),
         Heads(p.dq, heads.head, heads.heads).Rows(begin, end - begin), p.accumulate_dq);
  }
  for (const auto& [begin, end] : Join(call.pieces, /*keys=*/true)) {
    for (int64_t i = 0; i < kv_heads; ++i) {
      const int32_t slot = p.grad_slot[heads.head + i * (heads.heads / kv_heads)];
      copy(Heads(gradients.dk, i, 1).Rows(begin, end - begin),
           Heads(p.dk, slot, 1).Rows(begin, end - begin), true);
      copy(Heads(gradients.dv, i, 1).Rows(begin, end - begin),
           Heads(p.dv, slot, 1).Rows(begin, end - begin), true);
    }
  }
}

}  // namespace

absl::StatusOr<SdpaPlan*> SdpaAttention::PlanFor(const SdpaPlanKey& key) {
  std::unique_ptr<SdpaPlan>& plan = plans_[key];
  if (plan == nullptr) {
    UPIPE_ASSIGN_OR_RETURN(plan, library_->Make(key));
  }
  return plan.get();
}

absl::Status SdpaAttention::Execute(const SdpaCall& call, SdpaBound& bound, Workspace scratch,
                                    CudaStreamHandle stream) {
  UPIPE_ASSIGN_OR_RETURN(SdpaPlan * plan, PlanFor(bound.key));
  if (plan->workspace_bytes() > scratch.size_bytes) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "cuDNN's plan for this attention takes ", plan->workspace_bytes(), " bytes of scratch, ",
        scratch.size_bytes, " are planned; submit the job again"));
  }
  if (call.ragged) {
    UPIPE_ASSIGN_OR_RETURN(char* device, library_->TableOf(stream));
    const Table table(call, bound, device);
    UPIPE_RETURN_IF_ERROR(library_->Upload(table.bytes(), stream));
  }
  return plan->Execute(bound, scratch.data, stream);
}

absl::Status SdpaAttention::Run(const AttentionFwdParams& p, Workspace workspace,
                                const cuda::LaunchContext& context) {
  const SdpaCalls calls = SdpaCallsOf(p);
  Scratch scratch(workspace);
  const int64_t left = workspace.size_bytes - OutputBytes(p) - LogSumExpBytes(p);
  const int64_t library_bytes = left / kScratchAlignment * kScratchAlignment;
  const Workspace library = {scratch.Take(library_bytes), library_bytes};
  const Outputs outputs = TakeOutputs(p, scratch);
  for (const SdpaCall& call : calls.calls) {
    SdpaBound bound = BindForward(call, p, outputs.o, outputs.lse);
    UPIPE_RETURN_IF_ERROR(Execute(call, bound, library, context.stream));
  }
  for (const SdpaCalls::Rows& rows : calls.seeing) {
    if (p.o.dtype == DType::kFloat32) Finish(p, outputs, rows, context);
  }
  if (p.merge) return absl::OkStatus();
  for (const SdpaCalls::Rows& rows : calls.blind) {
    cuda::Run(FillParams{.dst = p.o.Rows(rows.begin, rows.end - rows.begin)}, {}, context);
    cuda::Run(FillParams{.dst = Columns(p.lse, rows.begin, rows.end),
                         .value = -std::numeric_limits<double>::infinity()},
              {}, context);
  }
  return absl::OkStatus();
}

absl::Status SdpaAttention::Run(const AttentionBwdParams& p, Workspace workspace,
                                const cuda::LaunchContext& context) {
  const SdpaCalls calls = SdpaCallsOf(p);
  for (const SdpaCall& call : calls.calls) {
    Scratch scratch(workspace);
    const Gradients gradients = TakeGradients(call.heads, p, scratch);
    SdpaBound bound = BindBackward(call, p, gradients);
    UPIPE_RETURN_IF_ERROR(Execute(call, bound, scratch.rest(), context.stream));
    Accumulate(call, p, gradients, context);
  }
  if (p.accumulate_dq) return absl::OkStatus();
  for (const SdpaCalls::Rows& rows : calls.blind) {
    cuda::Run(FillParams{.dst = p.dq.Rows(rows.begin, rows.end - rows.begin)}, {}, context);
  }
  return absl::OkStatus();
}

absl::StatusOr<int64_t> SdpaAttention::ScratchBytes(const AttentionFwdParams& p) {
  // Ours to use, and more than any forward plan takes.
  int64_t most = cuda::kCudnnFixedBytes;
  Scratch nowhere({});
  const Outputs outputs = TakeOutputs(p, nowhere);
  for (const SdpaCall& call : SdpaCallsOf(p).calls) {
    UPIPE_ASSIGN_OR_RETURN(const SdpaPlan* plan,
                           PlanFor(BindForward(call, p, outputs.o, outputs.lse).key));
    most = std::max(most, plan->workspace_bytes());
  }
  return RoundUp(most, kScratchAlignment) + OutputBytes(p) + LogSumExpBytes(p);
}

absl::StatusOr<int64_t> SdpaAttention::ScratchBytes(const AttentionBwdParams& p) {
  int64_t most = 0;
  for (const SdpaCall& call : SdpaCallsOf(p).calls) {
    Scratch nowhere({});
    const Gradients gradients = TakeGradients(call.heads, p, nowhere);
    UPIPE_ASSIGN_OR_RETURN(const SdpaPlan* plan, PlanFor(BindBackward(call, p, gradients).key));
    most = std::max(most, GradientBytes(call.heads, p) + plan->workspace_bytes());
  }
  return most;
}

}  // namespace upipe::kernels
