// Sums: row-wise dot products, column sums, the fp64 sum of squares (fixed blocks, added in
// ascending order) and the clip rule.
#include <algorithm>
#include <cmath>

#include "kernels/cpu/column_partials.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/cpu/row_ops.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/reductions.cc"
#include "hwy/foreach_target.h"  // includes this file once per target
#include "kernels/cpu/simd_math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace upipe::kernels::cpu {
namespace HWY_NAMESPACE {

template <typename S>
HWY_INLINE float Dot(const S* a, const S* b, size_t n) {
  return SumOver(n, [=](size_t i, size_t count, VecF32 sum) HWY_ATTR {
    return hn::MulAdd(LoadFirst(a + i, count), LoadFirst(b + i, count), sum);
  });
}

// Tokens [begin, end).
void RowDot(const RowDotParams& p, int64_t begin, int64_t end) {
  WithStorageType(p.a.dtype, [&](auto tag) HWY_ATTR {
    using S = decltype(tag);
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t h = 0; h < p.a.shape[1]; ++h) {
        *Ptr(p.out, t, h) = Dot(Ptr<S>(p.a, t, h), Ptr<S>(p.b, t, h), p.a.shape[2]);
      }
    }
  });
}

double SumOfSquaresBlock(const float* x, size_t n) {
  const F64 d;
  const hn::Rebind<float, F64> half;
  const size_t lanes = hn::Lanes(d);
  VecF64 sum = hn::Zero(d);
  size_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    const VecF64 v = hn::PromoteTo(d, hn::LoadU(half, x + i));
    sum = hn::MulAdd(v, v, sum);
  }
  double total = hn::GetLane(hn::SumOfLanes(d, sum));
  for (; i < n; ++i) total += double{x[i]} * x[i];
  return total;
}

}  // namespace HWY_NAMESPACE
}  // namespace upipe::kernels::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace upipe::kernels::cpu {

HWY_EXPORT(RowDot);
HWY_EXPORT(SumOfSquaresBlock);

namespace {

constexpr int64_t kSquaresBlock = 16384;

}  // namespace

absl::Status Backend::Run(const RowDotParams& p, Workspace, ExecContext& context) {
  context.parallel.Run(p.a.shape[0], [&](int64_t begin, int64_t end, int) {
    HWY_DYNAMIC_DISPATCH(RowDot)(p, begin, end);
  });
  return absl::OkStatus();
}

int64_t Backend::WorkspaceBytes(const ColumnSumParams& p) {
  return ColumnPartials(p.x.shape[0], p.x.shape[1]).bytes();
}

absl::Status Backend::Run(const ColumnSumParams& p, Workspace workspace, ExecContext& context) {
  const auto add_rows = [&](int64_t first, int64_t last, float* run) {
    for (int64_t t = first; t < last; ++t) {
      CopyRow(p.x.At(t), p.x.dtype, run, DType::kFloat32, p.x.shape[1], /*accumulate=*/true);
    }
  };
  ColumnPartials(p.x.shape[0], p.x.shape[1])
      .Accumulate(workspace, context, p.out.as<float>(), add_rows);
  return absl::OkStatus();
}

int64_t Backend::WorkspaceBytes(const SumOfSquaresParams& p) {
  return (p.x.shape[0] + kSquaresBlock - 1) / kSquaresBlock * sizeof(double);
}

absl::Status Backend::Run(const SumOfSquaresParams& p, Workspace workspace, ExecContext& context) {
  const int64_t n = p.x.shape[0], blocks = (n + kSquaresBlock - 1) / kSquaresBlock;
  double* sums = static_cast<double*>(workspace.data);
  context.parallel.Run(blocks, [&](int64_t begin, int64_t end, int) {
    for (int64_t block = begin; block < end; ++block) {
      const int64_t first = block * kSquaresBlock;
      sums[block] = HWY_DYNAMIC_DISPATCH(SumOfSquaresBlock)(Ptr(p.x, first),
                                                            std::min(kSquaresBlock, n - first));
    }
  });
  for (int64_t block = 0; block < blocks; ++block) *p.out.as<double>() += sums[block];
  return absl::OkStatus();
}

absl::Status Backend::Run(const ClipScaleParams& p, Workspace, ExecContext&) {
  double count = 0;
  for (int64_t range = 0; range < p.loss_and_count.shape[0]; ++range) {
    count += *Ptr<double>(p.loss_and_count, range, 1);
  }
  const double norm = std::sqrt(*p.sum_of_squares.as<double>()) / count;
  const bool skip = !(count > 0) || !std::isfinite(norm);
  *p.grad_norm.as<float>() = static_cast<float>(norm);
  *p.scale.as<float>() =
      skip ? 0.0f : static_cast<float>(std::min(1.0, p.max_norm / (norm + 1e-6)) / count);
  *p.skip.as<int32_t>() = skip;
  return absl::OkStatus();
}

}  // namespace upipe::kernels::cpu
#endif  // HWY_ONCE
