// The sums that run on a CUDA device, on the emulator, against those of the host: the same bits.
#include "engine/comm/nccl/rank_sums.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "engine/comm/ordered_sums.h"
#include "tests/contract/engine/comm_groups.h"

namespace upipe::comm {
namespace {

// [terms][count] floats, each term `shift` elements after an address of 16 bytes.
std::vector<float> SumOnDevice(int num_terms, int64_t count, bool accumulate, int shift) {
  const int64_t stride = (count + 8) / 4 * 4;
  std::vector<float> memory((num_terms + 2) * stride + 8);
  float* const begin =
      reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(memory.data()) + 15) / 16 * 16) + shift;
  OrderedSum sum{.accumulate = accumulate, .count = count, .sum = begin};
  for (int64_t i = 0; i < count; ++i) begin[i] = Contribution(100, i);
  begin[count] = -77;
  for (int t = 0; t < num_terms; ++t) {
    float* const term = begin + (t + 1) * stride;
    for (int64_t i = 0; i < count; ++i) term[i] = Contribution(t, i);
    sum.terms.push_back(term);
  }
  CUstream_st stream;
  LaunchSum(sum, &stream);
  EXPECT_EQ("", stream.error);
  EXPECT_EQ(-77, begin[count]) << "beyond the end";
  return std::vector<float>(begin, begin + count);
}

std::vector<float> SumOnHost(int num_terms, int64_t count, bool accumulate) {
  std::vector<float> sum(count);
  for (int64_t i = 0; i < count; ++i) {
    float value = accumulate ? Contribution(100, i) + Contribution(0, i) : Contribution(0, i);
    for (int t = 1; t < num_terms; ++t) value += Contribution(t, i);
    sum[i] = value;
  }
  return sum;
}

TEST(RankSums, HaveTheBitsOfTheAscendingSum) {
  for (const int num_terms : {1, 2, 7, 16, 17, 40}) {
    for (const int64_t count : {1, 3, 4, 1023, 5000}) {
      for (const bool accumulate : {false, true}) {
        for (const int shift : {0, 1}) {
          ASSERT_EQ(SumOnHost(num_terms, count, accumulate),
                    SumOnDevice(num_terms, count, accumulate, shift))
              << num_terms << " terms of " << count << (accumulate ? ", added" : "") << ", shifted "
              << shift;
        }
      }
    }
  }
}

TEST(RankSums, CombineScalarsAsTheHostDoes) {
  constexpr int kRanks = 5;
  for (const int64_t count : {1, 37, 300}) {
    for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kMax}) {
      std::vector<double> gathered(kRanks * count), device(count), host(count);
      for (size_t i = 0; i < gathered.size(); ++i) {
        gathered[i] = Contribution(static_cast<int>(i) % kRanks, static_cast<int64_t>(i));
      }
      gathered[2 * count] = std::numeric_limits<double>::quiet_NaN();
      Combination c{.op = op, .gathered = gathered.data(), .num_ranks = kRanks, .count = count};
      c.values = host.data();
      CombineOnHost(c);
      c.values = device.data();
      CUstream_st stream;
      LaunchCombine(c, &stream);
      EXPECT_EQ("", stream.error);
      EXPECT_TRUE(std::isnan(device[0]));
      EXPECT_EQ(0, std::memcmp(host.data(), device.data(), count * sizeof(double))) << count;
    }
  }
}

}  // namespace
}  // namespace upipe::comm
