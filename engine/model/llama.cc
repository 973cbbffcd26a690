#include "engine/model/llama.h"

#include <algorithm>
#include <utility>

#include "common/status.h"
#include "engine/model/mlp.h"
#include "engine/step_clock.h"

namespace upipe::model {

using attention::AttentionOutput;
using attention::kTokenTile;
using engine::AllColumns;
using engine::Place;
using engine::StageName;
using engine::TileUse;
using engine::Timed;
using engine::TokenTensor;
using kernels::Buffer;
using kernels::DType;
using kernels::MatmulParams;
using kernels::MemoryTag;
using kernels::TensorView;

namespace {

constexpr char kEmbedding[] = "embed_tokens.weight";
constexpr char kFinalNorm[] = "model.norm.weight";

attention::AttentionLayerParams LayerParams(const LlamaParams& params) {
  return {.schedule = params.schedule,
          .tokens = params.tokens,
          .policy = params.policy,
          .hidden_size = params.config.hidden_size,
          .head_dim = params.config.head_dim,
          .rms_norm_eps = params.config.rms_norm_eps,
          .rope = params.config.rope};
}

}  // namespace

LlamaModel::LlamaModel(const engine::RankContext& context, const LlamaParams& params,
                       ShardedParameters& parameters)
    : context_(context),
      params_(params),
      runs_(params.tokens.RunsOf(context.mesh().ContextRank(context.rank()))),
      parameters_(parameters),
      attention_(context, LayerParams(params)) {}

attention::AttentionWeights LlamaModel::AttentionOf(const GatheredUnit& block) const {
  const auto when = [&](bool has, const char* name) {
    return has ? block.Tensor(name) : TensorView();
  };
  const ModelConfig& config = params_.config;
  return {.norm = block.Tensor("input_layernorm.weight"),
          .wq = block.Tensor("q_proj.weight"),
          .wk = block.Tensor("k_proj.weight"),
          .wv = block.Tensor("v_proj.weight"),
          .wo = block.Tensor("o_proj.weight"),
          .bq = when(config.qkv_bias, "q_proj.bias"),
          .bk = when(config.qkv_bias, "k_proj.bias"),
          .bv = when(config.qkv_bias, "v_proj.bias"),
          .q_norm = when(config.qk_norm, "q_norm.weight"),
          .k_norm = when(config.qk_norm, "k_norm.weight")};
}

MlpWeights LlamaModel::MlpOf(const GatheredUnit& block) const {
  return {.norm = block.Tensor("post_attention_layernorm.weight"),
          .gate = block.Tensor("gate_proj.weight"),
          .up = block.Tensor("up_proj.weight"),
          .down = block.Tensor("down_proj.weight")};
}

absl::StatusOr<TokenTensor> LlamaModel::AllocateHidden(Place place) const {
  return TokenTensor::Allocate(context_, place, MemoryTag::kResidual,
                               {.tokens = params_.tokens.tokens_per_rank,
                                .columns = params_.config.hidden_size,
                                .dtype = context_.storage()});
}

std::optional<AttentionOutput>* LlamaModel::KeptAttention(LayerInput& input) const {
  const bool keeps =
      params_.policy.attention_output != engine::MemoryPolicy::AttentionOutput::kRecompute;
  return keeps ? &input.attention : nullptr;
}

const ParameterUnit& LlamaModel::UnitAfterForward(int layer) const {
  const ParameterLayout& layout = parameters_.layout();
  return layer + 1 < params_.config.num_layers ? layout.blocks[layer + 1] : layout.HeadUnit();
}

const ParameterUnit* LlamaModel::UnitAfterBackward(int layer) const {
  if (layer == 0) return nullptr;
  // Before a segment goes backward its inputs are rebuilt from the first on.
  return &parameters_.layout().blocks[KeepsInput(layer) ? FirstOfSegment(layer - 1) : layer - 1];
}

absl::Status LlamaModel::ForwardBackward(const Batch& batch, int64_t step) {
  UPIPE_ASSIGN_OR_RETURN(TokenTensor stream, Embed(batch));
  const int layers = static_cast<int>(params_.config.num_layers);
  std::vector<LayerInput> inputs(layers);
  for (int layer = 0; layer < layers; ++layer) {
    UPIPE_RETURN_IF_ERROR(
        ForwardLayer(batch, {step, StepPass::kForward, layer}, stream, inputs[layer]));
  }
  context_.Mark(step, StepPass::kLoss, -1, -1);
  UPIPE_RETURN_IF_ERROR(Loss(batch, stream, /*write_gradient=*/true, {}));
  const TokenTensor& dx = stream;  // it carries the gradient from here on
  while (!inputs.empty()) {
    const int first = FirstOfSegment(static_cast<int>(inputs.size()) - 1);
    UPIPE_RETURN_IF_ERROR(
        BackwardSegment(batch, step, absl::MakeSpan(inputs).subspan(first), first, dx));
    inputs.resize(first);
  }
  context_.Mark(step, StepPass::kEmbed, -1, -1);
  return EmbedBackward(batch, dx);
}

absl::Status LlamaModel::Evaluate(const Batch& batch, int64_t step, const TensorView& logits) {
  UPIPE_ASSIGN_OR_RETURN(const TokenTensor x, Embed(batch));
  for (int layer = 0; layer < params_.config.num_layers; ++layer) {
    UPIPE_RETURN_IF_ERROR(BlockForward(batch, {.where = {step, StepPass::kEvaluate, layer},
                                               .x = x,
                                               .y = x,
                                               .next = UnitAfterForward(layer)}));
  }
  context_.Mark(step, StepPass::kEvaluate, -1, -1);
  return Loss(batch, x, /*write_gradient=*/false, logits);
}

absl::StatusOr<TokenTensor> LlamaModel::Embed(const Batch& batch) {
  UPIPE_ASSIGN_OR_RETURN(TokenTensor stream, AllocateHidden(params_.policy.hidden_stream));
  UPIPE_ASSIGN_OR_RETURN(const GatheredUnit embedding,
                         parameters_.Gather(parameters_.layout().embedding));
  UPIPE_RETURN_IF_ERROR(parameters_.Prefetch(parameters_.layout().blocks[0]));
  const Timed timed_embedding(context_, StageName::kEmbedding);
  UPIPE_RETURN_IF_ERROR(ForEachTile(
      context_, {.end = params_.tokens.tokens_per_rank, .tile_rows = kTokenTile},
      {AllColumns(stream, TileUse::kWrite)},
      [&](int64_t begin, int64_t rows, absl::Span<const TensorView> tiles) {
        return context_.Run(kernels::EmbeddingFwdParams{.tokens = batch.tokens.Rows(begin, rows),
                                                        .table = embedding.Tensor(kEmbedding),
                                                        .out = tiles[0]});
      }));
  return stream;
}

absl::Status LlamaModel::ForwardLayer(const Batch& batch, const attention::Where& where,
                                      TokenTensor& stream, LayerInput& input) {
  const engine::MemoryPolicy& policy = params_.policy;
  const bool keeps = KeepsInput(where.layer);
  // The stream itself is the layer input where both live in one place, and goes on in new memory.
  const bool keeps_stream = keeps && policy.layer_inputs == policy.hidden_stream;
  if (keeps) {
    TokenTensor& made = keeps_stream ? stream : input.x;
    if (keeps_stream) input.x = std::move(stream);
    UPIPE_ASSIGN_OR_RETURN(made, AllocateHidden(policy.layer_inputs));
  }
  return BlockForward(batch, {.where = where,
                              .x = keeps_stream ? input.x : stream,
                              .y = stream,
                              .next = UnitAfterForward(where.layer),
                              .copy = keeps && !keeps_stream ? &input.x : nullptr,
                              .attention = KeptAttention(input)});
}

absl::Status LlamaModel::BackwardSegment(const Batch& batch, int64_t step,
                                         absl::Span<LayerInput> segment, int first_layer,
                                         const TokenTensor& dy) {
  for (size_t i = 0; i + 1 < segment.size(); ++i) {
    const int layer = first_layer + static_cast<int>(i);
    UPIPE_ASSIGN_OR_RETURN(segment[i + 1].x, AllocateHidden(params_.policy.layer_inputs));
    UPIPE_RETURN_IF_ERROR(BlockForward(batch, {.where = {step, StepPass::kBackward, layer},
                                               .x = segment[i].x,
                                               .y = segment[i + 1].x,
                                               .next = UnitAfterForward(layer),
                                               .attention = KeptAttention(segment[i])}));
  }
  for (size_t i = segment.size(); i-- > 0;) {
    const int layer = first_layer + static_cast<int>(i);
    UPIPE_RETURN_IF_ERROR(BlockBackward(batch, {step, StepPass::kBackward, layer},
                                        std::exchange(segment[i], {}), dy));
  }
  return absl::OkStatus();
}

absl::Status LlamaModel::BlockForward(const Batch& batch, const BlockRun& run) {
  kernels::Event copied;
  if (run.copy != nullptr) {
    UPIPE_ASSIGN_OR_RETURN(copied, CopyTokens(context_, run.x, *run.copy));
  }
  UPIPE_ASSIGN_OR_RETURN(const GatheredUnit block,
                         parameters_.Gather(parameters_.layout().blocks[run.where.layer]));
  const attention::AttentionWeights weights = AttentionOf(block);
  const bool known = run.attention != nullptr && run.attention->has_value();
  AttentionOutput made;
  if (!known) {
    UPIPE_ASSIGN_OR_RETURN(made, attention_.Forward(run.x, weights, batch.sequence, run.where));
  }
  context_.Mark(run.where.step, run.where.pass, run.where.layer, -1);
  // From here to the next block's first exchange the ranks have nothing else to send.
  UPIPE_RETURN_IF_ERROR(parameters_.Prefetch(run.next));
  const bool keeps = run.attention != nullptr && !known;
  LeavingAttention leaving;
  if (keeps && params_.policy.attention_output == engine::MemoryPolicy::AttentionOutput::kHost) {
    UPIPE_ASSIGN_OR_RETURN(leaving, LeaveForHost(made));
  }
  context_.stream().Wait(copied);  // y may be x
  UPIPE_RETURN_IF_ERROR(MlpForward(
      context_, {.x = run.x, .out = known ? (*run.attention)->out : made.out, .wo = weights.wo},
      MlpOf(block), params_.config.rms_norm_eps, run.y));
  if (!keeps) return absl::OkStatus();
  if (leaving.host.lse) {
    context_.stream().Wait(leaving.done);
    if (!leaving.host.out.present()) leaving.host.out = std::move(made.out);
    made = std::move(leaving.host);
  }
  *run.attention = std::move(made);
  return absl::OkStatus();
}

absl::StatusOr<LlamaModel::LeavingAttention> LlamaModel::LeaveForHost(
    const AttentionOutput& output) const {
  LeavingAttention leaving;
  UPIPE_ASSIGN_OR_RETURN(leaving.host.lse,
                         context_.AllocateHost(MemoryTag::kAttnOut, output.lse.size_bytes()));
  if (!output.out.on_host()) {
    const TensorView& out = output.out.view();
    UPIPE_ASSIGN_OR_RETURN(
        leaving.host.out,
        TokenTensor::Allocate(
            context_, Place::kHost, MemoryTag::kAttnOut,
            {.tokens = out.shape[0], .columns = out.shape[1], .dtype = out.dtype}));
    UPIPE_RETURN_IF_ERROR(CopyTokens(context_, output.out, leaving.host.out).status());
  }
  kernels::Stream& copy = *context_.streams().copy;
  copy.Wait(context_.stream().Record());
  const Timed offload(context_.On(copy), StageName::kOffload);
  context_.device().CopyToHost(leaving.host.lse.data(), output.lse.data(), output.lse.size_bytes(),
                               copy);
  leaving.done = copy.Record();
  return leaving;
}

absl::StatusOr<AttentionOutput> LlamaModel::FetchFromHost(AttentionOutput kept) const {
  AttentionOutput output;
  UPIPE_ASSIGN_OR_RETURN(output.lse, context_.Allocate(MemoryTag::kAttnOut, kept.lse.size_bytes()));
  if (params_.policy.hidden_stream == Place::kHost) {
    output.out = std::move(kept.out);
  } else {
    const TensorView& out = kept.out.view();
    UPIPE_ASSIGN_OR_RETURN(
        output.out, TokenTensor::Allocate(
                        context_, Place::kDevice, MemoryTag::kAttnOut,
                        {.tokens = out.shape[0], .columns = out.shape[1], .dtype = out.dtype}));
    UPIPE_RETURN_IF_ERROR(CopyTokens(context_, kept.out, output.out).status());
  }
  kernels::Stream& copy = *context_.streams().copy;
  copy.Wait(context_.stream().Record());
  const Timed offload(context_.On(copy), StageName::kOffload);
  context_.device().CopyFromHost(output.lse.data(), kept.lse.data(), kept.lse.size_bytes(), copy);
  context_.stream().Wait(copy.Record());
  return output;
}

absl::Status LlamaModel::BlockBackward(const Batch& batch, const attention::Where& where,
                                       LayerInput input, const TokenTensor& dy) {
  const bool kept = input.attention.has_value();
  if (kept && params_.policy.attention_output == engine::MemoryPolicy::AttentionOutput::kHost) {
    UPIPE_ASSIGN_OR_RETURN(input.attention, FetchFromHost(*std::move(input.attention)));
  }
  UPIPE_ASSIGN_OR_RETURN(GatheredUnit block,
                         parameters_.Gather(parameters_.layout().blocks[where.layer]));
  UPIPE_ASSIGN_OR_RETURN(GatheredUnit gradient, parameters_.BeginGradient(*block.unit));
  const attention::AttentionWeights weights = AttentionOf(block);
  const attention::AttentionGradients gradients = AttentionOf(gradient);
  if (!kept) {
    UPIPE_ASSIGN_OR_RETURN(input.attention,
                           attention_.Forward(input.x, weights, batch.sequence, where));
  }
  context_.Mark(where.step, where.pass, where.layer, -1);
  if (const ParameterUnit* next = UnitAfterBackward(where.layer); next != nullptr) {
    UPIPE_RETURN_IF_ERROR(parameters_.Prefetch(*next));
  }
  UPIPE_RETURN_IF_ERROR(MlpBackward(
      context_, {.x = input.x, .out = input.attention->out, .wo = weights.wo}, MlpOf(block),
      params_.config.rms_norm_eps, dy, {.mlp = MlpOf(gradient), .wo = gradients.wo}));
  UPIPE_RETURN_IF_ERROR(attention_.Backward(input.x, dy, weights, gradients,
                                            *std::move(input.attention), batch.sequence, where));
  block = {};
  return parameters_.ReduceGradient(std::move(gradient));
}

absl::Status LlamaModel::Loss(const Batch& batch, const TokenTensor& x, bool write_gradient,
                              const TensorView& logits_out) {
  const ParameterUnit& unit = parameters_.layout().HeadUnit();
  UPIPE_ASSIGN_OR_RETURN(GatheredUnit head, parameters_.Gather(unit));
  GatheredUnit gradient;
  if (write_gradient) {
    const int first = FirstOfSegment(static_cast<int>(params_.config.num_layers) - 1);
    UPIPE_RETURN_IF_ERROR(parameters_.Prefetch(parameters_.layout().blocks[first]));
    UPIPE_ASSIGN_OR_RETURN(gradient, parameters_.BeginGradient(unit));
  }
  const Timed timed_loss(context_, StageName::kLoss);
  const auto range_loss = [&](int range, int64_t begin, int64_t end) {
    const auto loss_and_count =
        TensorView::Vector(batch.loss_and_count.At(range), DType::kFloat64, 2);
    return ForEachTile(
        context_, {.begin = begin, .end = end, .tile_rows = kTokenTile},
        {AllColumns(x, write_gradient ? TileUse::kReadWrite : TileUse::kRead)},
        [&](int64_t tile_begin, int64_t rows, absl::Span<const TensorView> tiles) {
          return LossTile({.tokens = batch.tokens.Rows(tile_begin, rows),
                           .labels = batch.labels.Rows(tile_begin, rows),
                           .loss_and_count = loss_and_count},
                          tiles[0], head, write_gradient ? &gradient : nullptr,
                          logits_out.present() ? logits_out.Rows(tile_begin, rows) : TensorView());
        });
  };
  int64_t begin = 0;
  for (const kernels::PositionRun& run : runs_) {
    for (int64_t position = run.begin; position < run.end;) {
      const int range = PositionRangeOf(position);
      const int64_t count = std::min(run.end, PositionRangeEnd(range)) - position;
      UPIPE_RETURN_IF_ERROR(range_loss(range, begin, begin + count));
      begin += count;
      position += count;
    }
  }
  head = {};
  return write_gradient ? parameters_.ReduceGradient(std::move(gradient)) : absl::OkStatus();
}

absl::Status LlamaModel::LossTile(const Batch& tile, const TensorView& x, const GatheredUnit& head,
                                  const GatheredUnit* gradient, const TensorView& logits_out) {
  const int64_t rows = x.shape[0];
  const int64_t d = params_.config.hidden_size;
  const int64_t vocab = params_.config.vocab_size;
  const char* table_name = params_.config.tie_embeddings ? kEmbedding : "lm_head.weight";
  const TensorView table = head.Tensor(table_name);
  const TensorView norm = head.Tensor(kFinalNorm);
  const float eps = params_.config.rms_norm_eps;
  UPIPE_ASSIGN_OR_RETURN(const Buffer xn_buffer,
                         context_.AllocateStored(MemoryTag::kWorkspace, rows * d));
  UPIPE_ASSIGN_OR_RETURN(const Buffer logits_buffer,
                         context_.AllocateFloats(MemoryTag::kLogits, rows * vocab));
  const TensorView xn = TensorView::Matrix(xn_buffer.data(), context_.storage(), rows, d);
  const TensorView logits = TensorView::Matrix(logits_buffer.data(), DType::kFloat32, rows, vocab);
  UPIPE_RETURN_IF_ERROR(
      context_.Run(kernels::RmsNormFwdParams{.x = x, .weight = norm, .y = xn, .eps = eps}));
  UPIPE_RETURN_IF_ERROR(
      context_.Run(MatmulParams{.a = xn, .b = table, .c = logits, .transpose_b = true}));
  if (logits_out.present()) {
    UPIPE_RETURN_IF_ERROR(context_.Run(
        kernels::StridedCopyParams{.src = logits.AsTensor3(), .dst = logits_out.AsTensor3()}));
  }
  // In the rows of the logits they are the gradient of.
  const TensorView dlogits =
      TensorView::Matrix(logits.data, context_.storage(), rows, vocab,
                         vocab * SizeOf(DType::kFloat32) / SizeOf(context_.storage()));
  UPIPE_RETURN_IF_ERROR(context_.Run(
      kernels::CrossEntropyParams{.logits = logits,
                                  .labels = tile.labels,
                                  .dlogits = gradient != nullptr ? dlogits : TensorView(),
                                  .loss_and_count = tile.loss_and_count}));
  if (gradient == nullptr) return absl::OkStatus();
  UPIPE_RETURN_IF_ERROR(context_.Run(MatmulParams{
      .a = dlogits, .b = xn, .c = gradient->Tensor(table_name), .transpose_a = true, .beta = 1}));
  UPIPE_ASSIGN_OR_RETURN(const Buffer dxn_buffer,
                         context_.AllocateFloats(MemoryTag::kWorkspace, rows * d));
  const TensorView dxn = TensorView::Matrix(dxn_buffer.data(), DType::kFloat32, rows, d);
  UPIPE_RETURN_IF_ERROR(context_.Run(MatmulParams{.a = dlogits, .b = table, .c = dxn}));
  return context_.Run(kernels::RmsNormBwdParams{.x = x,
                                                .weight = norm,
                                                .dy = dxn,
                                                .dx = x,
                                                .dweight = gradient->Tensor(kFinalNorm),
                                                .eps = eps,
                                                .accumulate = false});
}

absl::Status LlamaModel::EmbedBackward(const Batch& batch, const TokenTensor& dx) {
  UPIPE_ASSIGN_OR_RETURN(GatheredUnit gradient,
                         parameters_.BeginGradient(parameters_.layout().embedding));
  const Timed timed_embedding(context_, StageName::kEmbedding);
  UPIPE_RETURN_IF_ERROR(ForEachTile(
      context_, {.end = params_.tokens.tokens_per_rank, .tile_rows = kTokenTile},
      {AllColumns(dx, TileUse::kRead)},
      [&](int64_t begin, int64_t rows, absl::Span<const TensorView> tiles) {
        return context_.Run(kernels::EmbeddingBwdParams{.tokens = batch.tokens.Rows(begin, rows),
                                                        .dout = tiles[0],
                                                        .dtable = gradient.Tensor(kEmbedding)});
      }));
  return parameters_.ReduceGradient(std::move(gradient));
}

}  // namespace upipe::model
