// What the emulator runs, and what it refuses.
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <numeric>
#include <thread>
#include <vector>

#include "kernels/cuda/launch.h"

namespace upipe::cuda_emulator {
namespace {

using kernels::cuda::DynamicShared;
using kernels::cuda::Launch;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr unsigned kAllLanes = 0xffffffffu;

// The error of a launch, in both orders of turns.
template <typename... Params, typename... Args>
std::string ErrorOf(void (*kernel)(Params...), dim3 grid, dim3 block, size_t shared_bytes,
                    Args... args) {
  CUstream_st ascending, descending;
  descending.order = Order::kDescending;
  Launch(kernel, grid, block, shared_bytes, &ascending, args...);
  Launch(kernel, grid, block, shared_bytes, &descending, args...);
  EXPECT_EQ(ascending.error.empty(), descending.error.empty())
      << ascending.error << " | " << descending.error;
  return ascending.error;
}

__global__ void WriteIndices(int* out) {
  const unsigned block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  const unsigned thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
  out[block * blockDim.x * blockDim.y * blockDim.z + thread] +=
      static_cast<int>(blockIdx.z * 100000 + blockIdx.y * 10000 + blockIdx.x * 1000 +
                       threadIdx.z * 100 + threadIdx.y * 10 + threadIdx.x);
}

TEST(Emulator, EveryThreadOfEveryBlockRunsOnceWithItsIndices) {
  std::vector<int> out(2 * 3 * 4 * 5 * 3 * 2);
  CUstream_st stream;
  Launch(WriteIndices, dim3(2, 3, 4), dim3(5, 3, 2), 0, &stream, out.data());
  ASSERT_EQ(stream.error, "");
  size_t i = 0;
  for (int bz = 0; bz < 4; ++bz)
    for (int by = 0; by < 3; ++by)
      for (int bx = 0; bx < 2; ++bx)
        for (int tz = 0; tz < 2; ++tz)
          for (int ty = 0; ty < 3; ++ty)
            for (int tx = 0; tx < 5; ++tx) {
              ASSERT_EQ(out[i++], bz * 100000 + by * 10000 + bx * 1000 + tz * 100 + ty * 10 + tx);
            }
}

// Every thread hands its number to the next through shared memory, twice.
__global__ void PassOn(const int* in, int* out) {
  UPIPE_SHARED(slots, int[256]);
  const int n = static_cast<int>(blockDim.x), t = static_cast<int>(threadIdx.x);
  const int64_t begin = int64_t{blockIdx.x} * n;
  slots[t] = in[begin + t];
  __syncthreads();
  const int next = slots[(t + 1) % n];
  __syncthreads();
  slots[t] = next;
  __syncthreads();
  out[begin + t] = slots[(t + 1) % n];
}

TEST(Emulator, BarriersOrderSharedMemory) {
  std::vector<int> in(3 * 96), out(in.size());
  std::iota(in.begin(), in.end(), 0);
  EXPECT_EQ(ErrorOf(PassOn, 3, 96, 0, in.data(), out.data()), "");
  for (int i = 0; i < 3 * 96; ++i) EXPECT_EQ(out[i], i / 96 * 96 + (i + 2) % 96);
}

__global__ void BarrierForSome(int first) {
  if (static_cast<int>(threadIdx.x) < first) return;
  __syncthreads();
}

TEST(Emulator, ABarrierThatAThreadMissesIsReported) {
  EXPECT_EQ(ErrorOf(BarrierForSome, 2, 64, 0, 0), "");
  EXPECT_THAT(ErrorOf(BarrierForSome, 2, 64, 0, 3),
              AllOf(HasSubstr("block (0, 0, 0)"), HasSubstr("3-63 wait at the barrier"),
                    HasSubstr("emulator_test.cc:"), HasSubstr("0-2 have left the kernel")));
}

__global__ void TwoBarriers() {
  if (threadIdx.x < 32) {
    __syncthreads();
  } else {
    __syncthreads();
  }
}

TEST(Emulator, DifferentBarriersAreReported) {
  EXPECT_THAT(ErrorOf(TwoBarriers, 1, 64, 0),
              HasSubstr("comes to this barrier, 32 threads wait at another"));
}

__global__ void ErrorInBlock(unsigned bad) {
  if (blockIdx.x == bad && threadIdx.x == 5) __trap();
}

TEST(Emulator, AnErrorNamesItsBlockAndStaysWithTheStream) {
  CUstream_st stream;
  Launch(ErrorInBlock, 4, 32, 0, &stream, 2u);
  EXPECT_THAT(stream.error, AllOf(HasSubstr("block (2, 0, 0): thread 5 at"), HasSubstr("trap")));
  const std::string first = stream.error;
  std::vector<int> out(8);
  Launch(WriteIndices, 1, 8, 0, &stream, out.data());
  EXPECT_EQ(stream.error, first);
  EXPECT_EQ(out, std::vector<int>(8));
  // The next stream is not touched by it.
  CUstream_st other;
  Launch(WriteIndices, 1, 8, 0, &other, out.data());
  EXPECT_EQ(other.error, "");
  EXPECT_EQ(out[7], 7);
}

__global__ void Shuffles(int* out) {
  const int lane = static_cast<int>(threadIdx.x) % 32, t = static_cast<int>(threadIdx.x);
  int* mine = out + 8 * t;
  mine[0] = __shfl_sync(kAllLanes, t, 3);
  mine[1] = __shfl_xor_sync(kAllLanes, t, 16);
  mine[2] = __shfl_down_sync(kAllLanes, t, 5);
  mine[3] = __shfl_up_sync(kAllLanes, t, 5);
  mine[4] = __shfl_xor_sync(kAllLanes, t, 4, 8);
  mine[5] = __shfl_sync(kAllLanes, t, 2, 8);
  mine[6] = static_cast<int>(__ballot_sync(kAllLanes, lane % 3 == 0));
  if (lane < 8) mine[7] = __shfl_sync(0xffu, t, 7);
  if (lane >= 8) mine[7] = __shfl_sync(0xffffff00u, t, 31);
}

TEST(Emulator, ShufflesAndVotes) {
  std::vector<int> out(64 * 8);
  EXPECT_EQ(ErrorOf(Shuffles, 1, 64, 0, out.data()), "");
  for (int t = 0; t < 64; ++t) {
    const int lane = t % 32, warp = t - lane;
    const std::vector<int> mine(out.begin() + 8 * t, out.begin() + 8 * t + 8);
    EXPECT_EQ(mine, (std::vector<int>{warp + 3, warp + (lane ^ 16), lane < 27 ? t + 5 : t,
                                      lane >= 5 ? t - 5 : t, t ^ 4, t / 8 * 8 + 2, 0x49249249,
                                      warp + (lane < 8 ? 7 : 31)}));
  }
}

__global__ void ShuffleForSome(unsigned mask, int lanes) {
  if (static_cast<int>(threadIdx.x) % 32 < lanes) __shfl_sync(mask, 1, 0);
}

TEST(Emulator, ALaneThatMissesAShuffleIsReported) {
  EXPECT_EQ(ErrorOf(ShuffleForSome, 1, 64, 0, 0xffffu, 16), "");
  EXPECT_THAT(ErrorOf(ShuffleForSome, 1, 64, 0, kAllLanes, 16),
              AllOf(HasSubstr("0-15, 32-47 wait for others of their mask"),
                    HasSubstr("16-31, 48-63 have left the kernel")));
  EXPECT_THAT(ErrorOf(ShuffleForSome, 1, 32, 0, 0xffu, 16), HasSubstr("is not in its own mask"));
}

__global__ void DivergentShuffle() {
  if (threadIdx.x % 2 == 0) {
    __shfl_sync(kAllLanes, 1, 0);
  } else {
    __shfl_sync(kAllLanes, 2, 0);
  }
}

TEST(Emulator, LanesThatMeetAtDifferentShufflesAreReported) {
  EXPECT_THAT(ErrorOf(DivergentShuffle, 1, 32, 0), HasSubstr("others of its mask"));
}

__global__ void ShuffleFromOutside() {
  if (threadIdx.x < 16) __shfl_sync(0xffffu, 1, 20);
}

TEST(Emulator, AShuffleFromALaneOutsideItsMaskIsReported) {
  EXPECT_THAT(ErrorOf(ShuffleFromOutside, 1, 32, 0), HasSubstr("outside its mask"));
}

__global__ void ReadSharedUnwritten(float* out) {
  UPIPE_SHARED(variable, float[2]);
  const int t = static_cast<int>(threadIdx.x);
  float* dynamic = DynamicShared<float>();
  out[4 * blockIdx.x + 2 * t] = variable[t];
  out[4 * blockIdx.x + 2 * t + 1] = dynamic[t];
  variable[t] = dynamic[t] = 1;
}

TEST(Emulator, SharedMemoryIsNanInEveryBlock) {
  std::vector<float> out(12);
  EXPECT_EQ(ErrorOf(ReadSharedUnwritten, 3, 2, 8, out.data()), "");
  for (const float value : out) EXPECT_TRUE(std::isnan(value));
}

template <typename T>
__device__ T SumOfTwo(T a, T b) {
  UPIPE_SHARED(first, T);
  UPIPE_SHARED(second, T);
  if (threadIdx.x == 0) first = a;
  if (threadIdx.x == 1) second = b;
  __syncthreads();
  return first + second;
}

__global__ void SharedOfTemplates(double* out) {
  out[threadIdx.x] = SumOfTwo<int>(1, 2) + 10 * SumOfTwo<double>(1.5, 2.5);
}

TEST(Emulator, EveryDeclarationHasItsOwnSharedMemory) {
  std::vector<double> out(40);
  EXPECT_EQ(ErrorOf(SharedOfTemplates, 1, 40, 0, out.data()), "");
  EXPECT_EQ(out, std::vector<double>(40, 43));
}

__global__ void TooManyVariables() {
  UPIPE_SHARED(a, char[30000]);
  UPIPE_SHARED(b, char[30000]);
  a[0] = b[0] = 0;
}

TEST(Emulator, LimitsOfALaunch) {
  EXPECT_THAT(ErrorOf(TooManyVariables, 1, 1, 0), HasSubstr("60000 bytes of shared variables"));
  EXPECT_THAT(ErrorOf(DivergentShuffle, 1, 1025, 0), HasSubstr("1025 x 1 x 1 threads"));
  EXPECT_THAT(ErrorOf(DivergentShuffle, dim3(1, 65536), 32, 0), HasSubstr("65536 x 1 blocks"));
  EXPECT_THAT(ErrorOf(DivergentShuffle, 1, 32, kSharedBytesMax + 1), HasSubstr("shared memory"));
  EXPECT_EQ(ErrorOf(DivergentShuffle, dim3(1, 0), 32, 0), "");
}

__global__ void Count(unsigned* counts, unsigned long long* least) {
  atomicAdd(&counts[threadIdx.x % 3], 1);
  atomicMin(least, 1000 - threadIdx.x);
  if (atomicCAS(&counts[3], 0, 7) == 0) atomicAdd(&counts[4], 1);
}

TEST(Emulator, Atomics) {
  std::vector<unsigned> counts(5);
  unsigned long long least = ~0ull;
  CUstream_st stream;
  Launch(Count, 10, 96, 0, &stream, counts.data(), &least);
  EXPECT_EQ(counts, (std::vector<unsigned>{320, 320, 320, 7, 1}));
  EXPECT_EQ(least, 905u);
}

// Sums over a warp by the exchange that twins of mma are written with.
__global__ void SumByCollective(int* out) {
  struct Lane {
    int value, sum;
  } lane = {static_cast<int>(threadIdx.x), 0};
  const auto add = [](Lane* const* lanes, unsigned) {
    for (int i = 0; i < kWarpSize; ++i) lanes[0]->sum += lanes[i]->value;
    for (int i = 1; i < kWarpSize; ++i) lanes[i]->sum = lanes[0]->sum;
  };
  WarpCollective(kAllLanes, lane, add, {__FILE__, __LINE__});
  out[threadIdx.x] = lane.sum;
  WarpgroupCollective(lane, [](Lane* const* all) { all[127]->sum = all[0]->value + 1000; },
                      {__FILE__, __LINE__});
  if (threadIdx.x % 128 == 127) out[threadIdx.x] = lane.sum;
}

TEST(Emulator, Collectives) {
  std::vector<int> out(256);
  EXPECT_EQ(ErrorOf(SumByCollective, 1, 256, 0, out.data()), "");
  for (int t = 0; t < 256; ++t) {
    const int first = t / 32 * 32;
    EXPECT_EQ(out[t], t % 128 == 127 ? t - 127 + 1000 : 32 * first + 31 * 16);
  }
}

// The last thread opens a gate that the others wait at.
__global__ void Gate(int* passed, bool open) {
  UPIPE_SHARED(gate, int);
  if (threadIdx.x == 0) gate = 0;
  __syncthreads();
  if (threadIdx.x == blockDim.x - 1 && open) gate = 1;
  WaitUntil([](const void* at) { return *static_cast<const int*>(at) == 1; }, &gate,
            {__FILE__, __LINE__});
  atomicAdd(passed, 1);
}

TEST(Emulator, WaitsForAConditionAnotherThreadMakesTrue) {
  int passed = 0;
  EXPECT_EQ(ErrorOf(Gate, 1, 64, 0, &passed, true), "");
  EXPECT_EQ(passed, 128);
  EXPECT_THAT(ErrorOf(Gate, 1, 64, 0, &passed, false), HasSubstr("0-63 wait for a condition"));
}

__global__ void AddOne(float* x, int64_t n) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < n) x[i] += 1;
}

