// Adds up what ranks sent, term after term. Each term is read once and the sum written once; with
// kTermsMax terms a launch that is (terms + 1) * 4 bytes an element, and as much again for each
// further launch's sum.
#include <algorithm>
#include <cstdint>

#include "engine/comm/nccl/rank_sums.h"
#include "kernels/cuda/launch.h"

namespace upipe::comm {
namespace {

using kernels::cuda::Launch;

constexpr int kBlockThreads = 256;
constexpr int64_t kBlocksMax = 4096;
constexpr int kTermsMax = 16;
constexpr int kVector = 4;  // elements of a 16-byte access

struct Terms {
  const float* terms[kTermsMax];
  int num_terms;
  bool accumulate;
  int64_t count;
  float* sum;
};

__device__ inline float4 Add(float4 a, float4 b) {
  return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}
__device__ inline float Add(float a, float b) { return a + b; }

// T is float, or float4 where all begin at 16 bytes. Threads take every (grid * block)-th of the
// `vectors` from `begin` on. No shared memory.
template <typename T>
__global__ void __launch_bounds__(kBlockThreads)
    SumKernel(Terms p, int64_t begin, int64_t vectors) {
  T* const sum = reinterpret_cast<T*>(p.sum + begin);
  const int64_t step = int64_t{gridDim.x} * kBlockThreads;
  for (int64_t i = int64_t{blockIdx.x} * kBlockThreads + threadIdx.x; i < vectors; i += step) {
    T value = reinterpret_cast<const T*>(p.terms[0] + begin)[i];
    if (p.accumulate) value = Add(sum[i], value);
    for (int t = 1; t < p.num_terms; ++t)
      value = Add(value, reinterpret_cast<const T*>(p.terms[t] + begin)[i]);
    sum[i] = value;
  }
}

// A thread an element; reads num_ranks * 8 bytes and writes 8. No shared memory.
__global__ void __launch_bounds__(kBlockThreads) CombineKernel(Combination p) {
  const int64_t i = int64_t{blockIdx.x} * kBlockThreads + threadIdx.x;
  if (i >= p.count) return;
  double result = p.gathered[i];
  for (int rank = 1; rank < p.num_ranks; ++rank) {
    const double other = p.gathered[rank * p.count + i];
    if (p.op == ReduceOp::kSum) {
      result += other;
    } else if (other != other || other > result) {
      result = other;
    }
  }
  p.values[i] = result;
}

bool IsAligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

template <typename T>
void LaunchOn(const Terms& terms, int64_t begin, int64_t vectors, cudaStream_t stream) {
  const int64_t blocks = (vectors + kBlockThreads - 1) / kBlockThreads;
  Launch(SumKernel<T>, dim3(static_cast<unsigned>(std::min(blocks, kBlocksMax))),
         dim3(kBlockThreads), 0, stream, terms, begin, vectors);
}

}  // namespace

void LaunchSum(const OrderedSum& sum, cudaStream_t stream) {
  bool aligned = IsAligned(sum.sum);
  for (const float* term : sum.terms) aligned = aligned && IsAligned(term);
  const int64_t vectors = aligned ? sum.count / kVector : 0;
  const int num_terms = static_cast<int>(sum.terms.size());
  for (int first = 0; first < num_terms; first += kTermsMax) {
    Terms terms{};
    terms.num_terms = std::min(kTermsMax, num_terms - first);
    terms.accumulate = sum.accumulate || first > 0;
    terms.count = sum.count;
    terms.sum = sum.sum;
    std::copy_n(sum.terms.begin() + first, terms.num_terms, terms.terms);
    LaunchOn<float4>(terms, 0, vectors, stream);
    LaunchOn<float>(terms, vectors * kVector, sum.count - vectors * kVector, stream);
  }
}

void LaunchCombine(const Combination& combination, cudaStream_t stream) {
  const int64_t blocks = (combination.count + kBlockThreads - 1) / kBlockThreads;
  Launch(CombineKernel, dim3(static_cast<unsigned>(blocks)), dim3(kBlockThreads), 0, stream,
         combination);
}

}  // namespace upipe::comm
