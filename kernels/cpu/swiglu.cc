// out = silu(gate) * up and its gradient, elementwise.
#include "kernels/cpu/cpu_backend.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/swiglu.cc"
#include "hwy/foreach_target.h"  // includes this file once per target
#include "kernels/cpu/simd_math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace upipe::kernels::cpu {
namespace HWY_NAMESPACE {

HWY_INLINE VecF32 Sigmoid(VecF32 x) {
  const VecF32 one = hn::Set(F32(), 1.0f);
  return hn::Div(one, hn::Add(one, Exp(hn::Min(hn::Set(F32(), 87.0f), hn::Neg(x)))));
}

void SwiGluForwardRow(const float* gate, const float* up, float* out, size_t n) {
  ForEachVector(n, [=](size_t i, size_t count) HWY_ATTR {
    const VecF32 g = LoadFirst(gate + i, count);
    StoreFirst(hn::Mul(hn::Mul(g, Sigmoid(g)), LoadFirst(up + i, count)), out + i, count);
  });
}

// silu'(g) = s * (1 + g * (1 - s)).
void SwiGluBackwardRow(const float* dout, float* gate, float* up, size_t n) {
  ForEachVector(n, [=](size_t i, size_t count) HWY_ATTR {
    const VecF32 one = hn::Set(F32(), 1.0f);
    const VecF32 g = LoadFirst(gate + i, count);
    const VecF32 u = LoadFirst(up + i, count);
    const VecF32 dy = LoadFirst(dout + i, count);
    const VecF32 s = Sigmoid(g);
    const VecF32 slope = hn::Mul(s, hn::MulAdd(g, hn::Sub(one, s), one));
    StoreFirst(hn::Mul(hn::Mul(dy, u), slope), gate + i, count);
    StoreFirst(hn::Mul(dy, hn::Mul(g, s)), up + i, count);
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace upipe::kernels::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace upipe::kernels::cpu {

HWY_EXPORT(SwiGluForwardRow);
HWY_EXPORT(SwiGluBackwardRow);

absl::Status Backend::Run(const SwiGluFwdParams& p, Workspace, ExecContext& context) {
  context.parallel.Run(p.out.shape[0], [&](int64_t begin, int64_t end, int) {
    for (int64_t t = begin; t < end; ++t) {
      HWY_DYNAMIC_DISPATCH(SwiGluForwardRow)
      (Ptr(p.gate, t), Ptr(p.up, t), Ptr(p.out, t), p.out.shape[1]);
    }
  });
  return absl::OkStatus();
}

absl::Status Backend::Run(const SwiGluBwdParams& p, Workspace, ExecContext& context) {
  context.parallel.Run(p.gate.shape[0], [&](int64_t begin, int64_t end, int) {
    for (int64_t t = begin; t < end; ++t) {
      HWY_DYNAMIC_DISPATCH(SwiGluBackwardRow)
      (Ptr(p.dout, t), Ptr(p.gate, t), Ptr(p.up, t), p.gate.shape[1]);
    }
  });
  return absl::OkStatus();
}

}  // namespace upipe::kernels::cpu
#endif  // HWY_ONCE
