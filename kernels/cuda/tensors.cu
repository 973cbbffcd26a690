// Ops that only move, fill or draw elements. Each element is read and written once: the floor is
// the bytes of src and dst. Grid and blocks are those of RowTiling (launch_shape.h); no shared
// memory.
#include <bit>

#include "kernels/api/bfloat16.h"
#include "kernels/cuda/cuda_kernels.h"
#include "kernels/cuda/elements.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/launch_shape.h"
#include "kernels/cuda/sin_cos.cuh"

namespace upipe::kernels::cuda {
namespace {

template <typename From, typename To, int N>
__global__ void __launch_bounds__(kBlockThreads)
    strided_copy(RowTiling tiling, Rows<const From> src, Rows<To> dst) {
  MoveRows(
      tiling, [&](int64_t i, int64_t j, int64_t v) { return Load<N>(src.At(i, j, v * N)); },
      [&](int64_t i, int64_t j, int64_t v, const Vector<From, N>& values) {
        if constexpr (std::is_same_v<From, To>) {
          Store(dst.At(i, j, v * N), values);
        } else {
          Vector<To, N> converted;
          UPIPE_UNROLL
          for (int e = 0; e < N; ++e) converted.Set(e, values[e]);
          Store(dst.At(i, j, v * N), converted);
        }
      });
}

// dst += src, summed in fp32.
template <typename From, typename To, int N>
__global__ void __launch_bounds__(kBlockThreads)
    strided_add(RowTiling tiling, Rows<const From> src, Rows<To> dst) {
  struct Pair {
    Vector<From, N> src;
    Vector<To, N> dst;
  };
  MoveRows(
      tiling,
      [&](int64_t i, int64_t j, int64_t v) {
        return Pair{Load<N>(src.At(i, j, v * N)), Load<N>(dst.At(i, j, v * N))};
      },
      [&](int64_t i, int64_t j, int64_t v, Pair& values) {
        UPIPE_UNROLL
        for (int e = 0; e < N; ++e) values.dst.Set(e, values.dst[e] + values.src[e]);
        Store(dst.At(i, j, v * N), values.dst);
      });
}

template <typename From, typename To>
void Copy(const StridedCopyParams& p, bool aligned, const LaunchContext& context) {
  using Narrowest = std::conditional_t<sizeof(From) < sizeof(To), From, To>;
  WithWidth<Narrowest>(aligned, [&](auto width) {
    constexpr int kN = decltype(width)::value;
    const RowTiling tiling = TileRows(p.src, kN);
    const auto kernel = p.accumulate ? strided_add<From, To, kN> : strided_copy<From, To, kN>;
    Launch(kernel, tiling.num_blocks, BlockOf(tiling), 0, context.stream, tiling,
           RowsOf<const From>(p.src), RowsOf<To>(p.dst));
  });
}

// Bits is as wide as an element.
template <typename Bits, int N>
__global__ void __launch_bounds__(kBlockThreads)
    fill(RowTiling tiling, Rows<Bits> dst, Bits value) {
  struct alignas(N * sizeof(Bits)) Access {
    Bits elements[N];
  };
  Access access;
  UPIPE_UNROLL
  for (int e = 0; e < N; ++e) access.elements[e] = value;
  MoveRows(
      tiling, [](int64_t, int64_t, int64_t) { return 0; },
      [&](int64_t i, int64_t j, int64_t v, int) {
        *reinterpret_cast<Access*>(dst.At(i, j, v * N)) = access;
      });
}

template <typename Bits>
void Fill(const TensorView& dst, Bits value, const LaunchContext& context) {
  constexpr int kWidth = 16 / sizeof(Bits);
  WithWidth<Bits>(RowsAligned({dst}, kWidth), [&](auto width) {
    constexpr int kN = decltype(width)::value;
    const RowTiling tiling = TileRows(dst, kN);
    Launch(fill<Bits, kN>, tiling.num_blocks, BlockOf(tiling), 0, context.stream, tiling,
           RowsOf<Bits>(dst), value);
  });
}

struct NormalSource {
  uint64_t seed, tensor_id;
  int64_t first_index;
  float stddev;
};

struct Words {
  unsigned word[4];
};

// Ten rounds of Philox4x32, as kernels/api/counter_normal.h has them.
__device__ Words Philox4x32(Words counter, unsigned key0, unsigned key1) {
  UPIPE_UNROLL
  for (int round = 0; round < 10; ++round) {
    const unsigned high0 = __umulhi(0xD2511F53u, counter.word[0]);
    const unsigned high1 = __umulhi(0xCD9E8D57u, counter.word[2]);
    counter = {{high1 ^ counter.word[1] ^ key0, 0xCD9E8D57u * counter.word[2],
                high0 ^ counter.word[3] ^ key1, 0xD2511F53u * counter.word[0]}};
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return counter;
}

// One thread draws one number: about 200 operations, 60 of them in double, for 4 bytes written.
__global__ void __launch_bounds__(kBlockThreads)
    random_normal(float* dst, int64_t n, NormalSource source) {
  const int64_t i = int64_t{blockIdx.x} * kBlockThreads + threadIdx.x;
  if (i >= n) return;
  const auto low = [](uint64_t word) { return static_cast<unsigned>(word); };
  const auto high = [](uint64_t word) { return static_cast<unsigned>(word >> 32); };
  const auto index = static_cast<uint64_t>(source.first_index + i);
  const Words bits =
      Philox4x32({{low(index), high(index), low(source.tensor_id), high(source.tensor_id)}},
                 low(source.seed), high(source.seed));
  const auto unit53 = [](unsigned upper, unsigned lower) {
    return static_cast<double>(uint64_t{upper} << 21 | lower >> 11);
  };
  constexpr double kUnit = 1.0 / 9007199254740992.0;  // 2^-53
  constexpr double kTwoPi = 6.28318530717958647692;
  const double u = (unit53(bits.word[0], bits.word[1]) + 0.5) * kUnit;
  const double v = unit53(bits.word[2], bits.word[3]) * kUnit;
  dst[i] = static_cast<float>(source.stddev * (sqrt(-2 * log(u)) * SinCos(kTwoPi * v).cosine));
}

}  // namespace

void Run(const StridedCopyParams& params, Workspace, const LaunchContext& context) {
  StridedCopyParams p = params;
  MergeRows({&p.src, &p.dst});
  const DType narrowest = SizeOf(p.src.dtype) < SizeOf(p.dst.dtype) ? p.src.dtype : p.dst.dtype;
  const bool aligned = RowsAligned({p.src, p.dst}, WidthOf(narrowest));
  WithStorageType(p.src.dtype, [&](auto from) {
    WithStorageType(p.dst.dtype, [&](auto to) {
      Copy<typename decltype(from)::type, typename decltype(to)::type>(p, aligned, context);
    });
  });
}

void Run(const FillParams& params, Workspace, const LaunchContext& context) {
  TensorView dst = params.dst;
  MergeRows({&dst});
  const double value = params.value;
  switch (dst.dtype) {
    case DType::kFloat32:
      return Fill(dst, std::bit_cast<uint32_t>(static_cast<float>(value)), context);
    case DType::kBFloat16:
      return Fill(dst, BFloat16::From(static_cast<float>(value)).bits, context);
    case DType::kFloat64:
      return Fill(dst, std::bit_cast<uint64_t>(value), context);
    case DType::kInt32:
      return Fill(dst, static_cast<uint32_t>(static_cast<int32_t>(value)), context);
    case DType::kInt64:
      return Fill(dst, static_cast<uint64_t>(static_cast<int64_t>(value)), context);
  }
}

void Run(const RandomNormalParams& p, Workspace, const LaunchContext& context) {
  const int64_t n = p.dst.shape[0];
  Launch(random_normal, NumBlocks(n, kBlockThreads), kBlockThreads, 0, context.stream,
         p.dst.as<float>(), n, NormalSource{p.seed, p.tensor_id, p.first_index, p.stddev});
}

}  // namespace upipe::kernels::cuda
