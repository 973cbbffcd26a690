// Rotary embedding. Angles are formed and reduced in double, once per token for all its heads; the
// rotation is fp32. An exact angle is the sum of that of the position's base, a multiple of
// kStride, and that of the rest, which comes from a table: four products in double instead of a
// cosine and a sine, and the same bits for a position wherever it appears.
#include <algorithm>
#include <vector>

#include "kernels/cpu/cpu_backend.h"
#include "kernels/cpu/rope_table.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/rope.cc"
#include "hwy/foreach_target.h"  // includes this file once per target
#include "kernels/cpu/simd_math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace upipe::kernels::cpu {
namespace HWY_NAMESPACE {

constexpr size_t kLanesF64 = HWY_LANES(double);
constexpr int64_t kPairs = 128;  // pairs turned at a time; a multiple of every vector

// cosine[i], sine[i] of position * frequencies[i]; n is a multiple of 8.
HWY_INLINE void Angles(int64_t position, const double* frequencies, size_t n, double* cosine,
                       double* sine) {
  const F64 d;
  const VecF64 factor = hn::Set(d, static_cast<double>(position));
  for (size_t i = 0; i < n; i += kLanesF64) {
    VecF64 c, s;
    CosSin(hn::Mul(factor, hn::LoadU(d, frequencies + i)), c, s);
    hn::StoreU(c, d, cosine + i);
    hn::StoreU(s, d, sine + i);
  }
}

void FillRopeTable(const RopeTable& table, int64_t begin, int64_t end) {
  for (int64_t rest = begin; rest < end; ++rest) {
    Angles(rest, table.frequencies, table.padded, table.cosines(rest), table.sines(rest));
  }
}

// Cosines and sines of one token for pairs [first, first + n), as fp32.
class TokenAngles {
 public:
  TokenAngles(const RopeParams& p, const RopeTable& table, int64_t first, size_t n)
      : hf_parity_(p.config.hf_parity),
        magnitude_(p.config.hf_parity ? static_cast<float>(RopeMagnitude(p.config))
                                      : RopeMagnitude(p.config)),
        table_(table),
        first_(first),
        padded_(HWY_MIN((n + 7) / 8 * 8, static_cast<size_t>(kPairs))) {}

  void Set(int64_t position) {
    if (hf_parity_) {
      SetRounded(position);
    } else {
      SetExact(position);
    }
  }
  const float* cosine() const { return cosine_; }
  const float* sine() const { return sine_; }

 private:
  void SetBase(int64_t base) {
    const F64 d;
    Angles(base, table_.frequencies + first_, padded_, base_cosine_, base_sine_);
    for (size_t i = 0; i < padded_; i += kLanesF64) {
      const VecF64 magnitude = hn::Set(d, magnitude_);
      hn::StoreU(hn::Mul(hn::LoadU(d, base_cosine_ + i), magnitude), d, base_cosine_ + i);
      hn::StoreU(hn::Mul(hn::LoadU(d, base_sine_ + i), magnitude), d, base_sine_ + i);
    }
    base_ = base;
    has_base_ = true;
  }

  // cos(a + b) and sin(a + b), a of the base, b of the rest.
  void SetExact(int64_t position) {
    const F64 d;
    const int64_t base = position & ~(RopeTable::kStride - 1);
    if (!has_base_ || base != base_) {
      SetBase(base);
    }
    const double* rest_cosine = table_.cosines(position - base) + first_;
    const double* rest_sine = table_.sines(position - base) + first_;
    for (size_t i = 0; i < padded_; i += kLanesF64) {
      const VecF64 ca = hn::LoadU(d, base_cosine_ + i), sa = hn::LoadU(d, base_sine_ + i);
      const VecF64 cb = hn::LoadU(d, rest_cosine + i), sb = hn::LoadU(d, rest_sine + i);
      Store(hn::NegMulAdd(sa, sb, hn::Mul(ca, cb)), hn::MulAdd(sa, cb, hn::Mul(ca, sb)), i);
    }
  }

