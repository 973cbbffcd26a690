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

TensorView AllHeads(const Buffer& out, int64_t tokens, int64_t width) {
  return TensorView::Matrix(out.data(), DType::kFloat32, tokens, width);
}

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
  return {.norm = block.Tensor("input_layernorm.weight"),
          .wq = block.Tensor("q_proj.weight"),
          .wk = block.Tensor("k_proj.weight"),
          .wv = block.Tensor("v_proj.weight"),
          .wo = block.Tensor("o_proj.weight")};
}

MlpWeights LlamaModel::MlpOf(const GatheredUnit& block) const {
  return {.norm = block.Tensor("post_attention_layernorm.weight"),
          .gate = block.Tensor("gate_proj.weight"),
          .up = block.Tensor("up_proj.weight"),
          .down = block.Tensor("down_proj.weight")};
}

TensorView LlamaModel::Hidden(const Buffer& buffer) const {
  return TensorView::Matrix(buffer.data(), DType::kFloat32, params_.tokens.tokens_per_rank,
                            params_.config.hidden_size);
}

absl::Status LlamaModel::ForwardBackward(const Batch& batch, int64_t step) {
  parameters_.BeginGradients();
  UPIPE_ASSIGN_OR_RETURN(Buffer stream, Embed(batch));
  const TensorView x = Hidden(stream);
  std::vector<Buffer> layer_inputs;
  for (int layer = 0; layer < params_.config.num_layers; ++layer) {
    UPIPE_ASSIGN_OR_RETURN(layer_inputs.emplace_back(),
                           context_.Allocate(MemoryTag::kResidual, x.num_bytes()));
    UPIPE_RETURN_IF_ERROR(context_.Run(kernels::StridedCopyParams{
        .src = x.AsTensor3(), .dst = Hidden(layer_inputs.back()).AsTensor3()}));
    UPIPE_RETURN_IF_ERROR(BlockForward(layer, x, {step, StepPass::kForward, layer}));
  }
  context_.Mark(step, StepPass::kLoss, -1, -1);
  UPIPE_RETURN_IF_ERROR(Loss(batch, x, /*write_gradient=*/true, {}));
  const TensorView dx = x;  // the stream carries the gradient from here on
  for (int layer = static_cast<int>(params_.config.num_layers) - 1; layer >= 0; --layer) {
    UPIPE_RETURN_IF_ERROR(BlockBackward(layer, Hidden(layer_inputs.back()), dx, step));
    layer_inputs.pop_back();
  }
  context_.Mark(step, StepPass::kEmbed, -1, -1);
  return EmbedBackward(batch, dx);
}

absl::Status LlamaModel::Evaluate(const Batch& batch, int64_t step, const TensorView& logits) {
  UPIPE_ASSIGN_OR_RETURN(Buffer stream, Embed(batch));
  for (int layer = 0; layer < params_.config.num_layers; ++layer) {
    UPIPE_RETURN_IF_ERROR(BlockForward(layer, Hidden(stream), {step, StepPass::kEvaluate, layer}));
  }
  context_.Mark(step, StepPass::kEvaluate, -1, -1);
  return Loss(batch, Hidden(stream), /*write_gradient=*/false, logits);
}

absl::StatusOr<Buffer> LlamaModel::Embed(const Batch& batch) {
  const int64_t elements = params_.tokens.tokens_per_rank * params_.config.hidden_size;
  UPIPE_ASSIGN_OR_RETURN(Buffer stream, context_.AllocateFloats(MemoryTag::kResidual, elements));
  UPIPE_ASSIGN_OR_RETURN(GatheredUnit embedding,
                         parameters_.Gather(parameters_.layout().embedding));
  UPIPE_RETURN_IF_ERROR(context_.Run(kernels::EmbeddingFwdParams{
      .tokens = batch.tokens, .table = embedding.Tensor(kEmbedding), .out = Hidden(stream)}));
  return stream;
}

absl::Status LlamaModel::BlockForward(int layer, const TensorView& x,
                                      const HeadChunkAttention::Where& where) {
  UPIPE_ASSIGN_OR_RETURN(GatheredUnit block,
                         parameters_.Gather(parameters_.layout().blocks[layer]));
  const attention::AttentionWeights weights = AttentionOf(block);
  {
    UPIPE_ASSIGN_OR_RETURN(attention::AttentionOutput output,
                           attention_.Forward(x, weights, where));
    UPIPE_RETURN_IF_ERROR(
        context_.Run(MatmulParams{.a = AllHeads(output.out, x.shape[0], weights.wo.shape[1]),
                                  .b = weights.wo,
                                  .c = x,
                                  .transpose_b = true,
                                  .beta = 1}));
  }
  context_.Mark(where.step, where.pass, layer, -1);
  return MlpForward(context_, x, MlpOf(block), params_.config.rms_norm_eps);
}

absl::Status LlamaModel::BlockBackward(int layer, const TensorView& input, const TensorView& dy,
                                       int64_t step) {
  const HeadChunkAttention::Where where{step, StepPass::kBackward, layer};
  UPIPE_ASSIGN_OR_RETURN(GatheredUnit block,
                         parameters_.Gather(parameters_.layout().blocks[layer]));
  UPIPE_ASSIGN_OR_RETURN(GatheredUnit gradient, parameters_.ZeroGradient(*block.unit));
  const attention::AttentionWeights weights = AttentionOf(block);
  const attention::AttentionGradients gradients = AttentionOf(gradient);
  UPIPE_ASSIGN_OR_RETURN(attention::AttentionOutput output,
                         attention_.Forward(input, weights, where));
  context_.Mark(step, StepPass::kBackward, layer, -1);
  UPIPE_RETURN_IF_ERROR(
      MlpBackward(context_,
                  {.x = input,
                   .attention_out = AllHeads(output.out, dy.shape[0], weights.wo.shape[1]),
                   .wo = weights.wo,
                   .wo_gradient = gradients.wo},
                  dy, MlpOf(block), MlpOf(gradient), params_.config.rms_norm_eps));
  UPIPE_RETURN_IF_ERROR(
      attention_.Backward(input, dy, weights, gradients, std::move(output), where));
  block = {};
  return parameters_.ReduceGradient(std::move(gradient));
}

