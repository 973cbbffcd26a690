// Parameters of every device op. Shapes are written [dim, ...] at each tensor; T is tokens. A
// tensor is S, W or the type written at it: S is the storage type of the call, fp32 or bf16, the
// same for all its S tensors; W is fp32. Arithmetic and sums are fp32 unless "fp64" is written;
// what is stored as bf16 is rounded once, to nearest even (attention also rounds its probabilities
// and their gradients, as operands of bf16 products). Tensors never overlap unless it says "may
// alias". All offsets are 64-bit.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <variant>
#include <vector>

#include "kernels/api/tensor_view.h"

namespace upipe::kernels {

// out[t, :] = table[tokens[t], :]. A token outside [0, vocab) fails
// the stream with OutOfRange naming it.
struct EmbeddingFwdParams {
  TensorView tokens;  // [T] int32
  TensorView table;   // [vocab, d] S
  TensorView out;     // [T, d] S
};

// dtable[tokens[t], :] += dout[t, :], in ascending t.
struct EmbeddingBwdParams {
  TensorView tokens;  // [T] int32
  TensorView dout;    // [T, d] S
  TensorView dtable;  // [vocab, d] W, accumulated
};

// h = x + residual, or x where residual is absent; y = h / sqrt(mean(h^2) + eps) * weight over the
// last dim. `sum`, present with residual, receives h rounded to S, and y is of the rounded h.
struct RmsNormFwdParams {
  TensorView x;         // [T, d] or [T, heads, d] S
  TensorView weight;    // [d] S
  TensorView y;         // as x, S; may alias x when residual is absent
  TensorView residual;  // as x, S or W; optional
  TensorView sum;       // as x, S; may alias x
  float eps = 1e-5f;
};

// Recomputes rstd from x. dx = (accumulate ? dx : 0) + d(loss)/dx; dweight += sum over t.
struct RmsNormBwdParams {
  TensorView x;        // [T, d] or [T, heads, d] S
  TensorView weight;   // [d] S
  TensorView dy;       // as x, S or W
  TensorView dx;       // as x, S; may alias x, or dy of the same type, when not accumulating
  TensorView dweight;  // [d] W, accumulated
  float eps = 1e-5f;
  bool accumulate = true;
};

// c = alpha * op(a) op(b) + beta * c + bias; op(a) is [m, k], op(b) is [k, n], c is [m, n]. beta =
// 0 ignores what c held, NaN included. k = 0 scales c.
struct MatmulParams {
  TensorView a;              // S
  TensorView b;              // S
  TensorView c;              // S or W
  bool transpose_a = false;  // a is stored [k, m]
  bool transpose_b = false;  // b is stored [n, k]
  float alpha = 1.0f;
  float beta = 0.0f;
  TensorView bias;  // [n] S, added to every row; optional
};

// out[j] += sum over t of x[t, j]: the gradient of a bias. Ascending t within fixed blocks.
struct ColumnSumParams {
  TensorView x;    // [T, n] S
  TensorView out;  // [n] W, accumulated
};

// Rotary embedding, Hugging Face "rotate half" convention: pair (i, i + D/2) turns by position *
// inv_freq[i].
struct RopeConfig {
  // Llama 3.1.
  struct Llama3Scaling {
    double factor = 8.0;
    double low_freq_factor = 1.0;
    double high_freq_factor = 4.0;
    int64_t original_context = 8192;
  };
  // Every frequency divided by factor (arXiv 2306.15595).
  struct LinearScaling {
    double factor = 1.0;
  };
  // theta grown for sequences of `context` tokens beyond original_context (Hugging Face "dynamic").
  struct DynamicNtkScaling {
    double factor = 1.0;
    int64_t original_context = 8192;
    int64_t context = 8192;
  };
  // YaRN (arXiv 2309.00071).
  struct YarnScaling {
    double factor = 1.0;
    int64_t original_context = 8192;
    double beta_fast = 32.0;
    double beta_slow = 1.0;
    double attention_factor = 1.0;  // cos and sin are multiplied by it
    bool truncate = true;           // ends of the blend rounded outward to whole numbers
  };
  using Scaling =
      std::variant<std::monostate, Llama3Scaling, LinearScaling, DynamicNtkScaling, YarnScaling>;

