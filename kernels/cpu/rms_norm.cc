// y = h * rstd * weight, h = x or x + residual. A row is read from memory once, forward and
// backward; the second loop over it finds it in cache. Rank 3 is rows of its last dim.
#include <cmath>

#include "kernels/cpu/column_partials.h"
#include "kernels/cpu/cpu_backend.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/rms_norm.cc"
#include "hwy/foreach_target.h"  // includes this file once per target
#include "kernels/cpu/simd_math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace upipe::kernels::cpu {
namespace HWY_NAMESPACE {

HWY_INLINE float InverseRms(float sum_of_squares, double inverse_n, float eps) {
  return static_cast<float>(1.0 / std::sqrt(sum_of_squares * inverse_n + double{eps}));
}

template <typename S>
HWY_INLINE float SumOfSquares(const S* x, size_t n) {
  return SumOver(n, [=](size_t i, size_t count, VecF32 sum) HWY_ATTR {
    const VecF32 v = LoadFirst(x + i, count);
    return hn::MulAdd(v, v, sum);
  });
}

// sum = x + residual, rounded to S; returns the sum of its squares.
template <typename S, typename R>
HWY_INLINE float AddResidual(const S* x, const R* residual, S* sum, size_t n) {
  return SumOver(n, [=](size_t i, size_t count, VecF32 squares) HWY_ATTR {
    const VecF32 h = Rounded(hn::Add(LoadFirst(x + i, count), LoadFirst(residual + i, count)), sum);
    StoreFirst(h, sum + i, count);
    return hn::MulAdd(h, h, squares);
  });
}

// y = h * rstd * weight.
template <typename S>
HWY_INLINE void Normalize(const S* h, const S* weight, S* y, size_t n, float rstd) {
  const VecF32 scale = hn::Set(F32(), rstd);
  ForEachVector(n, [=](size_t i, size_t count) HWY_ATTR {
    const VecF32 normal = hn::Mul(LoadFirst(h + i, count), scale);
    StoreFirst(hn::Mul(normal, LoadFirst(weight + i, count)), y + i, count);
  });
}

template <typename S>
HWY_INLINE void ForwardRow(const RmsNormFwdParams& p, int64_t t, int64_t head, double inverse_n) {
  const size_t n = p.x.shape[2];
  const S* h = Ptr<S>(p.x, t, head);
  float squares;
  if (p.residual.present()) {
    S* sum = Ptr<S>(p.sum, t, head);
    squares = p.residual.dtype == DType::kFloat32
                  ? AddResidual(h, Ptr<float>(p.residual, t, head), sum, n)
                  : AddResidual(h, Ptr<BFloat16>(p.residual, t, head), sum, n);
    h = sum;
  } else {
    squares = SumOfSquares(h, n);
  }
  Normalize(h, p.weight.as<S>(), Ptr<S>(p.y, t, head), n, InverseRms(squares, inverse_n, p.eps));
}

// Tokens [begin, end); all tensors but weight are rank 3.
void RmsNormForward(const RmsNormFwdParams& p, int64_t begin, int64_t end) {
  const double inverse_n = 1.0 / static_cast<double>(p.x.shape[2]);
  WithStorageType(p.x.dtype, [&](auto tag) HWY_ATTR {
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t head = 0; head < p.x.shape[1]; ++head) {
        ForwardRow<decltype(tag)>(p, t, head, inverse_n);
      }
    }
  });
}

// One row of the backward.
template <typename S, typename Dy>
struct BackwardRow {
  const S* x;
  const S* weight;
  const Dy* dy;
  S* dx;
  float* dweight;
  size_t n;
  double inverse_n;
  float eps;
};

// Sums over the row of x^2 and of dy * weight * x, in one loop.
template <typename S, typename Dy>
HWY_INLINE void RowSums(const BackwardRow<S, Dy>& row, float* squares, float* dot) {
  const F32 d;
  VecF32 squares0 = hn::Zero(d), squares1 = squares0, dot0 = squares0, dot1 = squares0;
  const auto add = [&](size_t i, size_t count, VecF32& square_sum, VecF32& dot_sum) HWY_ATTR {
    const VecF32 x = LoadFirst(row.x + i, count);
    const VecF32 scaled = hn::Mul(LoadFirst(row.dy + i, count), LoadFirst(row.weight + i, count));
    square_sum = hn::MulAdd(x, x, square_sum);
    dot_sum = hn::MulAdd(scaled, x, dot_sum);
  };
  size_t i = 0;
  for (; i + 2 * kLanes <= row.n; i += 2 * kLanes) {
    add(i, kLanes, squares0, dot0);
    add(i + kLanes, kLanes, squares1, dot1);
  }
  for (; i < row.n; i += kLanes) add(i, HWY_MIN(kLanes, row.n - i), squares0, dot0);
  *squares = hn::GetLane(hn::SumOfLanes(d, hn::Add(squares0, squares1)));
  *dot = hn::GetLane(hn::SumOfLanes(d, hn::Add(dot0, dot1)));
}

