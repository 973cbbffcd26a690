#include "kernels/api/validate_attention.h"

#include <algorithm>
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
               "< mask.total = ", mask.total);
}

void CheckInputs(const TensorView& q, const TensorView& k, const TensorView& v, ParamCheck& check) {
  check.Input("q", q, 3, kS);
  check.Input("k", k, 3, kS);
  check.Input("v", v, 3, kS);
}

// One slot of `tensor` for every query head.
void CheckSlots(const char* field, const std::vector<int32_t>& slots, int64_t heads,
                const char* tensor, int64_t num_slots, ParamCheck& check) {
  const auto size = static_cast<int64_t>(slots.size());
  if (size != heads) {
    check.Fail(absl::StrCat(field, ".size = ", size, ", must be the heads of q, ", heads));
  }
  for (size_t head = 0; head < slots.size(); ++head) {
    if (slots[head] >= 0 && slots[head] < num_slots) continue;
    return check.Fail(absl::StrCat(field, "[", head, "] = ", slots[head], ", must be in [0, ",
                                   num_slots, "), the slots of ", tensor));
  }
}

// Gradients of different K/V heads are summed apart, those of one together.
void CheckPairing(const std::vector<int32_t>& kv_slot, const std::vector<int32_t>& grad_slot,
                  ParamCheck& check) {
  for (size_t head = 0; head < std::min(kv_slot.size(), grad_slot.size()); ++head) {
    for (size_t other = 0; other < head; ++other) {
      if ((kv_slot[head] == kv_slot[other]) == (grad_slot[head] == grad_slot[other])) continue;
      return check.Fail(absl::StrCat("kv_slot and grad_slot of heads ", other, " and ", head,
                                     " are ", kv_slot[other], ", ", kv_slot[head], " and ",
                                     grad_slot[other], ", ", grad_slot[head],
                                     ", must be the same in both or in neither"));
    }
  }
}

// What forward and backward share, after the tensors by themselves.
template <typename Params>
void CheckCommon(const Params& p, ParamCheck& check) {
  check.NotEmpty("q", p.q, 2);
  check.SameShape("v", p.v, "k", p.k);
  check.Dim("k", p.k, 2, p.q.shape[2], "head_dim of q");
  check.Dim("lse", p.lse, 0, p.q.shape[1], "heads of q");
  check.Dim("lse", p.lse, 1, p.q.shape[0], "tokens of q");
  CheckSlots("kv_slot", p.kv_slot, p.q.shape[1], "k", p.k.shape[1], check);
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
  check.Dim("dk", p.dk, 0, p.k.shape[0], "tokens of k");
  check.Dim("dk", p.dk, 2, p.k.shape[2], "head_dim of k");
  check.SameShape("dv", p.dv, "dk", p.dk);
  CheckSlots("grad_slot", p.grad_slot, p.q.shape[1], "dk", p.dk.shape[1], check);
  CheckPairing(p.kv_slot, p.grad_slot, check);
  check.Dim("delta", p.delta, 0, p.q.shape[0], "tokens of q");
  check.Dim("delta", p.delta, 1, p.q.shape[1], "heads of q");
  check.Distinct("dq", p.dq, "q", p.q);
  check.Distinct("dq", p.dq, "dout", p.dout);
  check.Distinct("dk", p.dk, "k", p.k);
  check.Distinct("dk", p.dk, "dv", p.dv);
  check.Distinct("dv", p.dv, "v", p.v);
}

}  // namespace upipe::kernels
