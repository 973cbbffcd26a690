// Frequencies against values printed by Hugging Face transformers 5.24 (PyTorch 2.15, CPU), and
// against the formula in double.
#include <cmath>
#include <numbers>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/api/op_params.h"

namespace upipe::kernels {
namespace {

RopeConfig Llama3(double factor, bool hf_parity) {
  RopeConfig config{.theta = 500000.0, .hf_parity = hf_parity};
  config.llama3 = RopeConfig::Llama3Scaling{.factor = factor};
  return config;
}

constexpr double kHfHead128Factor8[] = {
    0x1p+0,         0x1.a11582p-1,  0x1.53c38cp-1,  0x1.14c708p-1,  0x1.c2ef78p-2,  0x1.6f56fap-2,
    0x1.2b3dc6p-2,  0x1.e788c2p-3,  0x1.8d276p-3,   0x1.43874p-3,   0x1.078d4p-3,   0x1.ad6338p-4,
    0x1.5dc95ap-4,  0x1.1cf13p-4,   0x1.d03ccep-5,  0x1.7a2d08p-5,  0x1.34119p-5,   0x1.f5ea7ep-6,
    0x1.98de92p-6,  0x1.4d1272p-6,  0x1.0f5386p-6,  0x1.ba0dd8p-7,  0x1.681adap-7,  0x1.2558fep-7,
    0x1.ddee9ep-8,  0x1.8554ecp-8,  0x1.3d2804p-8,  0x1.025c6ap-8,  0x1.a4ee4p-9,   0x1.1bfa0cp-9,
    0x1.67a23ap-10, 0x1.c12f3cp-11, 0x1.132ba4p-11, 0x1.47e21p-12,  0x1.765ba4p-13, 0x1.90d10cp-14,
    0x1.46831ap-14, 0x1.09fb7ep-14, 0x1.b15902p-15, 0x1.610332p-15, 0x1.1f91fp-15,  0x1.d484dep-16,
    0x1.7da9e8p-16, 0x1.36e8eap-16, 0x1.fa8b86p-17, 0x1.9ca3eap-17, 0x1.5024d6p-17, 0x1.11d41ep-17,
    0x1.be2188p-18, 0x1.6b6d0ep-18, 0x1.280d96p-18, 0x1.e257p-19,   0x1.88ec2p-19,  0x1.4014d2p-19,
    0x1.04be68p-19, 0x1.a8d01p-20,  0x1.5a0f4ep-20, 0x1.19e8p-20,   0x1.cb4a9ap-21, 0x1.76258ep-21,
    0x1.30c94ep-21, 0x1.f09184p-22, 0x1.94836p-22,  0x1.4985fep-22,
};

constexpr double kHfHead64Factor32[] = {
    0x1p+0,         0x1.53c38cp-1,  0x1.c2ef78p-2, 0x1.2b3dc6p-2,  0x1.8d276p-3,   0x1.078d4p-3,
    0x1.5dc95ap-4,  0x1.d03ccep-5,  0x1.34119p-5,  0x1.98de92p-6,  0x1.0f5386p-6,  0x1.681adap-7,
    0x1.ddee9ep-8,  0x1.3d2804p-8,  0x1.a4ee4p-9,  0x1.524f36p-10, 0x1.c26c4p-12,  0x1.9731eep-14,
    0x1.46831ap-16, 0x1.b15902p-17, 0x1.1f91fp-17, 0x1.7da9e8p-18, 0x1.fa8b86p-19, 0x1.5024d6p-19,
    0x1.be2188p-20, 0x1.280d96p-20, 0x1.88ec2p-21, 0x1.04be68p-21, 0x1.5a0f4ep-22, 0x1.cb4a9ap-23,
    0x1.30c94ep-23, 0x1.94836p-24,
};

constexpr double kHfHead16Plain[] = {
    0x1p+0,        0x1.43d136p-2, 0x1.99999ap-4,  0x1.030dc6p-5,
    0x1.47ae14p-7, 0x1.9e7c7p-9,  0x1.0624dep-10, 0x1.4b96cp-12,
};

template <size_t n>
void ExpectBits(const RopeConfig& config, const double (&expected)[n]) {
  const std::vector<double> frequencies = RopeInverseFrequencies(config, 2 * n);
  ASSERT_EQ(frequencies.size(), n);
  for (size_t i = 0; i < n; ++i) EXPECT_EQ(frequencies[i], expected[i]) << "pair " << i;
}

TEST(RopeConfig, HfParityHasTheBitsOfTransformers) {
  ExpectBits(Llama3(8.0, true), kHfHead128Factor8);
  ExpectBits(Llama3(32.0, true), kHfHead64Factor32);
  ExpectBits({.theta = 10000.0, .hf_parity = true}, kHfHead16Plain);
}

TEST(RopeConfig, DoubleFrequenciesAgreeWithTransformersToFp32Rounding) {
  const std::vector<double> frequencies = RopeInverseFrequencies(Llama3(8.0, false), 128);
  for (size_t i = 0; i < 64; ++i) {
    EXPECT_NEAR(frequencies[i] / kHfHead128Factor8[i], 1.0, 1e-6) << "pair " << i;
  }
  // Not an fp32 value: the double path does not round.
  EXPECT_NE(frequencies[1], static_cast<double>(static_cast<float>(frequencies[1])));
}

TEST(RopeConfig, Llama3ScalesOnlyLongWavelengths) {
  const std::vector<double> plain = RopeInverseFrequencies({.theta = 500000.0}, 128);
  const std::vector<double> scaled = RopeInverseFrequencies(Llama3(8.0, false), 128);
  for (int i = 0; i < 64; ++i) {
    EXPECT_NEAR(plain[i], std::pow(500000.0, -2.0 * i / 128), 1e-15);
    const double wavelength = 2 * std::numbers::pi / plain[i];
    const double share = scaled[i] / plain[i];
    if (wavelength < 8192.0 / 4) {
      EXPECT_EQ(share, 1.0) << "pair " << i;
    } else if (wavelength > 8192.0) {
      EXPECT_EQ(share, 1.0 / 8) << "pair " << i;
    } else {
      EXPECT_GT(share, 1.0 / 8) << "pair " << i;
      EXPECT_LT(share, 1.0) << "pair " << i;
    }
  }
}

}  // namespace
}  // namespace upipe::kernels
