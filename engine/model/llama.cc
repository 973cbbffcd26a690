#include "engine/model/llama.h"

#include <algorithm>
#include <utility>

#include "common/status.h"
#include "engine/model/mlp.h"

namespace upipe::model {

using attention::HeadChunkAttention;
using attention::kTokenTile;
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
          .hidden_size = params.config.hidden_size,
          .head_dim = params.config.head_dim,
          .rms_norm_eps = params.config.rms_norm_eps,
          .rope = params.config.rope,
          .positions = params.positions};
}

}  // namespace

LlamaModel::LlamaModel(const engine::RankContext& context, const LlamaParams& params,
                       ShardedParameters& parameters)
    : context_(context),
      params_(params),
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

TensorView LlamaModel::Hidden(const Buffer& buffer) const {
  return TensorView::Matrix(buffer.data(), context_.storage(), params_.tokens.tokens_per_rank,
                            params_.config.hidden_size);
}

const ParameterUnit& LlamaModel::UnitAfter(int layer) const {
  const ParameterLayout& layout = parameters_.layout();
  return layer + 1 < params_.config.num_layers ? layout.blocks[layer + 1] : layout.HeadUnit();
}

absl::Status LlamaModel::ForwardBackward(const Batch& batch, int64_t step) {
  parameters_.BeginGradients();
  UPIPE_ASSIGN_OR_RETURN(Buffer stream, Embed(batch));
  std::vector<LayerInput> layer_inputs;
  for (int layer = 0; layer < params_.config.num_layers; ++layer) {
    LayerInput& input = layer_inputs.emplace_back();
    input.x = std::move(stream);
    UPIPE_ASSIGN_OR_RETURN(stream, context_.Allocate(MemoryTag::kResidual, input.x.size_bytes()));
    UPIPE_ASSIGN_OR_RETURN(
        attention::AttentionOutput output,
        BlockForward(layer, Hidden(input.x), Hidden(stream), {step, StepPass::kForward, layer}));
    if (params_.keep_attention_output) input.attention = std::move(output);
  }
  context_.Mark(step, StepPass::kLoss, -1, -1);
  UPIPE_RETURN_IF_ERROR(Loss(batch, Hidden(stream), /*write_gradient=*/true, {}));
  const TensorView dx = Hidden(stream);  // the stream carries the gradient from here on
  for (int layer = static_cast<int>(params_.config.num_layers) - 1; layer >= 0; --layer) {
    UPIPE_RETURN_IF_ERROR(BlockBackward(layer, std::move(layer_inputs.back()), dx, step));
    layer_inputs.pop_back();
  }
  context_.Mark(step, StepPass::kEmbed, -1, -1);
  return EmbedBackward(batch, dx);
}

absl::Status LlamaModel::Evaluate(const Batch& batch, int64_t step, const TensorView& logits) {
  UPIPE_ASSIGN_OR_RETURN(const Buffer stream, Embed(batch));
  const TensorView x = Hidden(stream);
  for (int layer = 0; layer < params_.config.num_layers; ++layer) {
    UPIPE_RETURN_IF_ERROR(BlockForward(layer, x, x, {step, StepPass::kEvaluate, layer}).status());
  }
  context_.Mark(step, StepPass::kEvaluate, -1, -1);
  return Loss(batch, x, /*write_gradient=*/false, logits);
}

absl::StatusOr<Buffer> LlamaModel::Embed(const Batch& batch) {
  const int64_t elements = params_.tokens.tokens_per_rank * params_.config.hidden_size;
  UPIPE_ASSIGN_OR_RETURN(Buffer stream, context_.AllocateStored(MemoryTag::kResidual, elements));
  UPIPE_ASSIGN_OR_RETURN(const GatheredUnit embedding,
                         parameters_.Gather(parameters_.layout().embedding));
  UPIPE_RETURN_IF_ERROR(parameters_.Prefetch(parameters_.layout().blocks[0]));
  UPIPE_RETURN_IF_ERROR(context_.Run(kernels::EmbeddingFwdParams{
      .tokens = batch.tokens, .table = embedding.Tensor(kEmbedding), .out = Hidden(stream)}));
  return stream;
}

