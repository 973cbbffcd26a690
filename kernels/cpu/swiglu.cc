// out = silu(gate) * up and its gradient, elementwise, one pass each.
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

template <typename S>
HWY_INLINE void ForwardRow(const S* gate, const S* up, S* out, size_t n) {
  ForEachVector(n, [=](size_t i, size_t count) HWY_ATTR {
    const VecF32 g = LoadFirst(gate + i, count);
    StoreFirst(hn::Mul(hn::Mul(g, Sigmoid(g)), LoadFirst(up + i, count)), out + i, count);
  });
}

// silu'(g) = s * (1 + g * (1 - s)).
template <typename S>
HWY_INLINE void BackwardRow(S* dout, S* gate, S* up, size_t n) {
  ForEachVector(n, [=](size_t i, size_t count) HWY_ATTR {
    const VecF32 one = hn::Set(F32(), 1.0f);
    const VecF32 g = LoadFirst(gate + i, count);
    const VecF32 u = LoadFirst(up + i, count);
    const VecF32 dy = LoadFirst(dout + i, count);
    const VecF32 s = Sigmoid(g);
    const VecF32 slope = hn::Mul(s, hn::MulAdd(g, hn::Sub(one, s), one));
    const VecF32 silu = hn::Mul(g, s);
    StoreFirst(hn::Mul(hn::Mul(dy, u), slope), gate + i, count);
    StoreFirst(hn::Mul(dy, silu), up + i, count);
    StoreFirst(hn::Mul(silu, u), dout + i, count);
  });
}

// Tokens [begin, end).
void SwiGluForward(const SwiGluFwdParams& p, int64_t begin, int64_t end) {
  WithStorageType(p.out.dtype, [&](auto tag) HWY_ATTR {
    using S = decltype(tag);
    for (int64_t t = begin; t < end; ++t) {
      ForwardRow(Ptr<S>(p.gate, t), Ptr<S>(p.up, t), Ptr<S>(p.out, t), p.out.shape[1]);
    }
  });
}

// Tokens [begin, end).
void SwiGluBackward(const SwiGluBwdParams& p, int64_t begin, int64_t end) {
  WithStorageType(p.gate.dtype, [&](auto tag) HWY_ATTR {
    using S = decltype(tag);
    for (int64_t t = begin; t < end; ++t) {
      BackwardRow(Ptr<S>(p.dout, t), Ptr<S>(p.gate, t), Ptr<S>(p.up, t), p.gate.shape[1]);
    }
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace upipe::kernels::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace upipe::kernels::cpu {

HWY_EXPORT(SwiGluForward);
HWY_EXPORT(SwiGluBackward);

absl::Status Backend::Run(const SwiGluFwdParams& p, Workspace, ExecContext& context) {
  context.parallel.Run(p.out.shape[0], [&](int64_t begin, int64_t end, int) {
    HWY_DYNAMIC_DISPATCH(SwiGluForward)(p, begin, end);
  });
  return absl::OkStatus();
}

absl::Status Backend::Run(const SwiGluBwdParams& p, Workspace, ExecContext& context) {
  context.parallel.Run(p.gate.shape[0], [&](int64_t begin, int64_t end, int) {
    HWY_DYNAMIC_DISPATCH(SwiGluBackward)(p, begin, end);
  });
  return absl::OkStatus();
}

}  // namespace upipe::kernels::cpu
#endif  // HWY_ONCE
