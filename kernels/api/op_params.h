// Parameters of every device op. Shapes are written [dim, ...] at each tensor; T is tokens. fp32
// storage; sums accumulate in fp32 unless "fp64" is written. Tensors never overlap unless it says
// "may alias". All offsets are 64-bit.
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
  TensorView table;   // [vocab, d]
  TensorView out;     // [T, d]
};

// dtable[tokens[t], :] += dout[t, :], in ascending t.
struct EmbeddingBwdParams {
  TensorView tokens;  // [T] int32
  TensorView dout;    // [T, d]
  TensorView dtable;  // [vocab, d], accumulated
};

// y = x / sqrt(mean(x^2) + eps) * weight.
struct RmsNormFwdParams {
  TensorView x;       // [T, d]
  TensorView weight;  // [d]
  TensorView y;       // [T, d]
  float eps = 1e-5f;
};

// Recomputes rstd from x. dx += d(loss)/dx; dweight += sum over t.
struct RmsNormBwdParams {
  TensorView x;        // [T, d]
  TensorView weight;   // [d]
  TensorView dy;       // [T, d]
  TensorView dx;       // [T, d], accumulated
  TensorView dweight;  // [d], accumulated
  float eps = 1e-5f;
};

// c = alpha * op(a) op(b) + beta * c; op(a) is [m, k], op(b) is [k, n], c is [m, n]. beta = 0
// ignores what c held, NaN included. k = 0 scales c.
struct MatmulParams {
  TensorView a;
  TensorView b;
  TensorView c;
  bool transpose_a = false;  // a is stored [k, m]
  bool transpose_b = false;  // b is stored [n, k]
  float alpha = 1.0f;
  float beta = 0.0f;
};

// Rotary embedding, Hugging Face "rotate half" convention: pair (i, i + D/2) turns by position *
// inv_freq[i].
struct RopeConfig {
  double theta = 10000.0;
  // Llama-3.1 frequency scaling; absent = none.
  struct Llama3Scaling {
    double factor = 8.0;
    double low_freq_factor = 1.0;
    double high_freq_factor = 4.0;
    int64_t original_context = 8192;
  };
  std::optional<Llama3Scaling> llama3;
  // true reproduces Hugging Face: inv_freq and angle rounded to fp32 before sin/cos. false: the
  // angle is formed and reduced in double, exact at any position.
  bool hf_parity = false;
};

// inv_freq [head_dim/2] in double after scaling; shared by every backend
// (kernels/api/rope_config.cc).
std::vector<double> RopeInverseFrequencies(const RopeConfig& config, int64_t head_dim);

// dst = (accumulate ? dst : 0) + R(+-position * freq) src.
struct RopeParams {
  TensorView src;        // [T, heads, head_dim]
  TensorView dst;        // [T, heads, head_dim]; may be src itself when not accumulating
  TensorView positions;  // [T] int64, global positions
  RopeConfig config;
  bool inverse = false;  // rotate by the negative angle (backward)
  bool accumulate = false;
};

// dst = (accumulate ? dst : 0) + src, elementwise over [n0, n1, n2] with any strides of the first
// two dims.
struct StridedCopyParams {
  TensorView src;
  TensorView dst;
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
};

// Scaled dot-product attention of some query heads over resident K/V heads. Query head i reads K/V
// slot kv_slot[i]. A query that sees no key of this run gets o = 0 and lse = -infinity.
struct AttentionFwdParams {
  TensorView q;                  // [Tq, heads, head_dim]
  TensorView k;                  // [Tk, slots, head_dim], any strides of the first two dims
  TensorView v;                  // [Tk, slots, head_dim]
  TensorView o;                  // [Tq, heads, head_dim]
  TensorView lse;                // [heads, Tq], natural-log log-sum-exp of the scaled scores
  std::vector<int32_t> kv_slot;  // [heads]
  PositionRun queries;
  PositionRun keys;
  AttentionMask mask;
  float scale = 1.0f;
};

