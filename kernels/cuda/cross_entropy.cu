// Summed token losses and their gradient, which may lie over the logits. Logits are read once for
// the losses and once more for the gradient.
#include "kernels/cuda/cuda_kernels.h"
#include "kernels/cuda/elements.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/launch_shape.h"
#include "kernels/cuda/report_fault.cuh"
#include "kernels/cuda/softmax.cuh"

namespace upipe::kernels::cuda {
namespace {

struct CrossEntropy {
  const float* logits;
  int64_t logits_stride, vocab;
  const int32_t* labels;
  double* losses;  // [rows]
  int64_t dlogits_stride;
  bool over_logits;  // the gradient begins where the logits do
  int64_t* fault;
};

// Maximum and sum of exponentials of a row, the same in every thread.
template <int N>
__device__ SoftmaxSum RowSoftmax(const float* logits, int64_t vocab) {
  UPIPE_SHARED(parts, SoftmaxSum[kBlockThreads]);
  SoftmaxSum mine = {-INFINITY, 0};
  for (int64_t k = int64_t{threadIdx.x} * N; k < vocab; k += kBlockThreads * N) {
    const auto values = Load<N>(logits + k);
    float largest = values[0];
    UPIPE_UNROLL
    for (int e = 1; e < N; ++e) largest = fmaxf(largest, values[e]);
    SoftmaxSum part = {largest, 0};
    UPIPE_UNROLL
    for (int e = 0; e < N; ++e) part.sum += ExpDifference(values[e], largest);
    mine = Merge(mine, part);
  }
  parts[threadIdx.x] = mine;
  for (unsigned half = kBlockThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) {
      parts[threadIdx.x] = Merge(parts[threadIdx.x], parts[threadIdx.x + half]);
    }
  }
  __syncthreads();
  return parts[0];
}

// dlogits = softmax - one at the label, or zeros without one. A step of the block reads its logits,
// and before them the label's, before it writes: where the gradient lies over them it covers only
// what has been read.
template <typename S, int N>
__device__ void WriteGradient(const CrossEntropy& p, const float* logits, SoftmaxSum softmax,
                              int32_t label, S* dlogits) {
  const float inverse = 1 / softmax.sum;
  for (int64_t first = 0; first < p.vocab; first += kBlockThreads * N) {
    const int64_t k = first + int64_t{threadIdx.x} * N;
    Vector<S, N> gradient;
    if (k < p.vocab) {
      Vector<float, N> values = {};
      if (label >= 0) values = Load<N>(logits + k);
      UPIPE_UNROLL
      for (int e = 0; e < N; ++e) {
        const float one = k + e == label ? 1.0f : 0.0f;
        const float softmax_e = ExpDifference(values[e], softmax.max) * inverse;
        gradient.Set(e, label >= 0 ? softmax_e - one : 0.0f);
      }
    }
    if (p.over_logits) __syncthreads();
    if (k < p.vocab) Store(dlogits + k, gradient);
  }
}

// A block takes a row. 2 KiB of shared memory. Reads 8 bytes and writes sizeof(S) per logit, half
// of the reading without a gradient.
template <typename S, int N>
__global__ void __launch_bounds__(kBlockThreads) cross_entropy_rows(CrossEntropy p, S* dlogits) {
  const int64_t row = blockIdx.x;
  int32_t label = p.labels[row];
  const float* logits = p.logits + row * p.logits_stride;
  if (label >= p.vocab) {
    if (threadIdx.x == 0) ReportFault(p.fault, FaultKind::kCrossEntropyLabel, p.vocab, row, label);
    label = -1;
  }
  SoftmaxSum softmax = {0, 1};
  if (label >= 0) {
    softmax = RowSoftmax<N>(logits, p.vocab);
    if (threadIdx.x == 0) p.losses[row] = LogSumExp(softmax) - logits[label];
  }
  if (dlogits == nullptr) return;
  WriteGradient<S, N>(p, logits, softmax, label, dlogits + row * p.dlogits_stride);
}

// One block: fetches rows together, one thread adds them up in ascending order. 3 KiB of shared
// memory.
__global__ void __launch_bounds__(kBlockThreads)
    cross_entropy_sum(const double* losses, const int32_t* labels, int64_t num_rows, int64_t vocab,
                      double* loss_and_count) {
  UPIPE_SHARED(some_losses, double[kBlockThreads]);
  UPIPE_SHARED(counted, bool[kBlockThreads]);
  double loss = loss_and_count[0], count = loss_and_count[1];
  for (int64_t first = 0; first < num_rows; first += kBlockThreads) {
    const int64_t row = first + threadIdx.x;
    __syncthreads();
    if (row < num_rows) {
      counted[threadIdx.x] = labels[row] >= 0 && labels[row] < vocab;
      some_losses[threadIdx.x] = counted[threadIdx.x] ? losses[row] : 0;
    }
    __syncthreads();
    const int64_t rows = min(int64_t{kBlockThreads}, num_rows - first);
    for (int64_t i = 0; i < rows && threadIdx.x == 0; ++i) {
      if (!counted[i]) continue;
      loss += some_losses[i];
      count += 1;
    }
  }
  if (threadIdx.x != 0) return;
  loss_and_count[0] = loss;
  loss_and_count[1] = count;
}

}  // namespace

void Run(const CrossEntropyParams& p, Workspace workspace, const LaunchContext& context) {
  const int64_t num_rows = p.logits.shape[0], vocab = p.logits.shape[1];
  double* losses = static_cast<double*>(workspace.data);
  const CrossEntropy call = {p.logits.as<const float>(),
                             p.logits.stride[0],
                             vocab,
                             p.labels.as<const int32_t>(),
                             losses,
                             p.dlogits.stride[0],
                             p.dlogits.data == p.logits.data,
                             context.fault};
  WithStorageType(p.dlogits.present() ? p.dlogits.dtype : DType::kFloat32, [&](auto type) {
    using S = typename decltype(type)::type;
    // Four logits a thread, whatever the gradient's type.
    WithWidth<float>(RowsAligned({p.logits, p.dlogits}, WidthOf(DType::kFloat32)), [&](auto width) {
      Launch(cross_entropy_rows<S, decltype(width)::value>, NumBlocks(num_rows, 1), kBlockThreads,
             0, context.stream, call, p.dlogits.as<S>());
    });
  });
  if (num_rows == 0) return;
  Launch(cross_entropy_sum, 1, kBlockThreads, 0, context.stream, losses, call.labels, num_rows,
         vocab, p.loss_and_count.as<double>());
}

}  // namespace upipe::kernels::cuda