absl::StatusOr<attention::AttentionOutput> LlamaModel::BlockForward(
    int layer, const TensorView& x, const TensorView& y, const HeadChunkAttention::Where& where) {
  UPIPE_ASSIGN_OR_RETURN(const GatheredUnit block,
                         parameters_.Gather(parameters_.layout().blocks[layer]));
  const attention::AttentionWeights weights = AttentionOf(block);
  UPIPE_ASSIGN_OR_RETURN(attention::AttentionOutput output, attention_.Forward(x, weights, where));
  context_.Mark(where.step, where.pass, layer, -1);
  // From here to the next block's first exchange the ranks have nothing else to send.
  UPIPE_RETURN_IF_ERROR(parameters_.Prefetch(UnitAfter(layer)));
  UPIPE_RETURN_IF_ERROR(MlpForward(context_,
                                   {.x = x, .out = attention_.AllHeads(output), .wo = weights.wo},
                                   MlpOf(block), params_.config.rms_norm_eps, y));
  return output;
}

absl::Status LlamaModel::BlockBackward(int layer, LayerInput input, const TensorView& dy,
                                       int64_t step) {
  const TensorView x = Hidden(input.x);
  const HeadChunkAttention::Where where{step, StepPass::kBackward, layer};
  UPIPE_ASSIGN_OR_RETURN(GatheredUnit block,
                         parameters_.Gather(parameters_.layout().blocks[layer]));
  UPIPE_ASSIGN_OR_RETURN(GatheredUnit gradient, parameters_.ZeroGradient(*block.unit));
  const attention::AttentionWeights weights = AttentionOf(block);
  const attention::AttentionGradients gradients = AttentionOf(gradient);
  if (!input.attention) {
    UPIPE_ASSIGN_OR_RETURN(input.attention, attention_.Forward(x, weights, where));
  }
  context_.Mark(step, StepPass::kBackward, layer, -1);
  if (layer > 0) {
    UPIPE_RETURN_IF_ERROR(parameters_.Prefetch(parameters_.layout().blocks[layer - 1]));
  }
  UPIPE_RETURN_IF_ERROR(MlpBackward(
      context_, {.x = x, .out = attention_.AllHeads(*input.attention), .wo = weights.wo},
      MlpOf(block), params_.config.rms_norm_eps, dy, {.mlp = MlpOf(gradient), .wo = gradients.wo}));
  UPIPE_RETURN_IF_ERROR(
      attention_.Backward(x, dy, weights, gradients, *std::move(input.attention), where));
  block = {};
  return parameters_.ReduceGradient(std::move(gradient));
}

absl::Status LlamaModel::Loss(const Batch& batch, const TensorView& x, bool write_gradient,
                              const TensorView& logits_out) {
  const ParameterUnit& unit = parameters_.layout().HeadUnit();
  UPIPE_ASSIGN_OR_RETURN(GatheredUnit head, parameters_.Gather(unit));
  GatheredUnit gradient;
  if (write_gradient) {
    UPIPE_RETURN_IF_ERROR(parameters_.Prefetch(parameters_.layout().blocks.back()));
    UPIPE_ASSIGN_OR_RETURN(gradient, parameters_.ZeroGradient(unit));
  }
  const kernels::PositionRun run = params_.tokens.RunOf(context_.rank());
  for (int64_t position = run.begin; position < run.end;) {
    const int range = PositionRangeOf(position);
    const int64_t end = std::min({run.end, position + kTokenTile, PositionRangeEnd(range)});
    const int64_t begin = position - run.begin, rows = end - position;
    const Batch tile{
        .tokens = batch.tokens.Rows(begin, rows),
        .labels = batch.labels.Rows(begin, rows),
        .loss_and_count = TensorView::Vector(batch.loss_and_count.At(range), DType::kFloat64, 2)};
    UPIPE_RETURN_IF_ERROR(
        LossTile(tile, x.Rows(begin, rows), head, write_gradient ? &gradient : nullptr,
                 logits_out.present() ? logits_out.Rows(begin, rows) : TensorView()));
    position = end;
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

absl::Status LlamaModel::EmbedBackward(const Batch& batch, const TensorView& dx) {
  UPIPE_ASSIGN_OR_RETURN(GatheredUnit gradient,
                         parameters_.ZeroGradient(parameters_.layout().embedding));
  UPIPE_RETURN_IF_ERROR(context_.Run(kernels::EmbeddingBwdParams{
      .tokens = batch.tokens, .dout = dx, .dtable = gradient.Tensor(kEmbedding)}));
  return parameters_.ReduceGradient(std::move(gradient));
}

}  // namespace upipe::model
