// Vector loads and stores of fp32 and bf16 rows with tails, sums, exp, and sine and cosine, for
// every Highway target. Included once per target.
#if defined(UPIPE_KERNELS_CPU_SIMD_MATH_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef UPIPE_KERNELS_CPU_SIMD_MATH_INL_H_
#undef UPIPE_KERNELS_CPU_SIMD_MATH_INL_H_
#else
#define UPIPE_KERNELS_CPU_SIMD_MATH_INL_H_
#endif

#include <cstddef>
#include <cstring>

#include "hwy/highway.h"
#include "kernels/api/bfloat16.h"
#include "kernels/api/dtype.h"

HWY_BEFORE_NAMESPACE();
namespace upipe::kernels::cpu {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;
using F32 = hn::ScalableTag<float>;
using I32 = hn::ScalableTag<int32_t>;
using F64 = hn::ScalableTag<double>;
using U32 = hn::ScalableTag<uint32_t>;
using VecF32 = hn::Vec<F32>;
using VecF64 = hn::Vec<F64>;
constexpr size_t kLanes = HWY_LANES(float);

// `count` floats at p, zero beyond; reads nothing beyond.
HWY_INLINE VecF32 LoadFirst(const float* p, size_t count) {
  if (kLanes == 1 || count == kLanes) return hn::LoadU(F32(), p);
  HWY_ALIGN float lanes[kLanes] = {};
  std::memcpy(lanes, p, count * sizeof(float));
  return hn::Load(F32(), lanes);
}

// Writes the first `count` lanes and nothing beyond.
HWY_INLINE void StoreFirst(VecF32 v, float* p, size_t count) {
  if (kLanes == 1 || count == kLanes) return hn::StoreU(v, F32(), p);
  HWY_ALIGN float lanes[kLanes];
  hn::Store(v, F32(), lanes);
  std::memcpy(p, lanes, count * sizeof(float));
}

// kLanes bf16 numbers as fp32, exact.
HWY_INLINE VecF32 LoadVector(const BFloat16* p) {
  const hn::Rebind<uint16_t, F32> d16;
  const auto bits = hn::LoadU(d16, reinterpret_cast<const uint16_t*>(p));
  return hn::BitCast(F32(), hn::ShiftLeft<16>(hn::PromoteTo(U32(), bits)));
}

// Rounds to bf16 as BFloat16::From does: the upper half of each lane is the bf16 number, the lower
// half is anything.
HWY_INLINE hn::Vec<U32> Bf16InUpperHalf(VecF32 v) {
  const U32 d;
  const auto bits = hn::BitCast(d, v);
  const auto bias = hn::Set(d, 0x7fff), quiet = hn::Set(d, 0x400000);
#if HWY_TARGET == HWY_AVX3  // masked instructions, which no Highway op names: 5 instead of 7
  const __m512i up = _mm512_add_epi32(bits.raw, bias.raw);
  const __mmask16 odd = _mm512_test_epi32_mask(bits.raw, _mm512_set1_epi32(0x10000));
  const __m512i rounded = _mm512_mask_sub_epi32(up, odd, up, _mm512_set1_epi32(-1));
  const __mmask16 nan = _mm512_cmp_ps_mask(v.raw, v.raw, _CMP_UNORD_Q);
  return hn::Vec<U32>{_mm512_mask_or_epi32(rounded, nan, bits.raw, quiet.raw)};
#else
  const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(d, 1));
  const auto rounded = hn::Add(bits, hn::Add(odd, bias));
  const auto nan = hn::RebindMask(d, hn::IsNaN(v));
  return hn::IfThenElse(nan, hn::Or(bits, quiet), rounded);
#endif
}

// Stores kLanes bf16 numbers.
HWY_INLINE void StoreVector(VecF32 v, BFloat16* p) {
  const hn::Rebind<uint16_t, F32> d16;
  const auto bits = hn::ShiftRight<16>(Bf16InUpperHalf(v));
  hn::StoreU(hn::TruncateTo(d16, bits), d16, reinterpret_cast<uint16_t*>(p));
}

// What a store of v to this type of memory will hold.
HWY_INLINE VecF32 Rounded(VecF32 v, const float*) { return v; }
HWY_INLINE VecF32 Rounded(VecF32 v, const BFloat16*) {
  return hn::BitCast(F32(), hn::And(Bf16InUpperHalf(v), hn::Set(U32(), 0xffff0000u)));
}

