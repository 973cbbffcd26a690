// Rotary embedding, pairs (i, i + head_dim / 2), from any strides to any: between a projection and
// an exchange it is the pack. Angles are formed and reduced in double, once per token and pair for
// all heads of the token.
#include <algorithm>
#include <vector>

#include "common/check.h"
#include "kernels/cuda/cuda_kernels.h"
#include "kernels/cuda/elements.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/launch_shape.h"
#include "kernels/cuda/sin_cos.cuh"

namespace upipe::kernels::cuda {
namespace {

constexpr unsigned kPairsMax = 256;  // of one launch: frequencies travel as kernel parameters
constexpr unsigned kAngles = 1024;   // of a block
constexpr int64_t kBlockElementsMax = int64_t{1} << 31;

struct Turn {
  const int64_t* positions;
  int64_t num_tokens, heads;
  int64_t half;                    // head_dim / 2
  unsigned first_pair, num_pairs;  // of this launch
  unsigned tokens_per_block;
  double magnitude;
  bool hf_parity, inverse, accumulate;
};

struct Frequencies {
  double of_pair[kPairsMax];
};

// magnitude * (cosine, sine) of position * frequency; hf_parity rounds factors, angle, cosine and
// sine to fp32 on the way.
__device__ float2 CosSin(const Turn& turn, int64_t position, double frequency) {
  double angle = static_cast<double>(position) * frequency;
  if (turn.hf_parity) angle = static_cast<float>(position) * static_cast<float>(frequency);
  SinCosPair pair = SinCos(angle);
  if (turn.inverse) pair.sine = -pair.sine;
  if (turn.hf_parity) {
    const float magnitude = static_cast<float>(turn.magnitude);
    return {static_cast<float>(pair.cosine) * magnitude, static_cast<float>(pair.sine) * magnitude};
  }
  return {static_cast<float>(turn.magnitude * pair.cosine),
          static_cast<float>(turn.magnitude * pair.sine)};
}

// A block takes tokens_per_block tokens, all heads, num_pairs pairs: first their angles, 8 KiB of
// shared memory, then N pairs a thread at a time. Reads src, reads (accumulating) and writes dst,
// each once.
template <typename S, typename D, int N>
__global__ void __launch_bounds__(kBlockThreads)
    rope(Turn turn, Rows<const S> src, Rows<D> dst, const Frequencies frequencies) {
  UPIPE_SHARED(angles, float2[kAngles]);
  const int64_t first = int64_t{blockIdx.x} * turn.tokens_per_block;
  const auto tokens =
      static_cast<unsigned>(min(int64_t{turn.tokens_per_block}, turn.num_tokens - first));
  for (unsigned a = threadIdx.x; a < tokens * turn.num_pairs; a += kBlockThreads) {
    const unsigned token = a / turn.num_pairs, pair = a % turn.num_pairs;
    angles[a] = CosSin(turn, turn.positions[first + token], frequencies.of_pair[pair]);
  }
  __syncthreads();
  const auto vectors = static_cast<unsigned>(turn.num_pairs / N);
  const unsigned vectors_of_token = static_cast<unsigned>(turn.heads) * vectors;
  for (unsigned v = threadIdx.x; v < tokens * vectors_of_token; v += kBlockThreads) {
    const unsigned token = v / vectors_of_token, of_token = v % vectors_of_token;
    const int64_t head = of_token / vectors;
    const unsigned pair = of_token % vectors * N;
    const int64_t k = turn.first_pair + pair;
    const auto x = Load<N>(src.At(first + token, head, k));
    const auto y = Load<N>(src.At(first + token, head, k + turn.half));
    D* const to = dst.At(first + token, head, k);
    Vector<D, N> out_x = {}, out_y = {};
    if (turn.accumulate) {
      out_x = Load<N>(to);
      out_y = Load<N>(to + turn.half);
    }
    UPIPE_UNROLL
    for (int e = 0; e < N; ++e) {
      const auto [cosine, sine] = angles[token * turn.num_pairs + pair + e];
      const float turned_x = x[e] * cosine - y[e] * sine;
      const float turned_y = y[e] * cosine + x[e] * sine;
      out_x.Set(e, turn.accumulate ? out_x[e] + turned_x : turned_x);
      out_y.Set(e, turn.accumulate ? out_y[e] + turned_y : turned_y);
    }
    Store(to, out_x);
    Store(to + turn.half, out_y);
  }
}

template <typename S, typename D>
void Rotate(const RopeParams& p, const std::vector<double>& frequencies,
            const LaunchContext& context) {
  const int64_t half = p.src.shape[2] / 2;
  TensorView src_half = p.src, dst_half = p.dst;  // what must be aligned for y as well
  src_half.shape[2] = dst_half.shape[2] = half;
  UPIPE_CHECK(p.src.shape[1] * half <= kBlockElementsMax / kAngles)
      << p.src.shape[1] << " heads of " << 2 * half << " are more than a block counts";
  const bool aligned = RowsAligned({p.src, p.dst, src_half, dst_half}, WidthOf(p.src.dtype));
  for (int64_t first = 0; first < half; first += kPairsMax) {
    const auto pairs = static_cast<unsigned>(std::min<int64_t>(kPairsMax, half - first));
    Turn turn = {.positions = p.positions.as<const int64_t>(),
                 .num_tokens = p.src.shape[0],
                 .heads = p.src.shape[1],
                 .half = half,
                 .first_pair = static_cast<unsigned>(first),
                 .num_pairs = pairs,
                 .tokens_per_block = std::max(1u, kAngles / pairs),
                 .magnitude = RopeMagnitude(p.config),
                 .hf_parity = p.config.hf_parity,
                 .inverse = p.inverse,
                 .accumulate = p.accumulate};
    if (turn.heads == 0) return;
    Frequencies some = {};
    std::copy_n(frequencies.begin() + first, pairs, some.of_pair);
    WithWidth<S>(aligned, [&](auto width) {
      Launch(rope<S, D, decltype(width)::value>, NumBlocks(turn.num_tokens, turn.tokens_per_block),
             kBlockThreads, 0, context.stream, turn, RowsOf<const S>(p.src), RowsOf<D>(p.dst),
             some);
    });
  }
}

}  // namespace

void Run(const RopeParams& p, Workspace, const LaunchContext& context) {
  const std::vector<double> frequencies = RopeInverseFrequencies(p.config, p.src.shape[2]);
  if (p.src.dtype == DType::kFloat32) return Rotate<float, float>(p, frequencies, context);
  if (p.dst.dtype == DType::kFloat32) return Rotate<__nv_bfloat16, float>(p, frequencies, context);
  Rotate<__nv_bfloat16, __nv_bfloat16>(p, frequencies, context);
}

}  // namespace upipe::kernels::cuda