// Larger than tests need by far: half a second would mean that something switches per thread.
TEST(Emulator, ThreadsThatNeverWaitAreCheap) {
  std::vector<float> x(8192 * 256 - 100);
  CUstream_st stream;
  Launch(AddOne, 8192, 256, 0, &stream, x.data(), static_cast<int64_t>(x.size()));
  EXPECT_EQ(stream.error, "");
  EXPECT_EQ(x, std::vector<float>(x.size(), 1));
}

// Reads what warp 0 wrote before the barrier, while warp 0 may be on its way to write the next.
__global__ void RaceAfterBarrier(int* out, bool second_barrier) {
  UPIPE_SHARED(value, int);
  for (int round = 0; round < 2; ++round) {
    for (int step = 0; step < 5; ++step) __syncwarp();
    if (threadIdx.x == 0) value = round;
    __syncthreads();
    __syncwarp();
    out[2 * threadIdx.x + round] = value;
    if (second_barrier) __syncthreads();
  }
}

// In one order or the other a warp is so far ahead that it spoils what the others still read.
TEST(Emulator, WarpsRunAsFarAheadAsBarriersAllow) {
  for (const bool second_barrier : {true, false}) {
    int wrong = 0;
    for (const Order order : {Order::kAscending, Order::kDescending}) {
      std::vector<int> out(128);
      CUstream_st stream;
      stream.order = order;
      Launch(RaceAfterBarrier, 1, 64, 0, &stream, out.data(), second_barrier);
      EXPECT_EQ(stream.error, "");
      for (int i = 0; i < 128; ++i) wrong += out[i] != i % 2;
    }
    EXPECT_EQ(wrong > 0, !second_barrier);
  }
}

