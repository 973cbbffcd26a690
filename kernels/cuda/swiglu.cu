// out = silu(gate) * up, silu(g) = g / (1 + exp(-g)), and its backward in place. Each element is
// read and written once: the floor is 3 tensors forward, 6 backward. Grid and blocks are those of
// RowTiling (launch_shape.h); no shared memory.
#include "kernels/cuda/cuda_kernels.h"
#include "kernels/cuda/elements.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/launch_shape.h"

namespace upipe::kernels::cuda {
namespace {

template <typename S, int N>
__global__ void __launch_bounds__(kBlockThreads)
    swiglu_fwd(RowTiling tiling, Rows<const S> gate, Rows<const S> up, Rows<S> out) {
  struct Inputs {
    Vector<S, N> gate, up;
  };
  MoveRows(
      tiling,
      [&](int64_t i, int64_t j, int64_t v) {
        return Inputs{Load<N>(gate.At(i, j, v * N)), Load<N>(up.At(i, j, v * N))};
      },
      [&](int64_t i, int64_t j, int64_t v, const Inputs& in) {
        Vector<S, N> result;
        UPIPE_UNROLL
        for (int e = 0; e < N; ++e) {
          const float g = in.gate[e];
          result.Set(e, g / (1 + expf(-g)) * in.up[e]);
        }
        Store(out.At(i, j, v * N), result);
      });
}

// With s = 1 / (1 + exp(-gate)), silu' = s * (1 + gate * (1 - s)).
template <typename S, int N>
__global__ void __launch_bounds__(kBlockThreads)
    swiglu_bwd(RowTiling tiling, Rows<S> dout, Rows<S> gate, Rows<S> up) {
  struct Values {
    Vector<S, N> dout, gate, up;
  };
  MoveRows(
      tiling,
      [&](int64_t i, int64_t j, int64_t v) {
        return Values{Load<N>(dout.At(i, j, v * N)), Load<N>(gate.At(i, j, v * N)),
                      Load<N>(up.At(i, j, v * N))};
      },
      [&](int64_t i, int64_t j, int64_t v, Values& x) {
        UPIPE_UNROLL
        for (int e = 0; e < N; ++e) {
          const float d = x.dout[e], g = x.gate[e], u = x.up[e];
          const float sigmoid = 1 / (1 + expf(-g));
          const float silu = g / (1 + expf(-g));
          x.dout.Set(e, silu * u);
          x.gate.Set(e, d * u * sigmoid * (1 + g * (1 - sigmoid)));
          x.up.Set(e, d * silu);
        }
        Store(dout.At(i, j, v * N), x.dout);
        Store(gate.At(i, j, v * N), x.gate);
        Store(up.At(i, j, v * N), x.up);
      });
}

}  // namespace

void Run(const SwiGluFwdParams& params, Workspace, const LaunchContext& context) {
  SwiGluFwdParams p = params;
  MergeRows({&p.gate, &p.up, &p.out});
  WithStorageType(p.gate.dtype, [&](auto type) {
    using S = typename decltype(type)::type;
    const bool aligned = RowsAligned({p.gate, p.up, p.out}, WidthOf(p.gate.dtype));
    WithWidth<S>(aligned, [&](auto width) {
      constexpr int kN = decltype(width)::value;
      const RowTiling tiling = TileRows(p.gate, kN);
      Launch(swiglu_fwd<S, kN>, tiling.num_blocks, BlockOf(tiling), 0, context.stream, tiling,
             RowsOf<const S>(p.gate), RowsOf<const S>(p.up), RowsOf<S>(p.out));
    });
  });
}

void Run(const SwiGluBwdParams& params, Workspace, const LaunchContext& context) {
  SwiGluBwdParams p = params;
  MergeRows({&p.dout, &p.gate, &p.up});
  WithStorageType(p.gate.dtype, [&](auto type) {
    using S = typename decltype(type)::type;
    const bool aligned = RowsAligned({p.dout, p.gate, p.up}, WidthOf(p.gate.dtype));
    WithWidth<S>(aligned, [&](auto width) {
      constexpr int kN = decltype(width)::value;
      const RowTiling tiling = TileRows(p.gate, kN);
      Launch(swiglu_bwd<S, kN>, tiling.num_blocks, BlockOf(tiling), 0, context.stream, tiling,
             RowsOf<S>(p.dout), RowsOf<S>(p.gate), RowsOf<S>(p.up));
    });
  });
}

}  // namespace upipe::kernels::cuda
