// Ops that only move, cast, fill or draw elements.
#include <algorithm>

#include "kernels/api/bfloat16.h"
#include "kernels/api/counter_normal.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/cpu/row_ops.h"

namespace upipe::kernels::cpu {
namespace {

// body(i, j, k, count): runs of up to kRun contiguous elements that cover the view, split over the
// pool.
template <typename Body>
void ForEachRun(ExecContext& context, const TensorView& view, const Body& body) {
  constexpr int64_t kRun = 16384;
  const int64_t n1 = view.shape[1], n2 = view.shape[2], runs = (n2 + kRun - 1) / kRun;
  context.parallel.Run(view.shape[0] * n1 * runs, [&](int64_t begin, int64_t end, int) {
    for (int64_t index = begin; index < end; ++index) {
      const int64_t row = index / runs, k = index % runs * kRun;
      body(row / n1, row % n1, k, std::min(kRun, n2 - k));
    }
  });
}

template <typename T>
void Fill(const TensorView& dst, T value, ExecContext& context) {
  ForEachRun(context, dst, [&](int64_t i, int64_t j, int64_t k, int64_t count) {
    std::fill_n(Ptr<T>(dst, i, j, k), count, value);
  });
}

}  // namespace

absl::Status Backend::Run(const StridedCopyParams& p, Workspace, ExecContext& context) {
  ForEachRun(context, p.src, [&](int64_t i, int64_t j, int64_t k, int64_t count) {
    CopyRow(p.src.At(i, j, k), p.src.dtype, p.dst.At(i, j, k), p.dst.dtype, count, p.accumulate);
  });
  return absl::OkStatus();
}

absl::Status Backend::Run(const FillParams& p, Workspace, ExecContext& context) {
  const TensorView dst = p.dst.AsTensor3();
  switch (dst.dtype) {
    case DType::kFloat32:
      Fill(dst, static_cast<float>(p.value), context);
      break;
    case DType::kFloat64:
      Fill(dst, p.value, context);
      break;
    case DType::kInt32:
      Fill(dst, static_cast<int32_t>(p.value), context);
      break;
    case DType::kInt64:
      Fill(dst, static_cast<int64_t>(p.value), context);
      break;
    case DType::kBFloat16:
      Fill(dst, BFloat16::From(static_cast<float>(p.value)), context);
      break;
  }
  return absl::OkStatus();
}

absl::Status Backend::Run(const RandomNormalParams& p, Workspace, ExecContext& context) {
  context.parallel.Run(p.dst.shape[0], [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) {
      *Ptr(p.dst, i) =
          static_cast<float>(p.stddev * CounterNormal(p.seed, p.tensor_id, p.first_index + i));
    }
  });
  return absl::OkStatus();
}

}  // namespace upipe::kernels::cpu
