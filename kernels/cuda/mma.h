// Instructions of the GPU that C++ has no name for: tensor core products, matrix loads from shared
// memory, copies into it that run beside arithmetic, barriers of some warps, the fast 2^x. Kernels
// use them through here only; built for the CPU, the same functions come from the emulator's
// <emulated_mma.h>, plain C++ and tested against a plain product.
//
// A warp holds a matrix in fragments. Of lane l, g = l / 4 and t = l % 4:
//   a [16, 16] bf16: a[0] row g, a[1] row g + 8, columns 2t, 2t + 1; a[2], a[3] the same, columns
//                    + 8. The lower half of a word is the lower column.
//   b [16, 8] bf16:  b0 rows 2t, 2t + 1, b1 rows 2t + 8, 2t + 9, of column g
//   c [16, 8] fp32:  c[0], c[1] row g, columns 2t, 2t + 1; c[2], c[3] row g + 8
#pragma once

#ifdef __CUDACC__

#include <cuda_runtime.h>

#include <cstdint>

namespace upipe::kernels::cuda {

// A byte of shared memory. Sums and bitwise operations with offsets are addresses again.
using SharedAddress = uint32_t;

__device__ __forceinline__ SharedAddress AddressInShared(const void* shared) {
  return static_cast<SharedAddress>(__cvta_generic_to_shared(shared));
}

// c += a b.
__device__ __forceinline__ void MultiplyAdd(const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                            float (&c)[4]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Four 8 x 8 matrices of bf16. Lane l gives the address of row l % 8 of matrix l / 8: 16 bytes,
// aligned to 16. out[i] is, of matrix i, row l / 4, columns 2 (l % 4) and the next. Every lane of
// the warp calls it.
__device__ __forceinline__ void LoadMatrices(SharedAddress row, uint32_t (&out)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(row)
               : "memory");
}

// As LoadMatrices, each matrix transposed: out[i] is rows 2 (l % 4) and the next of column l / 4.
__device__ __forceinline__ void LoadMatricesTransposed(SharedAddress row, uint32_t (&out)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(row)
               : "memory");
}

// Starts a copy of 16 bytes, both addresses aligned to 16, or of as many zeros where not `present`,
// which leaves `from` unread. It is there for this thread after WaitForCopies, for others after a
// barrier behind that.
__device__ __forceinline__ void CopyAsync16(const void* from, bool present, SharedAddress to) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(present ? 16 : 0)
               : "memory");
}

// The same of 4 bytes.
__device__ __forceinline__ void CopyAsync4(const void* from, bool present, SharedAddress to) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from),
               "r"(present ? 4 : 0)
               : "memory");
}

// Makes the copies this thread started since the last call one group.
__device__ __forceinline__ void CommitCopies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits for all groups of this thread but the kLeft newest.
template <int kLeft>
__device__ __forceinline__ void WaitForCopies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
}

// Barrier `index`, 1 to 15, of the block: returns when `threads` threads, whole warps, have come to
// it, and what they wrote to shared memory before can be read. Comes from one place or from
// several.
__device__ __forceinline__ void SyncThreads(int index, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(index), "r"(threads) : "memory");
}

// Two numbers rounded to bf16, nearest even, `low` in the lower half.
__device__ __forceinline__ uint32_t PackBf16(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// 2^x to 2 units in the last place; 0 where the result is denormal.
__device__ __forceinline__ float Exp2(float x) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
  return power;
}

}  // namespace upipe::kernels::cuda

#else
#include <emulated_mma.h>
#endif