absl::Status LlamaModel::Loss(const Batch& batch, const TensorView& x, bool write_gradient,
                              const TensorView& logits_out) {
  const ParameterUnit& unit = parameters_.layout().HeadUnit();
  UPIPE_ASSIGN_OR_RETURN(GatheredUnit head, parameters_.Gather(unit));
  GatheredUnit gradient;
  if (write_gradient) {
    UPIPE_ASSIGN_OR_RETURN(gradient, parameters_.ZeroGradient(unit));
  }
  const int64_t n = params_.tokens.tokens_per_rank;
  for (int64_t begin = 0; begin < n; begin += kTokenTile) {
    const int64_t rows = std::min(kTokenTile, n - begin);
    const Batch tile{.tokens = batch.tokens.Rows(begin, rows),
                     .labels = batch.labels.Rows(begin, rows),
                     .loss_and_count = batch.loss_and_count};
    UPIPE_RETURN_IF_ERROR(
        LossTile(tile, x.Rows(begin, rows), head, write_gradient ? &gradient : nullptr,
                 logits_out.present() ? logits_out.Rows(begin, rows) : TensorView()));
  }
  head = {};
  return write_gradient ? parameters_.ReduceGradient(std::move(gradient)) : absl::OkStatus();
}

absl::Status LlamaModel::LossTile(const Batch& tile, const TensorView& x, const GatheredUnit& head,
                                  const GatheredUnit* gradient, const TensorView& logits_out) {
  const int64_t rows = x.shape[0];
  const int64_t d = params_.config.hidden_size;
  const char* table_name = params_.config.tie_embeddings ? kEmbedding : "lm_head.weight";
  const TensorView table = head.Tensor(table_name);
  const TensorView norm = head.Tensor(kFinalNorm);
  UPIPE_ASSIGN_OR_RETURN(Buffer xn_buffer,
                         context_.AllocateFloats(MemoryTag::kWorkspace, rows * d));
  UPIPE_ASSIGN_OR_RETURN(
      Buffer logits_buffer,
      context_.AllocateFloats(MemoryTag::kLogits, rows * params_.config.vocab_size));
  const TensorView xn = TensorView::Matrix(xn_buffer.data(), DType::kFloat32, rows, d);
  const TensorView logits =
      TensorView::Matrix(logits_buffer.data(), DType::kFloat32, rows, params_.config.vocab_size);
  UPIPE_RETURN_IF_ERROR(context_.Run(kernels::RmsNormFwdParams{
      .x = x, .weight = norm, .y = xn, .eps = params_.config.rms_norm_eps}));
  UPIPE_RETURN_IF_ERROR(
      context_.Run(MatmulParams{.a = xn, .b = table, .c = logits, .transpose_b = true}));
  if (logits_out.present()) {
    UPIPE_RETURN_IF_ERROR(context_.Run(
        kernels::StridedCopyParams{.src = logits.AsTensor3(), .dst = logits_out.AsTensor3()}));
  }
  UPIPE_RETURN_IF_ERROR(
      context_.Run(kernels::CrossEntropyParams{.logits = logits,
                                               .labels = tile.labels,
                                               .loss_and_count = tile.loss_and_count,
                                               .write_gradient = gradient != nullptr}));
  if (gradient == nullptr) return absl::OkStatus();
  UPIPE_RETURN_IF_ERROR(context_.Run(MatmulParams{
      .a = logits, .b = xn, .c = gradient->Tensor(table_name), .transpose_a = true, .beta = 1}));
  UPIPE_RETURN_IF_ERROR(context_.Run(MatmulParams{.a = logits, .b = table, .c = xn}));  // d(xn)
  UPIPE_ASSIGN_OR_RETURN(Buffer dx_buffer,
                         context_.AllocateFloats(MemoryTag::kWorkspace, rows * d));
  const TensorView dx = TensorView::Matrix(dx_buffer.data(), DType::kFloat32, rows, d);
  UPIPE_RETURN_IF_ERROR(context_.Fill(dx, 0));
  UPIPE_RETURN_IF_ERROR(
      context_.Run(kernels::RmsNormBwdParams{.x = x,
                                             .weight = norm,
                                             .dy = xn,
                                             .dx = dx,
                                             .dweight = gradient->Tensor(kFinalNorm),
                                             .eps = params_.config.rms_norm_eps}));
  return context_.Run(kernels::StridedCopyParams{.src = dx.AsTensor3(), .dst = x.AsTensor3()});
}

absl::Status LlamaModel::EmbedBackward(const Batch& batch, const TensorView& dx) {
  UPIPE_ASSIGN_OR_RETURN(GatheredUnit gradient,
                         parameters_.ZeroGradient(parameters_.layout().embedding));
  UPIPE_RETURN_IF_ERROR(context_.Run(kernels::EmbeddingBwdParams{
      .tokens = batch.tokens, .dout = dx, .dtable = gradient.Tensor(kEmbedding)}));
  return parameters_.ReduceGradient(std::move(gradient));
}

}  // namespace upipe::model
