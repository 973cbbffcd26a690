// How a kernel starts and how it names shared memory: the only way, so that the same source runs
// on a GPU (built by nvcc) and on the CPU (built by the host compiler against
// tests/support/cuda_emulator, which checks barriers, shuffles and shared memory).
//
// Kernel sources include no CUDA header but <cuda_runtime.h> and <cuda_bf16.h>; floating-point
// atomics are not among what the emulator has, since results must not depend on arrival order.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <type_traits>

#ifdef __CUDACC__

// UPIPE_SHARED(name, type): in a kernel or device function, a variable of the block's shared
// memory, uninitialised, e.g. UPIPE_SHARED(partial_sums, float[32]).
#define UPIPE_SHARED(name, ...) __shared__ std::type_identity_t<__VA_ARGS__> name

// Before a loop of a constant number of turns whose arrays must stay in registers.
#define UPIPE_UNROLL _Pragma("unroll")

namespace upipe::kernels::cuda {

// The shared memory given at launch, aligned to 1024 bytes. One array per kernel.
template <typename T>
__device__ __forceinline__ T* DynamicShared() {
  extern __shared__ __align__(1024) unsigned char dynamic_shared_bytes[];
  return reinterpret_cast<T*>(dynamic_shared_bytes);
}

// Starts kernel(args...) on the stream; an empty grid starts nothing. Never blocks. What is wrong
// with a launch is told by cudaGetLastError.
template <typename... Params, typename... Args>
void Launch(void (*kernel)(Params...), dim3 grid, dim3 block, size_t shared_bytes,
            cudaStream_t stream, Args... args) {
  static_assert((std::is_trivially_copyable_v<Params> && ...));
  constexpr size_t kSharedBytesWithoutAsking = 48 * 1024;
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return;
  if (shared_bytes > kSharedBytesWithoutAsking &&
      cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                           cudaFuncAttributeMaxDynamicSharedMemorySize,
                           static_cast<int>(shared_bytes)) != cudaSuccess) {
    return;
  }
  kernel<<<grid, block, shared_bytes, stream>>>(static_cast<Params>(args)...);
}

}  // namespace upipe::kernels::cuda

#else

#include <tuple>

#define UPIPE_SHARED(name, ...)                                                  \
  static constexpr char name##_declaration{};                                    \
  std::type_identity_t<__VA_ARGS__>& name =                                      \
      ::upipe::cuda_emulator::SharedVariable<std::type_identity_t<__VA_ARGS__>>( \
          &name##_declaration)

#define UPIPE_UNROLL

namespace upipe::kernels::cuda {

template <typename T>
T* DynamicShared() {
  return static_cast<T*>(::upipe::cuda_emulator::DynamicSharedBytes());
}

// Runs the whole grid before it returns; what is wrong is told by stream->error.
template <typename... Params, typename... Args>
void Launch(void (*kernel)(Params...), dim3 grid, dim3 block, size_t shared_bytes,
            cudaStream_t stream, Args... args) {
  static_assert((std::is_trivially_copyable_v<Params> && ...));
  static_assert((sizeof(Params) + ... + 0) <= 4096, "kernel parameters are at most 4 KiB");
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return;
  struct Call {
    void (*kernel)(Params...);
    std::tuple<Params...> args;
  };
  const Call call = {kernel, {static_cast<Params>(args)...}};
  ::upipe::cuda_emulator::RunGrid(
      grid, block, shared_bytes, stream,
      [](const void* data) {
        const Call& call = *static_cast<const Call*>(data);
        std::apply(call.kernel, call.args);
      },
      &call);
}

}  // namespace upipe::kernels::cuda

#endif