  // As Hugging Face: the factors, the angle, its cosine and sine are fp32 each.
  void SetRounded(int64_t position) {
    const F64 d;
    const VecF64 factor = hn::Set(d, static_cast<double>(static_cast<float>(position)));
    for (size_t i = 0; i < padded_; i += kLanesF64) {
      const VecF64 frequency = Fp32(hn::LoadU(d, table_.frequencies + first_ + i));
      VecF64 c, s;
      CosSin(Fp32(hn::Mul(factor, frequency)), c, s);
      const VecF64 magnitude = hn::Set(d, magnitude_);
      Store(hn::Mul(Fp32(c), magnitude), hn::Mul(Fp32(s), magnitude), i);
    }
  }

  static HWY_INLINE VecF64 Fp32(VecF64 v) {
    return hn::PromoteTo(F64(), hn::DemoteTo(hn::Rebind<float, F64>(), v));
  }

  HWY_INLINE void Store(VecF64 c, VecF64 s, size_t i) {
    const hn::Rebind<float, F64> f32;
    hn::StoreU(hn::DemoteTo(f32, c), f32, cosine_ + i);
    hn::StoreU(hn::DemoteTo(f32, s), f32, sine_ + i);
  }

  const bool hf_parity_;
  const double magnitude_;
  const RopeTable& table_;
  const int64_t first_;
  const size_t padded_;
  bool has_base_ = false;
  int64_t base_ = 0;
  double base_cosine_[kPairs], base_sine_[kPairs];
  float cosine_[kPairs], sine_[kPairs];
};

// Turns the pairs (x[i], y[i]) of one head.
template <bool kAccumulate, typename S, typename D>
HWY_INLINE void Turn(const S* x, const S* y, D* out_x, D* out_y, const TokenAngles& angles,
                     size_t n) {
  const float *cosine = angles.cosine(), *sine = angles.sine();
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

template <bool kAccumulate, typename S, typename D>
HWY_INLINE void TurnTokens(const RopeParams& p, const RopeTable& table, int64_t begin,
                           int64_t end) {
  for (int64_t first = 0; first < table.half; first += kPairs) {
    const size_t n = HWY_MIN(kPairs, table.half - first);
    TokenAngles angles(p, table, first, n);
    for (int64_t t = begin; t < end; ++t) {
      angles.Set(p.positions.as<int64_t>()[t]);
      for (int64_t h = 0; h < p.src.shape[1]; ++h) {
        const S* src = Ptr<S>(p.src, t, h, first);
        D* dst = Ptr<D>(p.dst, t, h, first);
        Turn<kAccumulate>(src, src + table.half, dst, dst + table.half, angles, n);
      }
    }
  }
}

// Tokens [begin, end).
void RopeTokens(const RopeParams& p, const RopeTable& table, int64_t begin, int64_t end) {
  WithStorageType(p.src.dtype, [&](auto tag) HWY_ATTR {
    WithStorageType(p.dst.dtype, [&](auto dst_tag) HWY_ATTR {
      if (p.accumulate) {
        TurnTokens<true, decltype(tag), decltype(dst_tag)>(p, table, begin, end);
      } else {
        TurnTokens<false, decltype(tag), decltype(dst_tag)>(p, table, begin, end);
      }
    });
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace upipe::kernels::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace upipe::kernels::cpu {

HWY_EXPORT(FillRopeTable);
HWY_EXPORT(RopeTokens);

int64_t Backend::WorkspaceBytes(const RopeParams& p) { return RopeTable(p, nullptr).bytes(); }

absl::Status Backend::Run(const RopeParams& p, Workspace workspace, ExecContext& context) {
  if (p.src.num_elements() == 0) return absl::OkStatus();
  const RopeTable table(p, workspace.data);
  const std::vector<double> frequencies = RopeInverseFrequencies(p.config, p.src.shape[2]);
  std::fill_n(table.frequencies, table.padded, 0.0);
  for (int64_t i = 0; i < table.half; ++i) {
    table.frequencies[i] = p.inverse ? -frequencies[i] : frequencies[i];
  }
  if (!p.config.hf_parity) {  // whose angles are rounded, so none is a sum of two
    context.parallel.Run(RopeTable::kStride, [&](int64_t begin, int64_t end, int) {
      HWY_DYNAMIC_DISPATCH(FillRopeTable)(table, begin, end);
    });
  }
  context.parallel.Run(p.src.shape[0], [&](int64_t begin, int64_t end, int) {
    HWY_DYNAMIC_DISPATCH(RopeTokens)(p, table, begin, end);
  });
  return absl::OkStatus();
}

}  // namespace upipe::kernels::cpu
#endif  // HWY_ONCE
