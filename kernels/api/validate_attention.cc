#include "kernels/api/validate_attention.h"

#include <cmath>

namespace upipe::kernels {
namespace {

void CheckRun(const char* field, PositionRun run, int64_t tokens, int64_t total,
              ParamCheck& check) {
  if (run.begin < 0 || run.end < run.begin || run.end > total) {
    check.Fail(absl::StrCat(field, " = [", run.begin, ", ", run.end,
                            "), must be a run within [0, mask.total = ", total, ")"));
  }
  if (run.end - run.begin != tokens) {
    check.Fail(absl::StrCat(field, " = [", run.begin, ", ", run.end, ") is ", run.end - run.begin,
                            " positions, its tensor has ", tokens, " tokens"));
  }
}

void CheckMask(const AttentionMask& mask, ParamCheck& check) {
  if (mask.window) check.Scalar(*mask.window > 0, "mask.window", *mask.window, "> 0");
  check.Scalar(mask.total >= 1, "mask.total", mask.total, ">= 1");
  if (mask.document_starts == nullptr || mask.document_starts->empty()) {
    return check.Fail("mask.document_starts is empty, must hold at least the start 0");
  }
  const std::vector<int64_t>& starts = *mask.document_starts;
  check.Scalar(starts[0] == 0, "mask.document_starts[0]", starts[0], "0");
  for (size_t i = 1; i < starts.size(); ++i) {
    if (starts[i] > starts[i - 1]) continue;
    return check.Fail(absl::StrCat("mask.document_starts[", i, "] = ", starts[i], " after ",
                                   starts[i - 1], ", must ascend"));
  }
  check.Scalar(starts.back() < mask.total, "last of mask.document_starts", starts.back(),
               absl::StrCat("< mask.total = ", mask.total));
}

void CheckInputs(const TensorView& q, const TensorView& k, const TensorView& v, ParamCheck& check) {
  check.Input("q", q, 3, kS);
  check.Input("k", k, 3, kS);
  check.Input("v", v, 3, kS);
}

// What forward and backward share, after the tensors by themselves.
template <typename Params>
void CheckCommon(const Params& p, ParamCheck& check) {
  check.NotEmpty("q", p.q, 2);
  check.SameShape("v", p.v, "k", p.k);
  check.Dim("k", p.k, 2, p.q.shape[2], "head_dim of q");
  check.Dim("lse", p.lse, 0, p.q.shape[1], "heads of q");
  check.Dim("lse", p.lse, 1, p.q.shape[0], "tokens of q");
  const auto heads = static_cast<int64_t>(p.kv_slot.size());
  check.Scalar(heads == p.q.shape[1], "kv_slot.size", heads,
               absl::StrCat("the heads of q, ", p.q.shape[1]));
  for (size_t head = 0; head < p.kv_slot.size(); ++head) {
    if (p.kv_slot[head] >= 0 && p.kv_slot[head] < p.k.shape[1]) continue;
    check.Fail(absl::StrCat("kv_slot[", head, "] = ", p.kv_slot[head], ", must be in [0, ",
                            p.k.shape[1], "), the slots of k"));
    break;
  }
  CheckMask(p.mask, check);
  CheckRun("queries", p.queries, p.q.shape[0], p.mask.total, check);
  CheckRun("keys", p.keys, p.k.shape[0], p.mask.total, check);
  check.Scalar(std::isfinite(p.scale), "scale", p.scale, "finite");
}

}  // namespace

void CheckAttentionFwd(const AttentionFwdParams& p, ParamCheck& check) {
  CheckInputs(p.q, p.k, p.v, check);
  check.Output("o", p.o, 3, kSOrW);
  check.Output("lse", p.lse, 2, kW);
  if (p.merge && p.o.dtype != DType::kFloat32) {
    check.Fail(absl::StrCat("o is ", NameOf(p.o.dtype), ", must be fp32 with merge"));
  }
  CheckCommon(p, check);
  check.SameShape("o", p.o, "q", p.q);
  check.Distinct("o", p.o, "q", p.q);
  check.Distinct("o", p.o, "k", p.k);
  check.Distinct("o", p.o, "v", p.v);
  check.Distinct("lse", p.lse, "o", p.o);
}

void CheckAttentionBwd(const AttentionBwdParams& p, ParamCheck& check) {
  CheckInputs(p.q, p.k, p.v, check);
  if (p.o.present()) {
    check.Input("o", p.o, 3, kS);
    check.SameShape("o", p.o, "q", p.q);
  }
  check.Input("dout", p.dout, 3, kS);
  check.Input("lse", p.lse, 2, kW);
  check.Input("delta", p.delta, 2, kW);
  check.Output("dq", p.dq, 3, kW);
  check.Output("dk", p.dk, 3, kW);
  check.Output("dv", p.dv, 3, kW);
  CheckCommon(p, check);
  check.SameShape("dout", p.dout, "q", p.q);
  check.SameShape("dq", p.dq, "q", p.q);
  check.SameShape("dk", p.dk, "k", p.k);
  check.SameShape("dv", p.dv, "k", p.k);
  check.Dim("delta", p.delta, 0, p.q.shape[0], "tokens of q");
  check.Dim("delta", p.delta, 1, p.q.shape[1], "heads of q");
  check.Distinct("dq", p.dq, "q", p.q);
  check.Distinct("dq", p.dq, "dout", p.dout);
  check.Distinct("dk", p.dk, "k", p.k);
  check.Distinct("dk", p.dk, "dv", p.dv);
  check.Distinct("dv", p.dv, "v", p.v);
}

}  // namespace upipe::kernels
