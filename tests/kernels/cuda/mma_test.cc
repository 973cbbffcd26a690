// The emulated twins of mma.h, the oracle of kernels on tensor cores, against plain loops over the
// layouts that mma.h writes down.
#include "kernels/cuda/mma.h"

#include <cuda_runtime.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "kernels/api/bfloat16.h"
#include "kernels/cuda/launch.h"

namespace upipe::kernels::cuda {
namespace {

using ::testing::HasSubstr;

uint16_t Bits(float value) { return BFloat16::From(value).bits; }
uint32_t Pair(float low, float high) { return Bits(low) | uint32_t{Bits(high)} << 16; }

template <typename Kernel, typename... Args>
std::string ErrorOf(Kernel kernel, int threads, int shared_bytes, Args... args) {
  CUstream_st stream;
  Launch(kernel, 1, threads, shared_bytes, &stream, args...);
  return stream.error;
}

// Operands of one product, row-major.
struct Product {
  float a[16][16], b[16][8], c[16][8];
};

// Small integers and halves, so that sums are exact in any order.
Product SomeProduct() {
  Product p = {};
  int n = 0;
  for (auto& row : p.a)
    for (float& x : row) x = static_cast<float>(n++ * 37 % 61 - 30) / 2;
  for (auto& row : p.b)
    for (float& x : row) x = static_cast<float>(n++ * 53 % 47 - 20);
  for (auto& row : p.c)
    for (float& x : row) x = static_cast<float>(n++ * 29 % 101);
  return p;
}

// Every warp multiplies the operands of its own.
__global__ void Multiply(const Product* products, float (*out)[16][8]) {
  const Product& p = products[threadIdx.x / 32];
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const auto a = [&](int row, int column) { return Pair(p.a[row][column], p.a[row][column + 1]); };
  const auto b = [&](int row) { return Pair(p.b[row][g], p.b[row + 1][g]); };
  const uint32_t left[4] = {a(g, 2 * t), a(g + 8, 2 * t), a(g, 2 * t + 8), a(g + 8, 2 * t + 8)};
  float c[4] = {p.c[g][2 * t], p.c[g][2 * t + 1], p.c[g + 8][2 * t], p.c[g + 8][2 * t + 1]};
  MultiplyAdd(left, b(2 * t), b(2 * t + 8), c);
  for (int e = 0; e < 4; ++e) out[threadIdx.x / 32][g + e / 2 * 8][2 * t + e % 2] = c[e];
}

TEST(Mma, MultiplyAddIsAPlainProduct) {
  std::vector<Product> products(3, SomeProduct());
  products[1].a[3][5] = 1000;
  products[2].b[15][7] = -1000;
  std::vector<float> out(3 * 16 * 8);
  auto* results = reinterpret_cast<float(*)[16][8]>(out.data());
  ASSERT_EQ(ErrorOf(Multiply, 96, 0, products.data(), results), "");
  for (int w = 0; w < 3; ++w) {
    const Product& p = products[w];
    for (int i = 0; i < 16; ++i) {
      for (int j = 0; j < 8; ++j) {
        float sum = p.c[i][j];
        for (int k = 0; k < 16; ++k) sum += p.a[i][k] * p.b[k][j];
        EXPECT_EQ(results[w][i][j], sum) << w << " " << i << " " << j;
      }
    }
  }
}

// Rows of 8 numbers, 32 of them: number n of row r of matrix m is 100 m + 8 r + n.
__global__ void Load(bool transposed, int misplace, uint32_t (*out)[4]) {
  auto* numbers = DynamicShared<uint16_t>();
  for (int n = 0; n < 8; ++n) {
    const int row = threadIdx.x, matrix = row / 8;
    numbers[row * 8 + n] = static_cast<uint16_t>(100 * matrix + row % 8 * 8 + n);
  }
  __syncthreads();
  const SharedAddress row = AddressInShared(numbers + threadIdx.x * 8) + misplace;
  if (transposed) {
    LoadMatricesTransposed(row, out[threadIdx.x]);
  } else {
    LoadMatrices(row, out[threadIdx.x]);
  }
}

TEST(Mma, LoadMatricesGivesEachLaneItsPairs) {
  for (const bool transposed : {false, true}) {
    uint32_t out[32][4];
    ASSERT_EQ(ErrorOf(Load, 32, 512, transposed, 0, out), "");
    for (uint32_t lane = 0; lane < 32; ++lane) {
      for (uint32_t matrix = 0; matrix < 4; ++matrix) {
        const uint32_t g = lane / 4, t = lane % 4;
        const uint32_t first = 100 * matrix + (transposed ? 2 * t * 8 + g : g * 8 + 2 * t);
        const uint32_t second = first + (transposed ? 8 : 1);
        EXPECT_EQ(out[lane][matrix], first | second << 16) << transposed << " " << lane;
      }
    }
    EXPECT_THAT(ErrorOf(Load, 32, 528, transposed, 2, out), HasSubstr("not aligned"));
  }
}

// Three groups of copies: 16 bytes, 4 bytes, 16 bytes that are not there.
__global__ void Copy(const float* from, float (*seen)[9]) {
  auto* to = DynamicShared<float>();
  const SharedAddress address = AddressInShared(to);
  const auto look = [&](int when) {
    for (int i = 0; i < 9; ++i) seen[when][i] = to[i];
  };
  for (int i = 0; i < 9; ++i) to[i] = 7;
  CopyAsync16(from, true, address);
  CommitCopies();
  CopyAsync4(from + 5, true, address + 16);
  CommitCopies();
  CopyAsync16(nullptr, false, address + 16 + 16);
  CopyAsync4(nullptr, false, address + 16 + 4);
  CommitCopies();
  look(0);
  WaitForCopies<2>();
  look(1);
  WaitForCopies<1>();
  look(2);
  WaitForCopies<0>();
  look(3);
}

TEST(Mma, CopiesArriveAtTheWaitForTheirGroup) {
  alignas(16) const float from[] = {1, 2, 3, 4, 5, 6};
  const float expected[3][9] = {{1, 2, 3, 4}, {1, 2, 3, 4, 6}, {1, 2, 3, 4, 6, 0, 7, 7, 0}};
  const int known[4] = {0, 4, 5, 9};
  float seen[4][9];
  ASSERT_EQ(ErrorOf(Copy, 1, 64, from, seen), "");
  for (int when = 0; when < 4; ++when) {
    for (int i = 0; i < 9; ++i) {
      if (i < known[when]) {
        EXPECT_EQ(seen[when][i], expected[when - 1][i]) << when << " " << i;
      } else if (i != 6 && i != 7) {
        EXPECT_TRUE(std::isnan(seen[when][i])) << when << " " << i;
      }
    }
  }
  EXPECT_THAT(ErrorOf(Copy, 1, 64, from + 1, seen), HasSubstr("aligned"));
}

// A thread's copies end with its block.
__global__ void CopyWithoutWaiting(const float* from, float* seen) {
  auto* to = DynamicShared<float>();
  if (blockIdx.x == 0) {
    CopyAsync4(from, true, AddressInShared(to));
    CommitCopies();
    return;
  }
  *to = 7;
  WaitForCopies<0>();
  *seen = *to;
}

TEST(Mma, CopiesOfAnotherBlockDoNotArrive) {
  const float from = 1;
  float seen = 0;
  CUstream_st stream;
  Launch(CopyWithoutWaiting, 2, 1, 16, &stream, &from, &seen);
  EXPECT_EQ(stream.error, "");
  EXPECT_EQ(seen, 7);
}

// Warps 0 and 2 meet at one barrier, 1 and 3 at another, more than once; the first of a pair hands
// numbers to the second, which comes to the barrier elsewhere in the source.
__global__ void HandOver(int* out, bool together) {
  UPIPE_SHARED(handed, int[2][32]);
  const int warp = threadIdx.x / 32, pair = warp % 2, lane = threadIdx.x % 32;
  for (int round = 0; round < 3; ++round) {
    if (warp < 2) handed[pair][lane] = 100 * round + static_cast<int>(threadIdx.x);
    if (warp < 2) {
      if (together) SyncThreads(1 + pair, 64);
    } else {
      if (together) SyncThreads(1 + pair, 64);
      out[64 * round + pair * 32 + lane] = handed[pair][31 - lane];
    }
    __syncthreads();
  }
}

TEST(Mma, WarpsMeetAtABarrierOfTheirOwn) {
  std::vector<int> out(3 * 64);
  for (const auto order : {cuda_emulator::Order::kAscending, cuda_emulator::Order::kDescending}) {
    EXPECT_THAT(ErrorOf(HandOver, 96, 0, out.data(), true), HasSubstr("no thread can go on"));
    CUstream_st stream{order, ""};
    Launch(HandOver, 1, 128, 0, &stream, out.data(), true);
    ASSERT_EQ(stream.error, "");
    for (int i = 0; i < 3 * 64; ++i) {
      EXPECT_EQ(out[i], 100 * (i / 64) + i % 64 / 32 * 32 + 31 - i % 32) << i;
    }
  }
  CUstream_st stream{cuda_emulator::Order::kDescending, ""};
  Launch(HandOver, 1, 128, 0, &stream, out.data(), false);
  EXPECT_NE(out[0], 31) << "the test would not notice";
}

TEST(Mma, PackAndPower) {
  EXPECT_EQ(PackBf16(1, -3), Pair(1, -3));
  EXPECT_EQ(PackBf16(257, 259), 0x43824380);  // ties, to even
  EXPECT_EQ(Exp2(10), 1024);
  EXPECT_EQ(Exp2(-126), 0x1p-126f);
  EXPECT_EQ(Exp2(-127), 0);
  EXPECT_EQ(Exp2(-INFINITY), 0);
  EXPECT_TRUE(std::isnan(Exp2(NAN)));
}

}  // namespace
}  // namespace upipe::kernels::cuda