// dx = (accumulate ? dx : 0) + rstd * (dy * weight - x * rstd^2 * mean(dy * weight * x));
// dweight += dy * x * rstd.
template <bool kAccumulate, typename S, typename Dy>
HWY_INLINE void Gradients(const BackwardRow<S, Dy>& row) {
  float squares, dot;
  RowSums(row, &squares, &dot);
  const float rstd = InverseRms(squares, row.inverse_n, row.eps);
  const float mean = static_cast<float>(dot * row.inverse_n);
  const VecF32 factor = hn::Set(F32(), mean * rstd * rstd);
  const VecF32 scale = hn::Set(F32(), rstd);
  ForEachVector(row.n, [=](size_t i, size_t count) HWY_ATTR {
    const VecF32 x = LoadFirst(row.x + i, count), dy = LoadFirst(row.dy + i, count);
    const VecF32 scaled = hn::Mul(dy, LoadFirst(row.weight + i, count));
    const VecF32 gradient = hn::NegMulAdd(x, factor, scaled);
    const VecF32 dweight = LoadFirst(row.dweight + i, count);
    if constexpr (kAccumulate) {
      StoreFirst(hn::MulAdd(gradient, scale, LoadFirst(row.dx + i, count)), row.dx + i, count);
    } else {
      StoreFirst(hn::Mul(gradient, scale), row.dx + i, count);
    }
    StoreFirst(hn::MulAdd(dy, hn::Mul(x, scale), dweight), row.dweight + i, count);
  });
}

template <typename S, typename Dy>
HWY_INLINE void BackwardRows(const RmsNormBwdParams& p, int64_t first, int64_t last,
                             float* dweight) {
  const int64_t heads = p.x.shape[1];
  const double inverse_n = 1.0 / static_cast<double>(p.x.shape[2]);
  for (int64_t index = first; index < last; ++index) {
    const int64_t t = index / heads, head = index % heads;
    const BackwardRow<S, Dy> row = {.x = Ptr<S>(p.x, t, head),
                                    .weight = p.weight.as<S>(),
                                    .dy = Ptr<Dy>(p.dy, t, head),
                                    .dx = Ptr<S>(p.dx, t, head),
                                    .dweight = dweight,
                                    .n = static_cast<size_t>(p.x.shape[2]),
                                    .inverse_n = inverse_n,
                                    .eps = p.eps};
    if (p.accumulate) {
      Gradients<true>(row);
    } else {
      Gradients<false>(row);
    }
  }
}

// Rows [first, last) of [tokens * heads]; all tensors but weight and dweight are rank 3.
void RmsNormBackward(const RmsNormBwdParams& p, int64_t first, int64_t last, float* dweight) {
  WithStorageType(p.x.dtype, [&](auto tag) HWY_ATTR {
    WithStorageType(p.dy.dtype, [&](auto dy_tag) HWY_ATTR {
      BackwardRows<decltype(tag), decltype(dy_tag)>(p, first, last, dweight);
    });
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace upipe::kernels::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace upipe::kernels::cpu {

HWY_EXPORT(RmsNormForward);
HWY_EXPORT(RmsNormBackward);

absl::Status Backend::Run(const RmsNormFwdParams& params, Workspace, ExecContext& context) {
  RmsNormFwdParams p = params;
  for (TensorView* view : {&p.x, &p.y, &p.residual, &p.sum}) {
    if (view->present()) *view = view->AsTensor3();
  }
  context.parallel.Run(p.x.shape[0], [&](int64_t begin, int64_t end, int) {
    HWY_DYNAMIC_DISPATCH(RmsNormForward)(p, begin, end);
  });
  return absl::OkStatus();
}

namespace {

ColumnPartials WeightGradient(const RmsNormBwdParams& p) {
  const TensorView x = p.x.AsTensor3();
  return ColumnPartials(x.shape[0] * x.shape[1], x.shape[2]);
}

}  // namespace

int64_t Backend::WorkspaceBytes(const RmsNormBwdParams& p) { return WeightGradient(p).bytes(); }

absl::Status Backend::Run(const RmsNormBwdParams& params, Workspace workspace,
                          ExecContext& context) {
  RmsNormBwdParams p = params;
  for (TensorView* view : {&p.x, &p.dy, &p.dx}) *view = view->AsTensor3();
  WeightGradient(p).Accumulate(workspace, context, p.dweight.as<float>(),
                               [&](int64_t first, int64_t last, float* run) {
                                 HWY_DYNAMIC_DISPATCH(RmsNormBackward)(p, first, last, run);
                               });
  return absl::OkStatus();
}

}  // namespace upipe::kernels::cpu
#endif  // HWY_ONCE
