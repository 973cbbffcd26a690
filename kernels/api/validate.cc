// What every op demands of its params. Attention is in validate_attention.cc, the rotary
// configuration in validate_rope.cc.
#include <cmath>
#include <variant>

#include "kernels/api/op_table.h"
#include "kernels/api/param_check.h"
#include "kernels/api/validate_attention.h"
#include "kernels/api/validate_rope.h"

namespace upipe::kernels {
namespace {

void Check(const EmbeddingFwdParams& p, ParamCheck& check) {
  check.Input("tokens", p.tokens, 1, DType::kInt32);
  check.Input("table", p.table, 2, kS);
  check.Output("out", p.out, 2, kS);
  check.NotEmpty("table", p.table, 0);
  check.NotEmpty("table", p.table, 1);
  check.Dim("out", p.out, 0, p.tokens.shape[0], "tokens");
  check.Dim("out", p.out, 1, p.table.shape[1], "width of table");
  check.Distinct("out", p.out, "table", p.table);
}

void Check(const EmbeddingBwdParams& p, ParamCheck& check) {
  check.Input("tokens", p.tokens, 1, DType::kInt32);
  check.Input("dout", p.dout, 2, kS);
  check.Output("dtable", p.dtable, 2, kW);
  check.NotEmpty("dtable", p.dtable, 0);
  check.NotEmpty("dtable", p.dtable, 1);
  check.Dim("dout", p.dout, 0, p.tokens.shape[0], "tokens");
  check.Dim("dout", p.dout, 1, p.dtable.shape[1], "width of dtable");
  check.Distinct("dtable", p.dtable, "dout", p.dout);
}

void CheckEps(float eps, ParamCheck& check) {
  check.Scalar(std::isfinite(eps) && eps >= 0, "eps", eps, "finite and >= 0");
}

// The rank of [T, d] or [T, heads, d].
int RmsNormRank(const TensorView& x) { return x.rank == 3 ? 3 : 2; }

void Check(const RmsNormFwdParams& p, ParamCheck& check) {
  const int rank = RmsNormRank(p.x);
  check.Input("x", p.x, rank, kS);
  check.Input("weight", p.weight, 1, kS);
  check.Output("y", p.y, rank, kS);
  check.NotEmpty("x", p.x, rank - 1);
  check.Dim("weight", p.weight, 0, p.x.shape[rank - 1], "last dim of x");
  check.SameShape("y", p.y, "x", p.x);
  CheckEps(p.eps, check);
  if (!p.residual.present()) {
    if (p.sum.present()) check.Fail("sum is present, residual is absent");
    return check.DistinctOrSame("y", p.y, "x", p.x);
  }
  check.Input("residual", p.residual, rank, kSOrW);
  check.Output("sum", p.sum, rank, kS);
  check.SameShape("residual", p.residual, "x", p.x);
  check.SameShape("sum", p.sum, "x", p.x);
  check.DistinctOrSame("sum", p.sum, "x", p.x);
  check.Distinct("sum", p.sum, "residual", p.residual);
  check.Distinct("y", p.y, "x", p.x);
  check.Distinct("y", p.y, "residual", p.residual);
  check.Distinct("y", p.y, "sum", p.sum);
}

void Check(const RmsNormBwdParams& p, ParamCheck& check) {
  const int rank = RmsNormRank(p.x);
  check.Input("x", p.x, rank, kS);
  check.Input("weight", p.weight, 1, kS);
  check.Input("dy", p.dy, rank, kSOrW);
  check.Output("dx", p.dx, rank, kS);
  check.Output("dweight", p.dweight, 1, kW);
  check.NotEmpty("x", p.x, rank - 1);
  check.Dim("weight", p.weight, 0, p.x.shape[rank - 1], "last dim of x");
  check.Dim("dweight", p.dweight, 0, p.x.shape[rank - 1], "last dim of x");
  check.SameShape("dy", p.dy, "x", p.x);
  check.SameShape("dx", p.dx, "x", p.x);
  if (p.accumulate) {
    check.Distinct("dx", p.dx, "x", p.x);
    check.Distinct("dx", p.dx, "dy", p.dy);
  } else {
    check.DistinctOrSame("dx", p.dx, "x", p.x);
    check.DistinctOrSame("dx", p.dx, "dy", p.dy);
  }
  check.Distinct("dweight", p.dweight, "weight", p.weight);
  CheckEps(p.eps, check);
}

void Check(const MatmulParams& p, ParamCheck& check) {
  check.Input("a", p.a, 2, kS);
  check.Input("b", p.b, 2, kS);
  check.Output("c", p.c, 2, kSOrW);
  const int64_t inner = p.transpose_a ? p.a.shape[0] : p.a.shape[1];
  check.Dim("a", p.a, p.transpose_a ? 1 : 0, p.c.shape[0], "rows of c");
  check.Dim("b", p.b, p.transpose_b ? 1 : 0, inner, "inner dim of a");
  check.Dim("b", p.b, p.transpose_b ? 0 : 1, p.c.shape[1], "columns of c");
  check.Distinct("c", p.c, "a", p.a);
  check.Distinct("c", p.c, "b", p.b);
  if (p.bias.present()) {
    check.Input("bias", p.bias, 1, kS);
    check.Dim("bias", p.bias, 0, p.c.shape[1], "columns of c");
    check.Distinct("c", p.c, "bias", p.bias);
  }
  check.Scalar(std::isfinite(p.alpha), "alpha", p.alpha, "finite");
  check.Scalar(std::isfinite(p.beta), "beta", p.beta, "finite");
}

void Check(const ColumnSumParams& p, ParamCheck& check) {
  check.Input("x", p.x, 2, kS);
  check.Output("out", p.out, 1, kW);
  check.Dim("out", p.out, 0, p.x.shape[1], "columns of x");
  check.Distinct("out", p.out, "x", p.x);
}

void Check(const RopeParams& p, ParamCheck& check) {
  check.Input("src", p.src, 3, kS);
  check.Output("dst", p.dst, 3, kSOrW);
  check.Input("positions", p.positions, 1, DType::kInt64);
  check.SameShape("dst", p.dst, "src", p.src);
  check.Dim("positions", p.positions, 0, p.src.shape[0], "tokens of src");
  check.NotEmpty("src", p.src, 2);
  check.Scalar(p.src.shape[2] % 2 == 0, "head_dim", p.src.shape[2], "even");
  if (p.accumulate) {
    check.Distinct("dst", p.dst, "src", p.src);
  } else {
    check.DistinctOrSame("dst", p.dst, "src", p.src);
  }
  CheckRopeConfig(p.config, p.src.shape[2], check);
}

void Check(const StridedCopyParams& p, ParamCheck& check) {
  check.Input("src", p.src, 3, kFloating);
  check.Output("dst", p.dst, 3, kFloating);
  check.SameShape("dst", p.dst, "src", p.src);
  check.Distinct("dst", p.dst, "src", p.src);
}

void Check(const AttentionFwdParams& p, ParamCheck& check) { CheckAttentionFwd(p, check); }
void Check(const AttentionBwdParams& p, ParamCheck& check) { CheckAttentionBwd(p, check); }

void Check(const RowDotParams& p, ParamCheck& check) {
  check.Input("a", p.a, 3, kS);
  check.Input("b", p.b, 3, kS);
  check.Output("out", p.out, 2, kW);
  check.SameShape("b", p.b, "a", p.a);
  check.Dim("out", p.out, 0, p.a.shape[0], "tokens of a");
  check.Dim("out", p.out, 1, p.a.shape[1], "heads of a");
  check.Distinct("out", p.out, "a", p.a);
  check.Distinct("out", p.out, "b", p.b);
}

void Check(const SwiGluFwdParams& p, ParamCheck& check) {
  check.Input("gate", p.gate, 2, kS);
  check.Input("up", p.up, 2, kS);
  check.Output("out", p.out, 2, kS);
  check.SameShape("up", p.up, "gate", p.gate);
  check.SameShape("out", p.out, "gate", p.gate);
  check.DistinctOrSame("out", p.out, "gate", p.gate);
  check.DistinctOrSame("out", p.out, "up", p.up);
}

void Check(const SwiGluBwdParams& p, ParamCheck& check) {
  check.Output("dout", p.dout, 2, kS);
  check.Output("gate", p.gate, 2, kS);
  check.Output("up", p.up, 2, kS);
  check.SameShape("gate", p.gate, "dout", p.dout);
  check.SameShape("up", p.up, "dout", p.dout);
  check.Distinct("gate", p.gate, "dout", p.dout);
  check.Distinct("up", p.up, "dout", p.dout);
  check.Distinct("up", p.up, "gate", p.gate);
}

// A device scalar.
void CheckOne(const char* field, const TensorView& view, DType dtype, ParamCheck& check) {
  check.Output(field, view, 1, dtype);
  check.Dim(field, view, 0, 1, "a scalar");
}

void Check(const CrossEntropyParams& p, ParamCheck& check) {
  check.Output("logits", p.logits, 2, kW);
  check.Input("labels", p.labels, 1, DType::kInt32);
  check.NotEmpty("logits", p.logits, 1);
  check.Dim("labels", p.labels, 0, p.logits.shape[0], "rows of logits");
  check.Output("loss_and_count", p.loss_and_count, 1, DType::kFloat64);
  check.Dim("loss_and_count", p.loss_and_count, 0, 2, "loss, count");
  if (!p.dlogits.present()) return;
  check.Output("dlogits", p.dlogits, 2, kS);
  check.SameShape("dlogits", p.dlogits, "logits", p.logits);
  const int64_t pitch = p.dlogits.stride[0] * SizeOf(p.dlogits.dtype);
  const int64_t logits_pitch = p.logits.stride[0] * SizeOf(p.logits.dtype);
  if (p.dlogits.data == p.logits.data && p.logits.num_elements() > 0 && pitch != logits_pitch) {
    check.Fail(absl::StrCat("dlogits begins where logits does, its rows are ", pitch,
                            " bytes apart, must be ", logits_pitch, " as those of logits"));
  }
}

void Check(const SumOfSquaresParams& p, ParamCheck& check) {
  check.Input("x", p.x, 1, kW);
  CheckOne("out", p.out, DType::kFloat64, check);
}

void Check(const ClipScaleParams& p, ParamCheck& check) {
  CheckOne("sum_of_squares", p.sum_of_squares, DType::kFloat64, check);
  check.Input("loss_and_count", p.loss_and_count, 2, DType::kFloat64);
  check.NotEmpty("loss_and_count", p.loss_and_count, 0);
  check.Dim("loss_and_count", p.loss_and_count, 1, 2, "loss, count");
  CheckOne("grad_norm", p.grad_norm, DType::kFloat32, check);
  CheckOne("scale", p.scale, DType::kFloat32, check);
  CheckOne("skip", p.skip, DType::kInt32, check);
  check.Distinct("scale", p.scale, "grad_norm", p.grad_norm);
  check.Scalar(p.max_norm > 0, "max_norm", p.max_norm, "> 0 (infinity turns clipping off)");
}

void Check(const AdamWParams& p, ParamCheck& check) {
  check.Output("param", p.param, 1, kW);
  check.Input("grad", p.grad, 1, kW);
  check.Output("m", p.m, 1, kW);
  check.Output("v", p.v, 1, kW);
  check.SameShape("grad", p.grad, "param", p.param);
  check.SameShape("m", p.m, "param", p.param);
  check.SameShape("v", p.v, "param", p.param);
  check.Distinct("grad", p.grad, "param", p.param);
  check.Distinct("m", p.m, "v", p.v);
  CheckOne("scale", p.scale, DType::kFloat32, check);
  CheckOne("skip", p.skip, DType::kInt32, check);
  check.Scalar(std::isfinite(p.lr) && p.lr >= 0, "lr", p.lr, "finite and >= 0");
  check.Scalar(p.beta1 >= 0 && p.beta1 < 1, "beta1", p.beta1, "in [0, 1)");
  check.Scalar(p.beta2 >= 0 && p.beta2 < 1, "beta2", p.beta2, "in [0, 1)");
  CheckEps(p.eps, check);
  check.Scalar(std::isfinite(p.weight_decay) && p.weight_decay >= 0, "weight_decay", p.weight_decay,
               "finite and >= 0");
  check.Scalar(p.step >= 1, "step", p.step, ">= 1");
}

void Check(const FillParams& p, ParamCheck& check) { check.AnyOutput("dst", p.dst); }

void Check(const RandomNormalParams& p, ParamCheck& check) {
  check.Output("dst", p.dst, 1, kW);
  check.Scalar(p.first_index >= 0, "first_index", p.first_index, ">= 0");
  check.Scalar(std::isfinite(p.stddev) && p.stddev >= 0, "stddev", p.stddev, "finite and >= 0");
}

}  // namespace

absl::Status Validate(const OpParams& params) {
  ParamCheck check(NameOf(params));
  std::visit([&check](const auto& p) { Check(p, check); }, params);
  return check.status();
}

}  // namespace upipe::kernels
