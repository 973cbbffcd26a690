// Frequencies against values printed by Hugging Face transformers 5.24 (PyTorch 2.15, CPU), and
// against the formula in double.
#include <cmath>
#include <numbers>
#include <set>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/api/op_params.h"

namespace upipe::kernels {
namespace {

RopeConfig Llama3(double factor, bool hf_parity) {
  return {.theta = 500000.0,
          .scaling = RopeConfig::Llama3Scaling{.factor = factor},
          .hf_parity = hf_parity};
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

constexpr double kHfHead16Linear2p7[] = {
    0x1.7b425ep-2, 0x1.dfbaaep-4,  0x1.2f684cp-5,  0x1.7fc88ep-7,
    0x1.e573acp-9, 0x1.3306d8p-10, 0x1.845c8ap-12, 0x1.eb3e26p-14,
};

constexpr double kHfHead64Dynamic2[] = {
    0x1p+0,         0x1.6895fcp-1,  0x1.fbe632p-2,  0x1.65b2a4p-2,  0x1.f7d4c8p-3,  0x1.62d534p-3,
    0x1.f3cbbap-4,  0x1.5ffda8p-4,  0x1.efcaeep-5,  0x1.5d2beep-5,  0x1.ebd25cp-6,  0x1.5a5ffap-6,
    0x1.e7e1e8p-7,  0x1.5799c4p-7,  0x1.e3f98ep-8,  0x1.54d93ep-8,  0x1.e01932p-9,  0x1.521e5ep-9,
    0x1.dc40ccp-10, 0x1.4f6914p-10, 0x1.d87048p-11, 0x1.4cb95ap-11, 0x1.d4a798p-12, 0x1.4a0f22p-12,
    0x1.d0e6a6p-13, 0x1.476a6p-13,  0x1.cd2d6ap-14, 0x1.44cb08p-14, 0x1.c97bcep-15, 0x1.423112p-15,
    0x1.c5d1c8p-16, 0x1.3f9c72p-16,
};

constexpr double kHfHead32Dynamic3p7[] = {
    0x1p+0,         0x1.643cc8p-2,  0x1.efb91ap-4,  0x1.58e98cp-5,  0x1.dff6acp-7,  0x1.4df27cp-8,
    0x1.d0b47ep-10, 0x1.4354aap-11, 0x1.c1ee8p-13,  0x1.390d3ep-14, 0x1.b3a0bep-16, 0x1.2f197ap-17,
    0x1.a5c766p-19, 0x1.2576b6p-20, 0x1.985ec2p-22, 0x1.1c225cp-23,
};

constexpr double kHfHead128YarnQwen[] = {
    0x1p+0,         0x1.9c975ap-1,  0x1.4c7bcp-1,   0x1.0beddep-1,  0x1.afd136p-2,  0x1.5bf9fep-2,
    0x1.186a08p-2,  0x1.c3f06ap-3,  0x1.6c310ep-3,  0x1.257b22p-3,  0x1.d8ffacp-4,  0x1.7d298cp-4,
    0x1.33281ap-4,  0x1.ef0a26p-5,  0x1.8eec7ep-5,  0x1.41783ap-5,  0x1.030dc6p-5,  0x1.a1835p-6,
    0x1.507316p-6,  0x1.0f201p-6,   0x1.b4f7e4p-7,  0x1.6020a4p-7,  0x1.1bc25ap-7,  0x1.c9548cp-8,
    0x1.6046eep-8,  0x1.0ec71p-8,   0x1.9f4aap-9,   0x1.3da49p-9,   0x1.e483bep-10, 0x1.70578p-10,
    0x1.17040ep-10, 0x1.a4fb7p-11,  0x1.3c1d64p-11, 0x1.d832dp-12,  0x1.5e7a04p-12, 0x1.02387cp-12,
    0x1.79277cp-13, 0x1.107c7p-13,  0x1.847d34p-14, 0x1.103a14p-14, 0x1.74eea6p-15, 0x1.2c8648p-15,
    0x1.e459c4p-16, 0x1.864f6ap-16, 0x1.3a8748p-16, 0x1.faeba8p-17, 0x1.987f7cp-17, 0x1.492f56p-17,
    0x1.094564p-17, 0x1.ab8882p-18, 0x1.58863ap-18, 0x1.15a1dap-18, 0x1.bf749ep-19, 0x1.68941cp-19,
    0x1.2291c6p-19, 0x1.d44e64p-20, 0x1.796182p-20, 0x1.301c04p-20, 0x1.ea20ep-21,  0x1.8af756p-21,
    0x1.3e47c8p-21, 0x1.007bd8p-21, 0x1.9d5ef2p-22, 0x1.4d1c98p-22,
};

constexpr double kHfHead64YarnUntruncated[] = {
    0x1p+0,         0x1.60ca6ap-1,  0x1.e62d44p-2,  0x1.4eff54p-2,  0x1.cda7f4p-3,  0x1.3e19fap-3,
    0x1.b65f3ep-4,  0x1.2e0ec8p-4,  0x1.a04328p-5,  0x1.03bbaap-5,  0x1.3cc8dep-6,  0x1.7bd928p-7,
    0x1.bd508p-8,   0x1.f9fc28p-9,  0x1.127006p-9,  0x1.13eefp-10,  0x1.dea878p-12, 0x1.0f3372p-13,
    0x1.415b8cp-15, 0x1.badbf8p-16, 0x1.31265p-16,  0x1.a485f4p-17, 0x1.21c258p-17, 0x1.8f5056p-18,
    0x1.132518p-18, 0x1.7b2c8ep-19, 0x1.05448ap-19, 0x1.680cdp-20,  0x1.f02e5p-21,  0x1.55e4p-21,
    0x1.d727d6p-22, 0x1.44a5a6p-22,
};

constexpr double kHfHead16YarnOwnBetas[] = {
    0x1p+0,        0x1.43d136p-2,  0x1.3a70bep-4,  0x1.155ee8p-6,
    0x1.8d3018p-9, 0x1.f6684cp-11, 0x1.3dc014p-12, 0x1.91ed08p-14,
};

// A blend that would end beyond the last pair.
constexpr double kHfHead16YarnClamped[] = {
    0x1p+0,        0x1.1feb34p-1, 0x1.43d136p-2, 0x1.6c310ep-3,
    0x1.7bbbbcp-4, 0x1.897d2ap-5, 0x1.94c584p-6, 0x1.9cc02p-7,
};

// A blend that begins where it ends.
constexpr double kHfHead16YarnSingular[] = {
    0x1p+0,        0x1.43d136p-4, 0x1.99999ap-6,  0x1.030dc6p-7,
    0x1.47ae14p-9, 0x1.9e7c7p-11, 0x1.0624dep-12, 0x1.4b96cp-14,
};

// `off_by_one` are the pairs whose power PyTorch's vectorised pow rounds to the wrong neighbour.
template <size_t n>
void ExpectBits(const RopeConfig& config, const double (&expected)[n],
                const std::set<size_t>& off_by_one = {}) {
  const std::vector<double> frequencies = RopeInverseFrequencies(config, 2 * n);
  ASSERT_EQ(frequencies.size(), n);
  for (size_t i = 0; i < n; ++i) {
    if (off_by_one.contains(i)) {
      EXPECT_NEAR(frequencies[i] / expected[i], 1.0, 0x1p-22) << "pair " << i;
    } else {
      EXPECT_EQ(frequencies[i], expected[i]) << "pair " << i;
    }
  }
}

TEST(RopeConfig, HfParityHasTheBitsOfTransformers) {
  ExpectBits(Llama3(8.0, true), kHfHead128Factor8);
  ExpectBits(Llama3(32.0, true), kHfHead64Factor32);
  ExpectBits({.theta = 10000.0, .hf_parity = true}, kHfHead16Plain);
}

// Every scaling and the numbers of a configuration that transformers printed.
RopeConfig Linear2p7() {
  return {.theta = 10000.0, .scaling = RopeConfig::LinearScaling{2.7}, .hf_parity = true};
}

RopeConfig Dynamic2() {
  return {.theta = 10000.0,
          .scaling = RopeConfig::DynamicNtkScaling{2.0, 2048, 8192},
          .hf_parity = true};
}

RopeConfig Dynamic3p7() {
  return {.theta = 500000.0,
          .scaling = RopeConfig::DynamicNtkScaling{3.7, 1000, 10007},
          .hf_parity = true};
}

// Qwen's long contexts.
RopeConfig YarnQwen() {
  return {.theta = 1000000.0,
          .scaling = RopeConfig::YarnScaling{.factor = 4, .original_context = 32768},
          .hf_parity = true};
}

// gpt-oss.
RopeConfig YarnUntruncated() {
  return {
      .theta = 150000.0,
      .scaling = RopeConfig::YarnScaling{.factor = 32, .original_context = 4096, .truncate = false},
      .hf_parity = true};
}

RopeConfig YarnOwnBetas() {
  return {.theta = 10000.0,
          .scaling = RopeConfig::YarnScaling{.factor = 3.3,
                                             .original_context = 777,
                                             .beta_fast = 20,
                                             .beta_slow = 2,
                                             .attention_factor = 1.25},
          .hf_parity = true};
}

TEST(RopeConfig, HfParityHasTheBitsOfTransformersForEveryScaling) {
  ExpectBits(Linear2p7(), kHfHead16Linear2p7);
  ExpectBits(Dynamic2(), kHfHead64Dynamic2);
  ExpectBits(Dynamic3p7(), kHfHead32Dynamic3p7);
  ExpectBits(YarnQwen(), kHfHead128YarnQwen, {37});
  ExpectBits(YarnUntruncated(), kHfHead64YarnUntruncated, {6, 10});
  ExpectBits(YarnOwnBetas(), kHfHead16YarnOwnBetas);
  ExpectBits(
      {.theta = 100,
       .scaling =
           RopeConfig::YarnScaling{.factor = 8, .original_context = 1000000, .beta_fast = 20000},
       .hf_parity = true},
      kHfHead16YarnClamped);
  ExpectBits({.theta = 10000,
              .scaling = RopeConfig::YarnScaling{.factor = 4, .original_context = 4},
              .hf_parity = true},
             kHfHead16YarnSingular);
}

template <size_t n>
void ExpectNear(RopeConfig config, const double (&expected)[n]) {
  config.hf_parity = false;
  const std::vector<double> frequencies = RopeInverseFrequencies(config, 2 * n);
  ASSERT_EQ(frequencies.size(), n);
  for (size_t i = 0; i < n; ++i) {
    EXPECT_NEAR(frequencies[i] / expected[i], 1.0, 1e-6) << "pair " << i;
  }
  // Not an fp32 value: the double path does not round.
  EXPECT_NE(frequencies[1], static_cast<double>(static_cast<float>(frequencies[1])));
}

TEST(RopeConfig, DoubleFrequenciesAgreeWithTransformersToFp32Rounding) {
  ExpectNear(Llama3(8.0, false), kHfHead128Factor8);
  ExpectNear(Linear2p7(), kHfHead16Linear2p7);
  ExpectNear(Dynamic2(), kHfHead64Dynamic2);
  ExpectNear(Dynamic3p7(), kHfHead32Dynamic3p7);
  ExpectNear(YarnQwen(), kHfHead128YarnQwen);
  ExpectNear(YarnUntruncated(), kHfHead64YarnUntruncated);
  ExpectNear(YarnOwnBetas(), kHfHead16YarnOwnBetas);
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

TEST(RopeConfig, LinearDividesEveryFrequency) {
  const std::vector<double> plain = RopeInverseFrequencies({.theta = 500000.0}, 128);
  const std::vector<double> scaled =
      RopeInverseFrequencies({.theta = 500000.0, .scaling = RopeConfig::LinearScaling{8.0}}, 128);
  for (int i = 0; i < 64; ++i) EXPECT_EQ(scaled[i], plain[i] / 8) << "pair " << i;
}

// The NTK rule: the last pair is interpolated by context / original - (factor - 1) / factor times
// factor, the first is kept. Within the original context nothing changes.
TEST(RopeConfig, DynamicNtkStretchesTheLongestWavelengthByTheContext) {
  const auto at = [](int64_t context, bool hf_parity) {
    return RopeInverseFrequencies({.theta = 10000.0,
                                   .scaling = RopeConfig::DynamicNtkScaling{3.0, 4096, context},
                                   .hf_parity = hf_parity},
                                  64);
  };
  for (const bool hf_parity : {false, true}) {
    const std::vector<double> plain =
        RopeInverseFrequencies({.theta = 10000.0, .hf_parity = hf_parity}, 64);
    EXPECT_EQ(at(4096, hf_parity), plain);
    EXPECT_EQ(at(17, hf_parity), plain);
    const std::vector<double> stretched = at(3 * 4096, hf_parity);
    EXPECT_EQ(stretched[0], 1.0);
    EXPECT_NEAR(plain[31] / stretched[31], 3.0 * 3.0 - 2.0, 1e-5);
  }
}

// By the paper: a pair that turns more than beta_fast times within the original context is kept,
// one that turns less than beta_slow times is divided by the factor, those between are blended.
TEST(RopeConfig, YarnBlendsByTurnsWithinTheOriginalContext) {
  for (const bool truncate : {false, true}) {
    const RopeConfig config = {.theta = 1000000.0,
                               .scaling = RopeConfig::YarnScaling{
                                   .factor = 4, .original_context = 32768, .truncate = truncate}};
    const std::vector<double> plain = RopeInverseFrequencies({.theta = 1000000.0}, 128);
    const std::vector<double> scaled = RopeInverseFrequencies(config, 128);
    const auto turns = [&](double pair) {
      return 32768 * std::pow(1000000.0, -pair / 64) / (2 * std::numbers::pi);
    };
    double last_share = 1;
    int blended = 0;
    for (int i = 0; i < 64; ++i) {
      const double share = scaled[i] / plain[i];
      // Truncation widens the blend to whole pairs.
      if (turns(truncate ? i + 1 : i) > 32) {
        EXPECT_DOUBLE_EQ(share, 1.0) << "pair " << i;
      } else if (turns(truncate ? i - 1 : i) < 1) {
        EXPECT_DOUBLE_EQ(share, 0.25) << "pair " << i;
      } else {
        EXPECT_LE(share, last_share) << "pair " << i;
        ++blended;
      }
      last_share = share;
    }
    EXPECT_GT(blended, 14);
  }
}

TEST(RopeConfig, OnlyYarnHasAMagnitude) {
  EXPECT_EQ(RopeMagnitude(YarnOwnBetas()), 1.25);
  for (const RopeConfig& config : {RopeConfig{}, Llama3(8, false), Linear2p7(), Dynamic2()}) {
    EXPECT_EQ(RopeMagnitude(config), 1.0);
  }
}

}  // namespace
}  // namespace upipe::kernels