HWY_INLINE VecF32 LoadFirst(const BFloat16* p, size_t count) {
  if (kLanes == 1 || count == kLanes) return LoadVector(p);
  HWY_ALIGN BFloat16 lanes[kLanes] = {};
  std::memcpy(lanes, p, count * sizeof(BFloat16));
  return LoadVector(lanes);
}

HWY_INLINE void StoreFirst(VecF32 v, BFloat16* p, size_t count) {
  if (kLanes == 1 || count == kLanes) return StoreVector(v, p);
  HWY_ALIGN BFloat16 lanes[kLanes];
  StoreVector(v, lanes);
  std::memcpy(p, lanes, count * sizeof(BFloat16));
}

// body(float()) or body(BFloat16()): the storage type as a C++ type.
template <class Body>
HWY_INLINE void WithStorageType(DType dtype, const Body& body) {
  if (dtype == DType::kBFloat16) {
    body(BFloat16());
  } else {
    body(float());
  }
}

// body(i, count) for every vector of [0, n); count < kLanes only for the last.
template <class Body>
HWY_INLINE void ForEachVector(size_t n, const Body& body) {
  size_t i = 0;
  for (; i + kLanes <= n; i += kLanes) body(i, kLanes);
  if (i < n) body(i, n - i);
}

// The sum over [0, n) of what add(i, count, sum) adds to `sum` for each vector; it must leave lanes
// from `count` on as they are. Four partial sums hide the latency of addition.
template <class Add>
HWY_INLINE float SumOver(size_t n, const Add& add) {
  VecF32 sum0 = hn::Zero(F32()), sum1 = sum0, sum2 = sum0, sum3 = sum0;
  size_t i = 0;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes) {
    sum0 = add(i, kLanes, sum0);
    sum1 = add(i + kLanes, kLanes, sum1);
    sum2 = add(i + 2 * kLanes, kLanes, sum2);
    sum3 = add(i + 3 * kLanes, kLanes, sum3);
  }
  for (; i < n; i += kLanes) sum0 = add(i, HWY_MIN(kLanes, n - i), sum0);
  return hn::GetLane(hn::SumOfLanes(F32(), hn::Add(hn::Add(sum0, sum1), hn::Add(sum2, sum3))));
}

// The larger of floor and x; NaN stays NaN (x86 returns the second operand then, generic code the
// first).
HWY_INLINE VecF32 AtLeast(float floor, VecF32 x) {
  const VecF32 least = hn::Set(F32(), floor);
#if HWY_TARGET == HWY_SCALAR
  return hn::IfThenElse(hn::Lt(x, least), least, x);
#else
  return hn::Max(least, x);
#endif
}

// 2^f * 2^n for f in [-0.5, 0.5] and integer n in the low bits of n_bits; relative error 8e-8.
HWY_INLINE VecF32 Exp2OfParts(VecF32 f, hn::Vec<I32> n_bits) {
  const F32 d;
  VecF32 p = hn::Set(d, 1.545316294e-4f);
  p = hn::MulAdd(p, f, hn::Set(d, 1.339086336e-3f));
  p = hn::MulAdd(p, f, hn::Set(d, 9.618082557e-3f));
  p = hn::MulAdd(p, f, hn::Set(d, 5.550357114e-2f));
  p = hn::MulAdd(p, f, hn::Set(d, 2.402265076e-1f));
  p = hn::MulAdd(p, f, hn::Set(d, 6.931471880e-1f));
  p = hn::MulAdd(p, f, hn::Set(d, 1.0f));
  const I32 di;
  return hn::BitCast(d, hn::Add(hn::BitCast(di, p), hn::ShiftLeft<23>(n_bits)));
}

