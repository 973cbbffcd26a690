// What one op call costs. A matmul counts 2 m n k flops, attention 4 D per visible pair forward and
// 10 D backward (five products); elementwise ops count their arithmetic nominally. Each tensor
// crosses memory once.
#include <variant>

#include "kernels/api/attention_pairs.h"
#include "kernels/api/op_table.h"

namespace upipe::kernels {
namespace {

double Elements(const TensorView& view) { return static_cast<double>(view.num_elements()); }

template <typename... Views>
double Bytes(const Views&... views) {
  return (static_cast<double>(views.num_bytes()) + ... + 0.0);
}

OpCost CostOf(const EmbeddingFwdParams& p) { return {0, Bytes(p.tokens, p.out), Bytes(p.out)}; }

OpCost CostOf(const EmbeddingBwdParams& p) {
  const double touched = Elements(p.dout) * static_cast<double>(SizeOf(p.dtable.dtype));
  return {Elements(p.dout), Bytes(p.tokens, p.dout) + touched, touched};
}

OpCost CostOf(const RmsNormFwdParams& p) {
  return {(p.residual.present() ? 5 : 4) * Elements(p.x), Bytes(p.x, p.weight, p.residual),
          Bytes(p.y, p.sum)};
}

OpCost CostOf(const RmsNormBwdParams& p) {
  const double read = Bytes(p.x, p.weight, p.dy, p.dweight) + (p.accumulate ? Bytes(p.dx) : 0.0);
  return {(p.accumulate ? 11 : 10) * Elements(p.x), read, Bytes(p.dx, p.dweight)};
}

OpCost CostOf(const MatmulParams& p) {
  const double inner = static_cast<double>(p.transpose_a ? p.a.shape[0] : p.a.shape[1]);
  const double read = Bytes(p.a, p.b, p.bias) + (p.beta == 0.0f ? 0.0 : Bytes(p.c));
  return {2 * Elements(p.c) * inner + (p.bias.present() ? Elements(p.c) : 0.0), read, Bytes(p.c)};
}

OpCost CostOf(const ColumnSumParams& p) { return {Elements(p.x), Bytes(p.x, p.out), Bytes(p.out)}; }

OpCost CostOf(const RopeParams& p) {
  const double read = Bytes(p.src, p.positions) + (p.accumulate ? Bytes(p.dst) : 0.0);
  return {(p.accumulate ? 4 : 3) * Elements(p.src), read, Bytes(p.dst)};
}

OpCost CostOf(const StridedCopyParams& p) {
  const double read = Bytes(p.src) + (p.accumulate ? Bytes(p.dst) : 0.0);
  return {p.accumulate ? Elements(p.src) : 0.0, read, Bytes(p.dst)};
}

// Pairs of all heads times the head size.
double PairElements(const TensorView& q, const AttentionMask& mask, PositionRun queries,
                    PositionRun keys) {
  return static_cast<double>(VisiblePairs(mask, queries, keys)) *
         static_cast<double>(q.shape[1] * q.shape[2]);
}

OpCost CostOf(const AttentionFwdParams& p) {
  const double read = Bytes(p.q, p.k, p.v) + (p.merge ? Bytes(p.o, p.lse) : 0.0);
  return {4 * PairElements(p.q, p.mask, p.queries, p.keys), read, Bytes(p.o, p.lse)};
}

OpCost CostOf(const AttentionBwdParams& p) {
  const double read = Bytes(p.q, p.k, p.v, p.dout, p.lse, p.delta, p.dk, p.dv) +
                      (p.accumulate_dq ? Bytes(p.dq) : 0.0) + (p.o.present() ? Bytes(p.o) : 0.0);
  return {10 * PairElements(p.q, p.mask, p.queries, p.keys), read, Bytes(p.dq, p.dk, p.dv)};
}

OpCost CostOf(const RowDotParams& p) { return {2 * Elements(p.a), Bytes(p.a, p.b), Bytes(p.out)}; }

OpCost CostOf(const SwiGluFwdParams& p) {
  return {5 * Elements(p.out), Bytes(p.gate, p.up), Bytes(p.out)};
}

OpCost CostOf(const SwiGluBwdParams& p) {
  return {11 * Elements(p.dout), Bytes(p.dout, p.gate, p.up), Bytes(p.dout, p.gate, p.up)};
}

OpCost CostOf(const CrossEntropyParams& p) {
  return {(p.dlogits.present() ? 6 : 4) * Elements(p.logits),
          Bytes(p.logits, p.labels, p.loss_and_count), Bytes(p.dlogits, p.loss_and_count)};
}

OpCost CostOf(const SumOfSquaresParams& p) {
  return {2 * Elements(p.x), Bytes(p.x, p.out), Bytes(p.out)};
}

OpCost CostOf(const ClipScaleParams& p) {
  return {5 + static_cast<double>(p.loss_and_count.shape[0]),
          Bytes(p.sum_of_squares, p.loss_and_count), Bytes(p.grad_norm, p.scale, p.skip)};
}

OpCost CostOf(const AdamWParams& p) {
  return {15 * Elements(p.param), Bytes(p.param, p.grad, p.m, p.v, p.scale, p.skip),
          Bytes(p.param, p.m, p.v)};
}

OpCost CostOf(const FillParams& p) { return {0, 0, Bytes(p.dst)}; }

OpCost CostOf(const RandomNormalParams& p) { return {20 * Elements(p.dst), 0, Bytes(p.dst)}; }

}  // namespace

OpCost Cost(const OpParams& params) {
  return std::visit([](const auto& p) { return CostOf(p); }, params);
}

}  // namespace upipe::kernels
