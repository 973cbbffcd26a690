// Gradient norm, the clip rule and AdamW.
#include <cmath>

#include "kernels/cuda/cuda_kernels.h"
#include "kernels/cuda/elements.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/launch_shape.h"
#include "kernels/cuda/workspace_bytes.h"

namespace upipe::kernels::cuda {
namespace {

// The sum over a block in fp64: threads fold by halves, the same every time. 2 KiB of shared
// memory.
__device__ double BlockSum(double value) {
  UPIPE_SHARED(sums, double[kBlockThreads]);
  sums[threadIdx.x] = value;
  for (unsigned half = kBlockThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
  }
  return sums[0];  // of thread 0
}

// A block sums kSquaresBlock elements of x, each read once.
template <int N>
__global__ void __launch_bounds__(kBlockThreads)
    sum_of_squares(const float* x, int64_t n, double* sums) {
  const int64_t first = int64_t{blockIdx.x} * kSquaresBlock;
  const int64_t last = min(n, first + kSquaresBlock);
  double sum = 0;
  for (int64_t i = first + int64_t{threadIdx.x} * N; i < last; i += kBlockThreads * N) {
    const auto values = Load<N>(x + i);
    UPIPE_UNROLL
    for (int e = 0; e < N; ++e) sum += double{values[e]} * values[e];
  }
  sum = BlockSum(sum);
  if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

// One block.
__global__ void __launch_bounds__(kBlockThreads)
    add_sums(const double* sums, int64_t num_sums, double* out) {
  double sum = 0;
  for (int64_t i = threadIdx.x; i < num_sums; i += kBlockThreads) sum += sums[i];
  sum = BlockSum(sum);
  if (threadIdx.x == 0) *out += sum;
}

struct ClipScale {
  const double* sum_of_squares;
  const double* loss_and_count;
  int64_t num_ranges, range_stride;
  float* grad_norm;
  float* scale;
  int32_t* skip;
  float max_norm;
};

// One thread.
__global__ void clip_scale(ClipScale p) {
  double count = 0;
  for (int64_t range = 0; range < p.num_ranges; ++range) {
    count += p.loss_and_count[range * p.range_stride + 1];
  }
  const double norm = sqrt(*p.sum_of_squares) / count;
  const bool skip = !(count > 0) || !std::isfinite(norm);
  const double clip = min(1.0, p.max_norm / (norm + 1e-6));
  *p.grad_norm = static_cast<float>(norm);
  *p.scale = skip ? 0.0f : static_cast<float>(clip / count);
  *p.skip = skip;
}

struct AdamW {
  float* param;
  const float* grad;
  float* m;
  float* v;
  const float* scale;
  const int32_t* skip;
  int64_t n;
  float lr, beta1, beta2, eps, weight_decay;
  float correction1, correction2;  // 1 - beta^step
};

// A thread updates N elements, of which 16 bytes are read and 12 written.
template <int N>
__global__ void __launch_bounds__(kBlockThreads) adamw(AdamW p) {
  const int64_t i = (int64_t{blockIdx.x} * kBlockThreads + threadIdx.x) * N;
  if (i >= p.n || *p.skip != 0) return;
  const float scale = *p.scale;
  auto param = Load<N>(p.param + i), m = Load<N>(p.m + i), v = Load<N>(p.v + i);
  const auto grad = Load<N>(p.grad + i);
  UPIPE_UNROLL
  for (int e = 0; e < N; ++e) {
    const float g = grad[e] * scale;
    m.Set(e, p.beta1 * m[e] + (1 - p.beta1) * g);
    v.Set(e, p.beta2 * v[e] + (1 - p.beta2) * g * g);
    const float update = m[e] / p.correction1 / (sqrtf(v[e] / p.correction2) + p.eps);
    param.Set(e, param[e] - p.lr * (update + p.weight_decay * param[e]));
  }
  Store(p.param + i, param);
  Store(p.m + i, m);
  Store(p.v + i, v);
}

}  // namespace

void Run(const SumOfSquaresParams& p, Workspace workspace, const LaunchContext& context) {
  const int64_t n = p.x.shape[0];
  double* sums = static_cast<double*>(workspace.data);
  const unsigned blocks = NumBlocks(n, kSquaresBlock);
  WithWidth<float>(RowsAligned({p.x}, WidthOf(p.x.dtype)), [&](auto width) {
    Launch(sum_of_squares<decltype(width)::value>, blocks, kBlockThreads, 0, context.stream,
           p.x.as<const float>(), n, sums);
  });
  Launch(add_sums, blocks > 0 ? 1 : 0, kBlockThreads, 0, context.stream, sums, int64_t{blocks},
         p.out.as<double>());
}

void Run(const ClipScaleParams& p, Workspace, const LaunchContext& context) {
  Launch(clip_scale, 1, 1, 0, context.stream,
         ClipScale{p.sum_of_squares.as<const double>(), p.loss_and_count.as<const double>(),
                   p.loss_and_count.shape[0], p.loss_and_count.stride[0], p.grad_norm.as<float>(),
                   p.scale.as<float>(), p.skip.as<int32_t>(), p.max_norm});
}

void Run(const AdamWParams& p, Workspace, const LaunchContext& context) {
  const auto correction = [&](float beta) {
    return static_cast<float>(1 - std::pow(double{beta}, static_cast<double>(p.step)));
  };
  const AdamW call = {p.param.as<float>(),
                      p.grad.as<const float>(),
                      p.m.as<float>(),
                      p.v.as<float>(),
                      p.scale.as<const float>(),
                      p.skip.as<const int32_t>(),
                      p.param.shape[0],
                      p.lr,
                      p.beta1,
                      p.beta2,
                      p.eps,
                      p.weight_decay,
                      correction(p.beta1),
                      correction(p.beta2)};
  WithWidth<float>(RowsAligned({p.param, p.grad, p.m, p.v}, WidthOf(DType::kFloat32)),
                   [&](auto width) {
                     constexpr int kN = decltype(width)::value;
                     Launch(adamw<kN>, NumBlocks(call.n, kBlockThreads * kN), kBlockThreads, 0,
                            context.stream, call);
                   });
}

}  // namespace upipe::kernels::cuda
