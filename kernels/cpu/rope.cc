// Rotary embedding. Angles are formed and reduced in double per token and shared by its heads; the
// rotation is fp32.
#include <algorithm>
#include <vector>

#include "kernels/cpu/cpu_backend.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/rope.cc"
#include "hwy/foreach_target.h"  // includes this file once per target
#include "kernels/cpu/simd_math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace upipe::kernels::cpu {
namespace HWY_NAMESPACE {

// cosine[i], sine[i] of position * frequencies[i]; i is below n rounded up to whole vectors, which
// all arrays hold. hf_parity: the factors and the product are fp32.
void RopeAngles(int64_t position, const double* frequencies, size_t n, bool hf_parity,
                float* cosine, float* sine) {
  const F64 d;
  const hn::Rebind<float, F64> half;
  const VecF64 factor = hn::Set(d, hf_parity ? static_cast<double>(static_cast<float>(position))
                                             : static_cast<double>(position));
  for (size_t i = 0; i < n; i += hn::Lanes(d)) {
    VecF64 frequency = hn::LoadU(d, frequencies + i);
    if (hf_parity) frequency = hn::PromoteTo(d, hn::DemoteTo(half, frequency));
    VecF64 angle = hn::Mul(factor, frequency);
    if (hf_parity) angle = hn::PromoteTo(d, hn::DemoteTo(half, angle));
    VecF64 c, s;
    CosSin(angle, c, s);
    hn::StoreU(hn::DemoteTo(half, c), half, cosine + i);
    hn::StoreU(hn::DemoteTo(half, s), half, sine + i);
  }
}

// Turns the pairs (x[i], y[i]) of one head.
template <bool kAccumulate>
HWY_INLINE void Turn(const float* x, const float* y, float* out_x, float* out_y,
                     const float* cosine, const float* sine, size_t n) {
  ForEachVector(n, [=](size_t i, size_t count) HWY_ATTR {
    const VecF32 c = LoadFirst(cosine + i, count), s = LoadFirst(sine + i, count);
    const VecF32 a = LoadFirst(x + i, count), b = LoadFirst(y + i, count);
    VecF32 turned_a = hn::NegMulAdd(b, s, hn::Mul(a, c));
    VecF32 turned_b = hn::MulAdd(a, s, hn::Mul(b, c));
    if constexpr (kAccumulate) {
      turned_a = hn::Add(LoadFirst(out_x + i, count), turned_a);
      turned_b = hn::Add(LoadFirst(out_y + i, count), turned_b);
    }
    StoreFirst(turned_a, out_x + i, count);
    StoreFirst(turned_b, out_y + i, count);
  });
}

void RopeTurn(const float* x, const float* y, float* out_x, float* out_y, const float* cosine,
              const float* sine, size_t n, bool accumulate) {
  if (accumulate) {
    Turn<true>(x, y, out_x, out_y, cosine, sine, n);
  } else {
    Turn<false>(x, y, out_x, out_y, cosine, sine, n);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace upipe::kernels::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace upipe::kernels::cpu {

HWY_EXPORT(RopeAngles);
HWY_EXPORT(RopeTurn);

namespace {

constexpr int64_t kPairs = 128;  // pairs turned at a time; a multiple of every vector

// Pairs [first, first + n) of token t, all heads.
void RotateToken(const RopeParams& p, int64_t t, const double* frequencies, int64_t first,
                 int64_t n) {
  const int64_t half = p.src.shape[2] / 2;
  float cosine[kPairs], sine[kPairs];
  HWY_DYNAMIC_DISPATCH(RopeAngles)
  (p.positions.as<int64_t>()[t], frequencies + first, n, p.config.hf_parity, cosine, sine);
  for (int64_t i = 0; p.inverse && i < n; ++i) sine[i] = -sine[i];
  for (int64_t h = 0; h < p.src.shape[1]; ++h) {
    const float* src = Ptr(p.src, t, h, first);
    float* dst = Ptr(p.dst, t, h, first);
    HWY_DYNAMIC_DISPATCH(RopeTurn)(src, src + half, dst, dst + half, cosine, sine, n, p.accumulate);
  }
}

}  // namespace

absl::Status Backend::Run(const RopeParams& p, Workspace, ExecContext& context) {
  const int64_t half = p.src.shape[2] / 2;
  std::vector<double> frequencies = RopeInverseFrequencies(p.config, p.src.shape[2]);
  frequencies.resize((half + kPairs - 1) / kPairs * kPairs);
  context.parallel.Run(p.src.shape[0], [&](int64_t begin, int64_t end, int) {
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t first = 0; first < half; first += kPairs) {
        RotateToken(p, t, frequencies.data(), first, std::min(kPairs, half - first));
      }
    }
  });
  return absl::OkStatus();
}

}  // namespace upipe::kernels::cpu
#endif  // HWY_ONCE