  double theta = 10000.0;
  Scaling scaling;
  // true reproduces Hugging Face: inv_freq and angle rounded to fp32 before sin/cos. false: the
  // angle is formed and reduced in double, exact at any position.
  bool hf_parity = false;
};

// inv_freq [head_dim/2] in double after scaling; shared by every backend
// (kernels/api/rope_config.cc).
std::vector<double> RopeInverseFrequencies(const RopeConfig& config, int64_t head_dim);
// What cos and sin are multiplied by, forward and backward: 1 but for YaRN.
double RopeMagnitude(const RopeConfig& config);

// dst = (accumulate ? dst : 0) + magnitude * R(+-position * freq) src.
struct RopeParams {
  TensorView src;        // [T, heads, head_dim] S
  TensorView dst;        // [T, heads, head_dim] S or W; may be src itself when not accumulating
  TensorView positions;  // [T] int64, global positions
  RopeConfig config;
  bool inverse = false;  // rotate by the negative angle (backward)
  bool accumulate = false;
};

// dst = (accumulate ? dst : 0) + src, elementwise over [n0, n1, n2] with any strides of the first
// two dims. Between fp32 and bf16 it is the cast.
struct StridedCopyParams {
  TensorView src;  // fp32 or bf16
  TensorView dst;  // fp32 or bf16
  bool accumulate = false;
};

// A half-open range of global positions: row i of the tensor sits at position begin + i.
struct PositionRun {
  int64_t begin = 0;
  int64_t end = 0;
};

// Which keys a query sees: same document, not after it when causal, within `window` positions when
// set (q - k < window; when not causal, |q - k| < window). Bounds are ascending document starts of
// the one global list, first 0; a document ends where the next starts, the last at `total`. Never
// null, never empty.
struct AttentionMask {
  bool causal = true;
  std::optional<int64_t> window;
  std::shared_ptr<const std::vector<int64_t>> document_starts;
  int64_t total = 0;
  // Bounds over all calls to come, so that what a library prepares for one serves all: the most
  // documents, and the longest part of one in positions. 0: not known; no result depends on them.
  int64_t documents_max = 0;
  int64_t document_length_max = 0;
};

// Scaled dot-product attention of some query heads over resident K/V heads. Query head i reads K/V
// slot kv_slot[i]. A query that sees no key of this run gets o = 0 and lse = -infinity. With merge,
// o (fp32) and lse hold the result over other keys, and the keys of this run join them: o and lse
// become those over both, by weights e^(lse - the larger lse) that cannot overflow; -infinity is no
// key yet, and where the run has no key for a query they stay bit for bit.
struct AttentionFwdParams {
  TensorView q;                  // [Tq, heads, head_dim] S
  TensorView k;                  // [Tk, slots, head_dim] S, any strides of the first two dims
  TensorView v;                  // [Tk, slots, head_dim] S
  TensorView o;                  // [Tq, heads, head_dim] S or W
  TensorView lse;                // [heads, Tq] W, any row stride: ln sum e^(scaled score)
  std::vector<int32_t> kv_slot;  // [heads]
  PositionRun queries;
  PositionRun keys;
  AttentionMask mask;
  float scale = 1.0f;
  bool merge = false;
};

// Backward of the same call from the saved log-sum-exp and delta = rowsum(dO * O). What query head
// i adds to the gradients of its K/V head goes to slot grad_slot[i] of dk and dv, which may have
// other slots than k and v: heads share a grad_slot exactly where they share a kv_slot.
struct AttentionBwdParams {
  TensorView q;                    // [Tq, heads, head_dim] S
  TensorView k;                    // [Tk, slots, head_dim] S
  TensorView v;                    // [Tk, slots, head_dim] S
  TensorView o;                    // [Tq, heads, head_dim] S; optional: OpTable says who reads it
  TensorView dout;                 // [Tq, heads, head_dim] S
  TensorView lse;                  // [heads, Tq] W, any row stride
  TensorView delta;                // [Tq, heads] W, any row stride
  TensorView dq;                   // [Tq, heads, head_dim] W, written (added when accumulate_dq)
  TensorView dk;                   // [Tk, gradient slots, head_dim] W, accumulated
  TensorView dv;                   // [Tk, gradient slots, head_dim] W, accumulated
  std::vector<int32_t> kv_slot;    // [heads]
  std::vector<int32_t> grad_slot;  // [heads]
  PositionRun queries;
  PositionRun keys;
  AttentionMask mask;
  float scale = 1.0f;
  bool accumulate_dq = false;
};

// out[t, h] = sum_i a[t, h, i] * b[t, h, i].
struct RowDotParams {
  TensorView a;    // [T, heads, head_dim] S
  TensorView b;    // [T, heads, head_dim] S
  TensorView out;  // [T, heads] W
};

// out = silu(gate) * up.
struct SwiGluFwdParams {
  TensorView gate;  // [T, F] S
  TensorView up;    // [T, F] S
  TensorView out;   // [T, F] S; may alias gate or up
};

// In place, one pass: gate becomes d(loss)/d(gate), up becomes d(loss)/d(up), and dout becomes what
// forward's out was, the left side of the down projection's weight gradient.
struct SwiGluBwdParams {
  TensorView dout;  // [T, F] S, in: d(loss)/d(out), out: silu(gate) * up
  TensorView gate;  // [T, F] S, in: gate, out: dgate
  TensorView up;    // [T, F] S, in: up, out: dup
};

// Summed token losses of one tile: loss_and_count[0] += sum of -log softmax(logits)[label] over
// rows with label >= 0, loss_and_count[1] += number of such rows, both fp64 in ascending t.
// dlogits, when present, becomes d(sum)/d(logits); rows without a label become exact zeros.
struct CrossEntropyParams {
  TensorView logits;   // [T, vocab] W
  TensorView labels;   // [T] int32; negative = no label
  TensorView dlogits;  // [T, vocab] S, optional; may begin where logits does if its rows are as
                       // many bytes apart
  TensorView loss_and_count;  // [2] fp64, accumulated
};

// out[0] += sum of squares, fp64, fixed order.
struct SumOfSquaresParams {
  TensorView x;    // [n] W
  TensorView out;  // [1] fp64, accumulated
};

// The one gradient rule: grad_norm = sqrt(sum_of_squares) / count; scale = (1 / count) * min(1,
// max_norm / (grad_norm + 1e-6)). skip = 1 when count is 0 or the norm is not finite; scale is then
// 0.
struct ClipScaleParams {
  TensorView sum_of_squares;  // [1] fp64, of the summed (undivided) gradients of all ranks
  TensorView loss_and_count;  // [ranges, 2] fp64, of all ranks; counts are added in ascending order
  TensorView grad_norm;       // [1] fp32
  TensorView scale;           // [1] fp32
  TensorView skip;            // [1] int32
  float max_norm = 1.0f;      // infinity = no clipping
};

// Decoupled AdamW on a shard, in place, in one pass: g = grad * scale; m, v, bias correction;
// param -= lr * (m_hat / (sqrt(v_hat) + eps) + weight_decay * param). Does nothing when skip is 1.
struct AdamWParams {
  TensorView param;  // [n] W
  TensorView grad;   // [n] W, the summed gradient
  TensorView m;      // [n] W
  TensorView v;      // [n] W
  TensorView scale;  // [1] fp32
  TensorView skip;   // [1] int32
  float lr = 0;
  float beta1 = 0.9f;
  float beta2 = 0.95f;
  float eps = 1e-8f;
  float weight_decay = 0;
  int64_t step = 1;  // 1-based, for the bias correction
};

// Every element = value.
struct FillParams {
  TensorView dst;  // any dtype; rank 1 to 3
  double value = 0;
};

// dst[i] = stddev * normal(seed, tensor_id, first_index + i): a counter-based generator, so a shard
// gets the same numbers whatever the sharding.
struct RandomNormalParams {
  TensorView dst;  // [n] W
  uint64_t seed = 0;
  uint64_t tensor_id = 0;
  int64_t first_index = 0;
  float stddev = 0.02f;
};

using OpParams =
    std::variant<EmbeddingFwdParams, EmbeddingBwdParams, RmsNormFwdParams, RmsNormBwdParams,
                 MatmulParams, ColumnSumParams, RopeParams, StridedCopyParams, AttentionFwdParams,
                 AttentionBwdParams, RowDotParams, SwiGluFwdParams, SwiGluBwdParams,
                 CrossEntropyParams, SumOfSquaresParams, ClipScaleParams, AdamWParams, FillParams,
                 RandomNormalParams>;

}  // namespace upipe::kernels
