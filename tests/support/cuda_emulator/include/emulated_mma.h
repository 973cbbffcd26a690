// Emulated twins of kernels/cuda/mma.h, which says what each does. Copies that run beside
// arithmetic arrive as late as they may: at the wait; until then their destination is NaN.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "tests/support/cuda_emulator/emulator.h"

namespace upipe::cuda_emulator {

inline constexpr unsigned kWholeWarp = 0xffffffffu;

// Number `half` of a pair of bf16.
inline float HalfOf(uint32_t pair, int half) {
  return __bfloat162float(__ushort_as_bfloat16(static_cast<uint16_t>(pair >> 16 * half)));
}

// What a lane brings to c += a b.
struct ProductLane {
  const uint32_t* a;
  uint32_t b[2];
  float* c;
};

inline void MultiplyFragments(ProductLane* const* lanes, unsigned) {
  float a[16][16], b[16][8];
  for (int k = 0; k < 16; ++k) {
    const int pair = k % 8 / 2, upper = k / 8;
    for (int i = 0; i < 16; ++i) {
      a[i][k] = HalfOf(lanes[i % 8 * 4 + pair]->a[i / 8 + 2 * upper], k % 2);
    }
    for (int j = 0; j < 8; ++j) b[k][j] = HalfOf(lanes[j * 4 + pair]->b[upper], k % 2);
  }
  for (int i = 0; i < 16; ++i) {
    float sums[8];
    const auto c = [&](int j) -> float& { return lanes[i % 8 * 4 + j / 2]->c[i / 8 * 2 + j % 2]; };
    for (int j = 0; j < 8; ++j) sums[j] = c(j);
    for (int k = 0; k < 16; ++k) {
      for (int j = 0; j < 8; ++j) sums[j] += a[i][k] * b[k][j];
    }
    for (int j = 0; j < 8; ++j) c(j) = sums[j];
  }
}

// What a lane brings to a load of four matrices, and takes.
struct MatrixLane {
  const uint16_t* row;
  uint32_t* out;
};

template <bool kTransposed>
void LoadFragments(MatrixLane* const* lanes, unsigned) {
  for (int lane = 0; lane < kWarpSize; ++lane) {
    for (int matrix = 0; matrix < 4; ++matrix) {
      const auto number = [&](int which) -> uint32_t {
        const int row = kTransposed ? lane % 4 * 2 + which : lane / 4;
        const int column = kTransposed ? lane / 4 : lane % 4 * 2 + which;
        return lanes[8 * matrix + row]->row[column];
      };
      lanes[lane]->out[matrix] = number(0) | number(1) << 16;
    }
  }
}

struct AsyncCopy {
  const void* from;
  void* to;
  int bytes;
  bool present;
  int group;
};

// Of one thread.
struct AsyncCopies {
  int64_t block = -1;
  int group = 0;  // that is open
  std::vector<AsyncCopy> copies;
};

inline thread_local std::vector<AsyncCopies> async_copies;  // by thread of the block

inline AsyncCopies& CopiesOfThread() {
  const auto thread = static_cast<size_t>(ThreadIndex());
  if (thread >= async_copies.size()) async_copies.resize(thread + 1);
  AsyncCopies& mine = async_copies[thread];
  if (mine.block != BlockSerial()) {
    mine.block = BlockSerial();
    mine.group = 0;
    mine.copies.clear();
  }
  return mine;
}

inline bool IsAligned(const void* address, uintptr_t bytes) {
  return reinterpret_cast<uintptr_t>(address) % bytes == 0;
}

inline void StartCopy(const void* from, bool present, void* to, int bytes, Site site) {
  if (!IsAligned(to, bytes) || !IsAligned(from, bytes))
    Fail("a copy whose addresses are not aligned", site);
  std::memset(to, 0xff, bytes);
  AsyncCopies& mine = CopiesOfThread();
  mine.copies.push_back({from, to, bytes, present, mine.group});
}

// Groups before `end` arrive.
inline void FinishCopies(AsyncCopies& mine, int end) {
  std::erase_if(mine.copies, [end](const AsyncCopy& copy) {
    if (copy.group >= end) return false;
    if (copy.present) {
      std::memcpy(copy.to, copy.from, copy.bytes);
    } else {
      std::memset(copy.to, 0, copy.bytes);
    }
    return true;
  });
}

// A barrier of some warps.
struct NamedBarrier {
  int64_t block = -1;
  int missing = 0;     // 0: nobody waits
  int64_t passed = 0;  // how often
};
inline constexpr int kNamedBarriers = 16;
inline thread_local NamedBarrier named_barriers[kNamedBarriers];

inline void SyncNamedBarrier(int index, int threads, Site site) {
  if (index < 1 || index >= kNamedBarriers || threads % kWarpSize != 0) {
    Fail("there are barriers 1 to 15, of whole warps", site);
  }
  NamedBarrier& barrier = named_barriers[index];
  if (barrier.block != BlockSerial()) barrier = {BlockSerial(), 0, 0};
  if (barrier.missing == 0) barrier.missing = threads;
  if (--barrier.missing == 0) return void(++barrier.passed);
  struct Wait {
    const NamedBarrier* barrier;
    int64_t passed;
  } const wait = {&barrier, barrier.passed};
  WaitUntil(
      [](const void* arg) {
        const auto* wait = static_cast<const Wait*>(arg);
        return wait->barrier->passed != wait->passed;
      },
      &wait, site);
}

}  // namespace upipe::cuda_emulator

