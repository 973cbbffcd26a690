// Ops that only move, fill or draw elements. Memory-bound: plain loops.
#include <algorithm>
#include <cstring>

#include "kernels/api/counter_normal.h"
#include "kernels/cpu/cpu_backend.h"

namespace upipe::kernels::cpu {
namespace {

// The same elements as [rows, middle, contiguous].
TensorView AsRank3(TensorView view) {
  for (; view.rank < 3; ++view.rank) {
    for (int dim = 2; dim > 0; --dim) {
      view.shape[dim] = view.shape[dim - 1];
      view.stride[dim] = view.stride[dim - 1];
    }
    view.shape[0] = 1;
    view.stride[0] = 0;
  }
  return view;
}

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
void Fill(const FillParams& p, ExecContext& context) {
  const TensorView dst = AsRank3(p.dst);
  ForEachRun(context, dst, [&](int64_t i, int64_t j, int64_t k, int64_t count) {
    std::fill_n(static_cast<T*>(dst.At(i, j, k)), count, static_cast<T>(p.value));
  });
}

}  // namespace

absl::Status Backend::Run(const StridedCopyParams& p, Workspace, ExecContext& context) {
  ForEachRun(context, p.src, [&](int64_t i, int64_t j, int64_t k, int64_t count) {
    const float* from = Ptr(p.src, i, j, k);
    float* to = Ptr(p.dst, i, j, k);
    if (!p.accumulate) {
      std::memcpy(to, from, count * sizeof(float));
    } else {
      for (int64_t e = 0; e < count; ++e) to[e] += from[e];
    }
  });
  return absl::OkStatus();
}

absl::Status Backend::Run(const FillParams& p, Workspace, ExecContext& context) {
  switch (p.dst.dtype) {
    case DType::kFloat32:
      Fill<float>(p, context);
      break;
    case DType::kFloat64:
      Fill<double>(p, context);
      break;
    case DType::kInt32:
      Fill<int32_t>(p, context);
      break;
    case DType::kInt64:
      Fill<int64_t>(p, context);
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
