// y = x * rstd * weight. The backward takes three passes: rstd of every row, dweight by columns
// (each column sums over rows in one order, whatever the threads), then dx by rows.
#include <algorithm>
#include <cmath>

#include "kernels/cpu/cpu_backend.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/rms_norm.cc"
#include "hwy/foreach_target.h"  // includes this file once per target
#include "kernels/cpu/simd_math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace upipe::kernels::cpu {
namespace HWY_NAMESPACE {

// rstd of one row: 1 / sqrt(mean(x^2) + eps).
float InverseRms(const float* x, size_t n, float eps) {
  VecF32 sum = hn::Zero(F32());
  ForEachVector(n, [&](size_t i, size_t count) HWY_ATTR {
    const VecF32 v = LoadFirst(x + i, count);
    sum = hn::MulAdd(v, v, sum);
  });
  const double total = hn::GetLane(hn::SumOfLanes(F32(), sum));
  return static_cast<float>(1.0 / std::sqrt(total / static_cast<double>(n) + eps));
}

void RmsNormForwardRow(const float* x, const float* weight, float* y, size_t n, float eps) {
  const VecF32 rstd = hn::Set(F32(), InverseRms(x, n, eps));
  ForEachVector(n, [=](size_t i, size_t count) HWY_ATTR {
    const VecF32 normal = hn::Mul(LoadFirst(x + i, count), rstd);
    StoreFirst(hn::Mul(normal, LoadFirst(weight + i, count)), y + i, count);
  });
}

// dx += rstd * (dy * weight - x * rstd * mean(dy * weight * x * rstd)).
void RmsNormBackwardRow(const float* x, const float* weight, const float* dy, float* dx, size_t n,
                        float rstd) {
  VecF32 sum = hn::Zero(F32());
  ForEachVector(n, [&](size_t i, size_t count) HWY_ATTR {
    const VecF32 scaled = hn::Mul(LoadFirst(dy + i, count), LoadFirst(weight + i, count));
    sum = hn::MulAdd(scaled, LoadFirst(x + i, count), sum);
  });
  const float mean = hn::GetLane(hn::SumOfLanes(F32(), sum)) / static_cast<float>(n);
  const VecF32 factor = hn::Set(F32(), mean * rstd * rstd);
  const VecF32 scale = hn::Set(F32(), rstd);
  ForEachVector(n, [=](size_t i, size_t count) HWY_ATTR {
    const VecF32 scaled = hn::Mul(LoadFirst(dy + i, count), LoadFirst(weight + i, count));
    const VecF32 gradient = hn::NegMulAdd(LoadFirst(x + i, count), factor, scaled);
    StoreFirst(hn::MulAdd(gradient, scale, LoadFirst(dx + i, count)), dx + i, count);
  });
}

// dweight[0:n] += dy * x * rstd of one row.
void RmsNormWeightRow(const float* x, const float* dy, float* dweight, size_t n, float rstd) {
  const VecF32 scale = hn::Set(F32(), rstd);
  ForEachVector(n, [=](size_t i, size_t count) HWY_ATTR {
    const VecF32 normal = hn::Mul(LoadFirst(x + i, count), scale);
    const VecF32 sum = LoadFirst(dweight + i, count);
    StoreFirst(hn::MulAdd(LoadFirst(dy + i, count), normal, sum), dweight + i, count);
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace upipe::kernels::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace upipe::kernels::cpu {

HWY_EXPORT(InverseRms);
HWY_EXPORT(RmsNormForwardRow);
HWY_EXPORT(RmsNormBackwardRow);
HWY_EXPORT(RmsNormWeightRow);

namespace {

constexpr int64_t kColumns = 64;    // columns of dweight summed together
constexpr int64_t kRowBlock = 128;  // rows summed before they join the total: keeps fp32 sums short

// dweight[first:last] += the sum over all rows.
void WeightGradient(const RmsNormBwdParams& p, const float* rstd, int64_t first, int64_t last) {
  float total[kColumns] = {};
  for (int64_t begin = 0; begin < p.x.shape[0]; begin += kRowBlock) {
    float sum[kColumns] = {};
    for (int64_t t = begin; t < std::min(p.x.shape[0], begin + kRowBlock); ++t) {
      HWY_DYNAMIC_DISPATCH(RmsNormWeightRow)
      (Ptr(p.x, t, first), Ptr(p.dy, t, first), sum, last - first, rstd[t]);
    }
    for (int64_t i = 0; i < last - first; ++i) total[i] += sum[i];
  }
  for (int64_t i = first; i < last; ++i) *Ptr(p.dweight, i) += total[i - first];
}

}  // namespace

int64_t Backend::WorkspaceBytes(const RmsNormBwdParams& p) { return p.x.shape[0] * sizeof(float); }

absl::Status Backend::Run(const RmsNormFwdParams& p, Workspace, ExecContext& context) {
  context.parallel.Run(p.x.shape[0], [&](int64_t begin, int64_t end, int) {
    for (int64_t t = begin; t < end; ++t) {
      HWY_DYNAMIC_DISPATCH(RmsNormForwardRow)
      (Ptr(p.x, t), p.weight.as<float>(), Ptr(p.y, t), p.x.shape[1], p.eps);
    }
  });
  return absl::OkStatus();
}

absl::Status Backend::Run(const RmsNormBwdParams& p, Workspace workspace, ExecContext& context) {
  const int64_t tokens = p.x.shape[0], d = p.x.shape[1];
  float* rstd = static_cast<float*>(workspace.data);
  context.parallel.Run(tokens, [&](int64_t begin, int64_t end, int) {
    for (int64_t t = begin; t < end; ++t)
      rstd[t] = HWY_DYNAMIC_DISPATCH(InverseRms)(Ptr(p.x, t), d, p.eps);
  });
  context.parallel.Run((d + kColumns - 1) / kColumns, [&](int64_t begin, int64_t end, int) {
    for (int64_t c = begin; c < end; ++c)
      WeightGradient(p, rstd, c * kColumns, std::min(d, (c + 1) * kColumns));
  });
  context.parallel.Run(tokens, [&](int64_t begin, int64_t end, int) {
    for (int64_t t = begin; t < end; ++t) {
      HWY_DYNAMIC_DISPATCH(RmsNormBackwardRow)
      (Ptr(p.x, t), p.weight.as<float>(), Ptr(p.dy, t), Ptr(p.dx, t), d, rstd[t]);
    }
  });
  return absl::OkStatus();
}

}  // namespace upipe::kernels::cpu
#endif  // HWY_ONCE