// Backward of the same call from the saved log-sum-exp and delta = rowsum(dO * O).
struct AttentionBwdParams {
  TensorView q;                  // [Tq, heads, head_dim]
  TensorView k;                  // [Tk, slots, head_dim]
  TensorView v;                  // [Tk, slots, head_dim]
  TensorView dout;               // [Tq, heads, head_dim]
  TensorView lse;                // [heads, Tq]
  TensorView delta;              // [Tq, heads], any row stride
  TensorView dq;                 // [Tq, heads, head_dim], written (accumulated when accumulate_dq)
  TensorView dk;                 // [Tk, slots, head_dim] fp32, accumulated
  TensorView dv;                 // [Tk, slots, head_dim] fp32, accumulated
  std::vector<int32_t> kv_slot;  // [heads]
  PositionRun queries;
  PositionRun keys;
  AttentionMask mask;
  float scale = 1.0f;
  bool accumulate_dq = false;
};

// out[t, h] = sum_i a[t, h, i] * b[t, h, i].
struct RowDotParams {
  TensorView a;    // [T, heads, head_dim]
  TensorView b;    // [T, heads, head_dim]
  TensorView out;  // [T, heads]
};

// out = silu(gate) * up.
struct SwiGluFwdParams {
  TensorView gate;  // [T, F]
  TensorView up;    // [T, F]
  TensorView out;   // [T, F]; may alias gate or up
};

// In place: gate becomes d(loss)/d(gate), up becomes d(loss)/d(up).
struct SwiGluBwdParams {
  TensorView dout;  // [T, F]
  TensorView gate;  // [T, F], in: gate, out: dgate
  TensorView up;    // [T, F], in: up, out: dup
};

// Summed token losses of one tile: loss_and_count[0] += sum of -log softmax(logits)[label] over
// rows with label
// >= 0, loss_and_count[1] += number of such rows, both fp64 in ascending t. With write_gradient the
// logits become d(sum)/d(logits); rows without a label become exact zeros.
struct CrossEntropyParams {
  TensorView logits;          // [T, vocab], in place
  TensorView labels;          // [T] int32; negative = no label
  TensorView loss_and_count;  // [2] fp64, accumulated
  bool write_gradient = true;
};

// out[0] += sum of squares, fp64, fixed order.
struct SumOfSquaresParams {
  TensorView x;    // [n]
  TensorView out;  // [1] fp64, accumulated
};

// The one gradient rule: grad_norm = sqrt(sum_of_squares) / count; scale = (1 / count) * min(1,
// max_norm / (grad_norm + 1e-6)). skip = 1 when count is 0 or the norm is not finite; scale is then
// 0.
struct ClipScaleParams {
  TensorView sum_of_squares;  // [1] fp64, of the summed (undivided) gradients of all ranks
  TensorView loss_and_count;  // [2] fp64, of all ranks
  TensorView grad_norm;       // [1] fp32
  TensorView scale;           // [1] fp32
  TensorView skip;            // [1] int32
  float max_norm = 1.0f;      // infinity = no clipping
};

// Decoupled AdamW on a shard, in place, in one pass: g = grad * scale; m, v, bias correction;
// param -= lr * (m_hat / (sqrt(v_hat) + eps) + weight_decay * param). Does nothing when skip is 1.
struct AdamWParams {
  TensorView param;  // [n]
  TensorView grad;   // [n], the summed gradient
  TensorView m;      // [n]
  TensorView v;      // [n]
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
  TensorView dst;  // [n]
  uint64_t seed = 0;
  uint64_t tensor_id = 0;
  int64_t first_index = 0;
  float stddev = 0.02f;
};

using OpParams = std::variant<EmbeddingFwdParams, EmbeddingBwdParams, RmsNormFwdParams,
                              RmsNormBwdParams, MatmulParams, RopeParams, StridedCopyParams,
                              AttentionFwdParams, AttentionBwdParams, RowDotParams, SwiGluFwdParams,
                              SwiGluBwdParams, CrossEntropyParams, SumOfSquaresParams,
                              ClipScaleParams, AdamWParams, FillParams, RandomNormalParams>;

}  // namespace upipe::kernels
