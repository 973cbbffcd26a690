// Decoupled AdamW in one pass over param, grad, m and v.
#include <algorithm>
#include <cmath>

#include "kernels/cpu/cpu_backend.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/adamw.cc"
#include "hwy/foreach_target.h"  // includes this file once per target
#include "kernels/cpu/simd_math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace upipe::kernels::cpu {
namespace HWY_NAMESPACE {

// Elements [first, first + n) of the shard.
void AdamWRange(const AdamWParams& p, int64_t first, size_t n) {
  const F32 d;
  const double beta1_exact = p.beta1, beta2_exact = p.beta2, step = static_cast<double>(p.step);
  const VecF32 grad_scale = hn::Set(d, *p.scale.as<float>());
  const VecF32 beta1 = hn::Set(d, p.beta1), beta2 = hn::Set(d, p.beta2);
  const VecF32 rest1 = hn::Set(d, static_cast<float>(1 - beta1_exact));
  const VecF32 rest2 = hn::Set(d, static_cast<float>(1 - beta2_exact));
  const VecF32 correction1 = hn::Set(d, static_cast<float>(1 / (1 - std::pow(beta1_exact, step))));
  const VecF32 correction2 = hn::Set(d, static_cast<float>(1 / (1 - std::pow(beta2_exact, step))));
  const VecF32 lr = hn::Set(d, p.lr), eps = hn::Set(d, p.eps), decay = hn::Set(d, p.weight_decay);
  const float* grad = Ptr(p.grad, first);
  float *param = Ptr(p.param, first), *m = Ptr(p.m, first), *v = Ptr(p.v, first);
  ForEachVector(n, [=](size_t i, size_t count) HWY_ATTR {
    const VecF32 g = hn::Mul(LoadFirst(grad + i, count), grad_scale);
    const VecF32 w = LoadFirst(param + i, count);
    const VecF32 mean = hn::MulAdd(beta1, LoadFirst(m + i, count), hn::Mul(rest1, g));
    const VecF32 square = hn::MulAdd(beta2, LoadFirst(v + i, count), hn::Mul(rest2, hn::Mul(g, g)));
    const VecF32 root = hn::Sqrt(hn::Mul(square, correction2));
    const VecF32 update = hn::Div(hn::Mul(mean, correction1), hn::Add(root, eps));
    StoreFirst(hn::NegMulAdd(lr, hn::MulAdd(decay, w, update), w), param + i, count);
    StoreFirst(mean, m + i, count);
    StoreFirst(square, v + i, count);
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace upipe::kernels::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace upipe::kernels::cpu {

HWY_EXPORT(AdamWRange);

absl::Status Backend::Run(const AdamWParams& p, Workspace, ExecContext& context) {
  if (*p.skip.as<int32_t>() != 0) return absl::OkStatus();
  constexpr int64_t kBlock =
      256;  // a multiple of every vector, so tails stay at the end of the shard
  const int64_t n = p.param.shape[0];
  context.parallel.Run((n + kBlock - 1) / kBlock, [&](int64_t begin, int64_t end, int) {
    const int64_t first = begin * kBlock, count = std::min(n, end * kBlock) - first;
    HWY_DYNAMIC_DISPATCH(AdamWRange)(p, first, count);
  });
  return absl::OkStatus();
}

}  // namespace upipe::kernels::cpu
#endif  // HWY_ONCE