// 2^x for x <= 127; below -126 it stays at 2^-126. NaN stays NaN.
HWY_INLINE VecF32 Exp2(VecF32 x) {
  const F32 d;
  const VecF32 magic = hn::Set(d, 12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  x = AtLeast(-126.0f, x);
  const VecF32 shifted = hn::Add(x, magic);
  return Exp2OfParts(hn::Sub(x, hn::Sub(shifted, magic)), hn::BitCast(I32(), shifted));
}

// e^x for x <= 87; below -87 it stays near 1e-38. NaN stays NaN.
HWY_INLINE VecF32 Exp(VecF32 x) {
  const F32 d;
  const VecF32 magic = hn::Set(d, 12582912.0f);
  const VecF32 log2e = hn::Set(d, 1.44269504f);
  x = AtLeast(-87.0f, x);
  const VecF32 shifted = hn::MulAdd(x, log2e, magic);
  const VecF32 n = hn::Sub(shifted, magic);
  VecF32 r = hn::NegMulAdd(n, hn::Set(d, 0.693359375f),
                           x);  // ln 2 in two parts: the first product is exact
  r = hn::NegMulAdd(n, hn::Set(d, -2.12194440e-4f), r);
  return Exp2OfParts(hn::Mul(r, log2e), hn::BitCast(I32(), shifted));
}

// Cosine and sine of a double angle, |angle| < 2^30, to 1e-11: reduced to [-pi/4, pi/4] in double.
HWY_INLINE void CosSin(VecF64 angle, VecF64& cosine, VecF64& sine) {
  const F64 d;
  const hn::RebindToSigned<F64> di;
  const VecF64 magic = hn::Set(d, 6755399441055744.0);  // 1.5 * 2^52
  const VecF64 shifted = hn::Add(hn::Mul(angle, hn::Set(d, 0.63661977236758134308)), magic);
  const VecF64 n = hn::Sub(shifted, magic);
  // pi/2 in three parts of 33 bits, so that the first two products are exact for n below 2^20 ..
  // 2^30.
  VecF64 r = hn::NegMulAdd(n, hn::Set(d, 1.57079632673412561417e+00), angle);
  r = hn::NegMulAdd(n, hn::Set(d, 6.07710050630396597660e-11), r);
  r = hn::NegMulAdd(n, hn::Set(d, 2.02226624879595063154e-21), r);
  const VecF64 z = hn::Mul(r, r);
  VecF64 s = hn::Set(d, 1.60590438368216145994e-10);
  s = hn::MulAdd(s, z, hn::Set(d, -2.50521083854417187751e-8));
  s = hn::MulAdd(s, z, hn::Set(d, 2.75573192239858906526e-6));
  s = hn::MulAdd(s, z, hn::Set(d, -1.98412698412698412698e-4));
  s = hn::MulAdd(s, z, hn::Set(d, 8.33333333333333333333e-3));
  s = hn::MulAdd(s, z, hn::Set(d, -1.66666666666666666667e-1));
  s = hn::MulAdd(hn::Mul(s, z), r, r);
  VecF64 c = hn::Set(d, 2.08767569878680989792e-9);
  c = hn::MulAdd(c, z, hn::Set(d, -2.75573192239858906526e-7));
  c = hn::MulAdd(c, z, hn::Set(d, 2.48015873015873015873e-5));
  c = hn::MulAdd(c, z, hn::Set(d, -1.38888888888888888889e-3));
  c = hn::MulAdd(c, z, hn::Set(d, 4.16666666666666666667e-2));
  c = hn::MulAdd(c, z, hn::Set(d, -0.5));
  c = hn::MulAdd(c, z, hn::Set(d, 1.0));
  const auto quadrant = hn::BitCast(di, shifted);
  const auto odd =
      hn::MaskFromVec(hn::BitCast(d, hn::Sub(hn::Zero(di), hn::And(quadrant, hn::Set(di, 1)))));
  const auto sign_of_sine = hn::ShiftLeft<62>(hn::And(quadrant, hn::Set(di, 2)));
  const auto sign_of_cosine =
      hn::ShiftLeft<62>(hn::And(hn::Add(quadrant, hn::Set(di, 1)), hn::Set(di, 2)));
  sine = hn::Xor(hn::IfThenElse(odd, c, s), hn::BitCast(d, sign_of_sine));
  cosine = hn::Xor(hn::IfThenElse(odd, s, c), hn::BitCast(d, sign_of_cosine));
}

// True in lane i when begin <= first_lane + i < end.
HWY_INLINE hn::Mask<F32> LanesWithin(int64_t first_lane, int64_t begin, int64_t end) {
  const I32 di;
  const auto lane = hn::Iota(di, static_cast<int32_t>(first_lane));
  const auto before = hn::VecFromMask(di, hn::Lt(lane, hn::Set(di, static_cast<int32_t>(begin))));
  const auto inside = hn::VecFromMask(di, hn::Lt(lane, hn::Set(di, static_cast<int32_t>(end))));
  return hn::RebindMask(F32(), hn::MaskFromVec(hn::AndNot(before, inside)));
}

}  // namespace HWY_NAMESPACE
}  // namespace upipe::kernels::cpu
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