namespace upipe::kernels::cuda {

using SharedAddress = uintptr_t;

inline SharedAddress AddressInShared(const void* shared) {
  return reinterpret_cast<SharedAddress>(shared);
}

inline void MultiplyAdd(const uint32_t (&a)[4], uint32_t b0, uint32_t b1, float (&c)[4],
                        const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  cuda_emulator::ProductLane lane = {a, {b0, b1}, c};
  cuda_emulator::WarpCollective(
      cuda_emulator::kWholeWarp, lane,
      [](auto* const* lanes, unsigned mask) { cuda_emulator::MultiplyFragments(lanes, mask); },
      {file, line});
}

inline void LoadMatrices(SharedAddress row, uint32_t (&out)[4], const char* file = __builtin_FILE(),
                         int line = __builtin_LINE()) {
  if (row % 16 != 0) cuda_emulator::Fail("a matrix row that is not aligned", {file, line});
  cuda_emulator::MatrixLane lane = {reinterpret_cast<const uint16_t*>(row), out};
  cuda_emulator::WarpCollective(
      cuda_emulator::kWholeWarp, lane,
      [](auto* const* lanes, unsigned mask) { cuda_emulator::LoadFragments<false>(lanes, mask); },
      {file, line});
}

inline void LoadMatricesTransposed(SharedAddress row, uint32_t (&out)[4],
                                   const char* file = __builtin_FILE(),
                                   int line = __builtin_LINE()) {
  if (row % 16 != 0) cuda_emulator::Fail("a matrix row that is not aligned", {file, line});
  cuda_emulator::MatrixLane lane = {reinterpret_cast<const uint16_t*>(row), out};
  cuda_emulator::WarpCollective(
      cuda_emulator::kWholeWarp, lane,
      [](auto* const* lanes, unsigned mask) { cuda_emulator::LoadFragments<true>(lanes, mask); },
      {file, line});
}

inline void CopyAsync16(const void* from, bool present, SharedAddress to,
                        const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  cuda_emulator::StartCopy(from, present, reinterpret_cast<void*>(to), 16, {file, line});
}

inline void CopyAsync4(const void* from, bool present, SharedAddress to,
                       const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  cuda_emulator::StartCopy(from, present, reinterpret_cast<void*>(to), 4, {file, line});
}

inline void CommitCopies() { ++cuda_emulator::CopiesOfThread().group; }

template <int kLeft>
void WaitForCopies() {
  cuda_emulator::AsyncCopies& mine = cuda_emulator::CopiesOfThread();
  cuda_emulator::FinishCopies(mine, mine.group - kLeft);
}

inline void SyncThreads(int index, int threads, const char* file = __builtin_FILE(),
                        int line = __builtin_LINE()) {
  cuda_emulator::SyncNamedBarrier(index, threads, {file, line});
}

inline uint32_t PackBf16(float low, float high) {
  return __bfloat16_as_ushort(__float2bfloat16_rn(low)) |
         uint32_t{__bfloat16_as_ushort(__float2bfloat16_rn(high))} << 16;
}

inline float Exp2(float x) {
  const float power = std::exp2(x);
  return power < std::numeric_limits<float>::min() ? 0.0f : power;
}

}  // namespace upipe::kernels::cuda
