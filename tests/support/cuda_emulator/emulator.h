// Runs CUDA kernels on the CPU, one block after another, each thread of a block on a fiber of its
// own, and stops at what a GPU would only sometimes punish: a barrier or a warp exchange that some
// thread misses, shuffles from lanes that do not take part, more shared memory than there is.
// Shared memory starts as NaN in every block. A grid runs on the OS thread that launches it; OS
// threads may launch at once.
//
// Kernels reach it through include/cuda_runtime.h and kernels/cuda/launch.h. Emulated twins of
// warp-wide instructions are written with WarpCollective or WarpgroupCollective.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

struct uint3 {
  unsigned x, y, z;
};
struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1)  // NOLINT: implicit, as in CUDA
      : x(x), y(y), z(z) {}
};

namespace upipe::cuda_emulator {

// The order in which the threads of a block get their turns: what a kernel computes may not depend
// on it.
enum class Order { kAscending, kDescending };

}  // namespace upipe::cuda_emulator

// What a stream is here. After its first error it runs nothing more.
struct CUstream_st {
  upipe::cuda_emulator::Order order = upipe::cuda_emulator::Order::kAscending;
  std::string error;
  // Of each launch only so many blocks run, the last along x: for grids over more elements than a
  // CPU gets through, whose offsets are to be tested.
  std::optional<unsigned> last_blocks;
};
using cudaStream_t = CUstream_st*;

extern constinit thread_local uint3 threadIdx, blockIdx;
extern constinit thread_local dim3 blockDim, gridDim;
inline constexpr int warpSize = 32;

namespace upipe::cuda_emulator {

inline constexpr int kWarpSize = 32;
inline constexpr int kWarpgroupSize = 128;
inline constexpr size_t kSharedBytesMax = 232448;       // of a block, on sm_90
inline constexpr size_t kStaticSharedBytesMax = 49152;  // of it, of variables

// Where a kernel calls something that can go wrong.
struct Site {
  const char* file;
  int line;
};

// Runs kernel(call) once for every thread of the grid. The stream takes the first error: the limits
// that a launch breaks, or what went wrong in which block, with file and line of the kernel.
void RunGrid(dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream,
             void (*kernel)(const void* call), const void* call);

// What follows is called by threads of a running kernel only.

int ThreadIndex();  // in the block, x fastest
// A number that no other block on this OS thread had or will have.
int64_t BlockSerial();
inline int LaneIndex() { return ThreadIndex() % kWarpSize; }

// Returns when every thread of the block has come here, to the same call.
void SyncBlock(Site site);

// Returns when ready(arg) is true; other threads run until then.
void WaitUntil(bool (*ready)(const void* arg), const void* arg, Site site);

// Ends the launch with an error that names thread, block and site.
[[noreturn]] void Fail(const char* what, Site site);

// What the threads of a collective brought, and which of them take part.
using CollectiveBody = void (*)(void* const* threads, unsigned mask);
void Meet(int first_thread, int num_threads, unsigned mask, void* mine, CollectiveBody body,
          Site site);

// Returns when every lane of `mask` has come here, to the same call, and body(lanes, mask), run
// once, has read and written what each lane brought: lanes[i] is that of lane i, null outside the
// mask.
template <typename T, typename Body>
void WarpCollective(unsigned mask, T& mine, Body, Site site) {
  const int lane = LaneIndex();
  Meet(
      ThreadIndex() - lane, kWarpSize, mask, &mine,
      [](void* const* threads, unsigned mask) {
        T* lanes[kWarpSize];
        for (int i = 0; i < kWarpSize; ++i) lanes[i] = static_cast<T*>(threads[i]);
        Body{}(lanes, mask);
      },
      site);
}

// The same for the 128 threads of a warpgroup, body(threads).
template <typename T, typename Body>
void WarpgroupCollective(T& mine, Body, Site site) {
  const int index = ThreadIndex() % kWarpgroupSize;
  Meet(
      ThreadIndex() - index, kWarpgroupSize, 0xffffffffu, &mine,
      [](void* const* threads, unsigned) {
        T* all[kWarpgroupSize];
        for (int i = 0; i < kWarpgroupSize; ++i) all[i] = static_cast<T*>(threads[i]);
        Body{}(all);
      },
      site);
}

void* DynamicSharedBytes();
void* SharedBytes(const void* declaration, size_t bytes);

// The block's variable of that declaration: NaN bytes until the block writes it.
template <typename T>
T& SharedVariable(const void* declaration) {
  return *static_cast<T*>(SharedBytes(declaration, sizeof(T)));
}

}  // namespace upipe::cuda_emulator
