// What kernel sources use of CUDA, in plain C++: the language's keywords, built-in variables and
// device functions. Threads of a block are fibers of the launching OS thread, see emulator.h.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

#include "tests/support/cuda_emulator/emulator.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(bytes) alignas(bytes)

using std::max;
using std::min;

struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(16) double2 {
  double x, y;
};
struct alignas(8) int2 {
  int x, y;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline int2 make_int2(int x, int y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

// Bits.
inline int __float_as_int(float value) { return std::bit_cast<int>(value); }
inline unsigned __float_as_uint(float value) { return std::bit_cast<unsigned>(value); }
inline float __int_as_float(int bits) { return std::bit_cast<float>(bits); }
inline float __uint_as_float(unsigned bits) { return std::bit_cast<float>(bits); }
inline long long __double_as_longlong(double value) { return std::bit_cast<long long>(value); }
inline double __longlong_as_double(long long bits) { return std::bit_cast<double>(bits); }
inline int __popc(unsigned bits) { return std::popcount(bits); }
inline int __clz(int bits) { return std::countl_zero(static_cast<unsigned>(bits)); }
inline int __ffs(int bits) {
  return bits == 0 ? 0 : std::countr_zero(static_cast<unsigned>(bits)) + 1;
}
inline unsigned __umulhi(unsigned a, unsigned b) {
  return static_cast<unsigned>(uint64_t{a} * b >> 32);
}

// Arithmetic. The fast forms are as exact as the host's.
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline double rsqrt(double x) { return 1.0 / std::sqrt(x); }
inline float __expf(float x) { return std::exp(x); }
inline float __logf(float x) { return std::log(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline double __dadd_rn(double x, double y) { return x + y; }
inline double __dmul_rn(double x, double y) { return x * y; }

// Global memory with a hint to its caches.
template <typename T>
T __ldg(const T* address) {
  return *address;
}
template <typename T>
T __ldcs(const T* address) {
  return *address;
}
template <typename T>
void __stcs(T* address, T value) {
  *address = value;
}

// Barriers and fences.
inline void __syncthreads(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  upipe::cuda_emulator::SyncBlock({file, line});
}
inline void __syncwarp(unsigned mask = 0xffffffffu, const char* file = __builtin_FILE(),
                       int line = __builtin_LINE()) {
  struct Nothing {};
  Nothing nothing;
  upipe::cuda_emulator::WarpCollective<Nothing>(mask, nothing, [](Nothing* const*, unsigned) {},
                                                {file, line});
}
inline void __threadfence() {}
inline void __threadfence_block() {}
[[noreturn]] inline void __trap(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  upipe::cuda_emulator::Fail("trap", {file, line});
}

namespace upipe::cuda_emulator {

// Each lane of the mask names the lane it reads.
template <typename T>
T Shuffle(unsigned mask, T value, int from, Site site) {
  struct Lane {
    T value, result;
    int from;
  };
  Lane lane = {value, value, from};
  WarpCollective<Lane>(
      mask, lane,
      [](Lane* const* lanes, unsigned mask) {
        for (int i = 0; i < kWarpSize; ++i) {
          if ((mask >> i & 1) == 0) continue;
          const int from = lanes[i]->from;
          if ((mask >> from & 1) == 0) Fail("shuffle from a lane outside its mask", {});
          lanes[i]->result = lanes[from]->value;
        }
      },
      site);
  return lane.result;
}

// The votes of the lanes of the mask.
inline unsigned Ballot(unsigned mask, bool vote, Site site) {
  struct Lane {
    bool vote;
    unsigned result;
  };
  Lane lane = {vote, 0};
  WarpCollective<Lane>(
      mask, lane,
      [](Lane* const* lanes, unsigned mask) {
        unsigned votes = 0;
        for (int i = 0; i < kWarpSize; ++i) {
          if ((mask >> i & 1) != 0 && lanes[i]->vote) votes |= 1u << i;
        }
        for (int i = 0; i < kWarpSize; ++i) {
          if ((mask >> i & 1) != 0) lanes[i]->result = votes;
        }
      },
      site);
  return lane.result;
}

// First and last lane of this lane's segment.
inline int SegmentBegin(int width) { return LaneIndex() & ~(width - 1); }

}  // namespace upipe::cuda_emulator

// Shuffles within segments of `width` lanes, a power of two.
template <typename T>
T __shfl_sync(unsigned mask, T value, int from, int width = 32, const char* file = __builtin_FILE(),
              int line = __builtin_LINE()) {
  using namespace upipe::cuda_emulator;
  return Shuffle(mask, value, SegmentBegin(width) + (from & (width - 1)), {file, line});
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32,
                  const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  using namespace upipe::cuda_emulator;
  const int from = LaneIndex() ^ lane_mask;
  return Shuffle(mask, value, from < SegmentBegin(width) + width ? from : LaneIndex(),
                 {file, line});
}
template <typename T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32,
                   const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  using namespace upipe::cuda_emulator;
  const int from = LaneIndex() + static_cast<int>(delta);
  return Shuffle(mask, value, from < SegmentBegin(width) + width ? from : LaneIndex(),
                 {file, line});
}
template <typename T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32,
                 const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  using namespace upipe::cuda_emulator;
  const int from = LaneIndex() - static_cast<int>(delta);
  return Shuffle(mask, value, from >= SegmentBegin(width) ? from : LaneIndex(), {file, line});
}
inline unsigned __ballot_sync(unsigned mask, int vote, const char* file = __builtin_FILE(),
                              int line = __builtin_LINE()) {
  return upipe::cuda_emulator::Ballot(mask, vote != 0, {file, line});
}
inline int __any_sync(unsigned mask, int vote, const char* file = __builtin_FILE(),
                      int line = __builtin_LINE()) {
  return upipe::cuda_emulator::Ballot(mask, vote != 0, {file, line}) != 0;
}
inline int __all_sync(unsigned mask, int vote, const char* file = __builtin_FILE(),
                      int line = __builtin_LINE()) {
  return upipe::cuda_emulator::Ballot(mask, vote != 0, {file, line}) == mask;
}

// Atomics on integers; each returns what was there before.
template <typename T>
requires std::is_integral_v<T> T atomicAdd(T* address, std::type_identity_t<T> value) {
  const T before = *address;
  *address = before + value;
  return before;
}
template <typename T>
requires std::is_integral_v<T> T atomicMin(T* address, std::type_identity_t<T> value) {
  const T before = *address;
  *address = std::min(before, value);
  return before;
}
template <typename T>
requires std::is_integral_v<T> T atomicMax(T* address, std::type_identity_t<T> value) {
  const T before = *address;
  *address = std::max(before, value);
  return before;
}
template <typename T>
requires std::is_integral_v<T> T atomicOr(T* address, std::type_identity_t<T> value) {
  const T before = *address;
  *address = before | value;
  return before;
}
template <typename T>
requires std::is_integral_v<T> T atomicExch(T* address, std::type_identity_t<T> value) {
  const T before = *address;
  *address = value;
  return before;
}
template <typename T>
requires std::is_integral_v<T> T atomicCAS(T* address, std::type_identity_t<T> compare,
                                           std::type_identity_t<T> value) {
  const T before = *address;
  if (before == compare) *address = value;
  return before;
}