TEST(Emulator, OsThreadsMayLaunchAtOnce) {
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i) {
    threads.emplace_back([] {
      std::vector<int> in(40 * 96), out(in.size());
      std::iota(in.begin(), in.end(), 0);
      CUstream_st stream;
      for (int round = 0; round < 5; ++round) {
        Launch(PassOn, 40, 96, 0, &stream, in.data(), out.data());
      }
      EXPECT_EQ(stream.error, "");
      for (int i = 0; i < 40 * 96; ++i) EXPECT_EQ(out[i], i / 96 * 96 + (i + 2) % 96);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(Emulator, TheLastBlocksAlone) {
  std::vector<float> x(10 * 32);
  CUstream_st stream;
  stream.last_blocks = 3;
  Launch(AddOne, 10, 32, 0, &stream, x.data(), static_cast<int64_t>(x.size()));
  for (int i = 0; i < 10 * 32; ++i) EXPECT_EQ(x[i], i < 7 * 32 ? 0 : 1);
}

TEST(Emulator, Bfloat16ConvertsAsTheGpuDoes) {
  EXPECT_EQ(__float2bfloat16_rn(257).bits, 0x4380);   // a tie, down to 256
  EXPECT_EQ(__float2bfloat16_rn(259).bits, 0x4382);   // a tie, up to 260
  EXPECT_EQ(__float2bfloat16_rn(-NAN).bits, 0x7fff);  // one NaN for all
  EXPECT_EQ(__bfloat162float(__float2bfloat16_rn(-3.5f)), -3.5f);
}

}  // namespace
}  // namespace upipe::cuda_emulator
