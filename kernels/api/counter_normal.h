// The numbers RandomNormal means: Philox4x32-10 (Salmon et al., SC 2011) keyed by the seed, counted
// by (tensor, index), then Box-Muller in double. One definition, so every backend draws the same
// bits.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <numbers>

namespace upipe::kernels {

// Ten rounds of Philox4x32.
inline std::array<uint32_t, 4> Philox4x32(std::array<uint32_t, 4> counter,
                                          std::array<uint32_t, 2> key) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = uint64_t{0xD2511F53} * counter[0];
    const uint64_t product1 = uint64_t{0xCD9E8D57} * counter[2];
    counter = {static_cast<uint32_t>(product1 >> 32) ^ counter[1] ^ key[0],
               static_cast<uint32_t>(product1),
               static_cast<uint32_t>(product0 >> 32) ^ counter[3] ^ key[1],
               static_cast<uint32_t>(product0)};
    key[0] += 0x9E3779B9;
    key[1] += 0xBB67AE85;
  }
  return counter;
}

// The standard normal number of element `index` of tensor `tensor_id` under `seed`.
inline double CounterNormal(uint64_t seed, uint64_t tensor_id, int64_t index) {
  const uint64_t i = static_cast<uint64_t>(index);
  const std::array<uint32_t, 4> bits =
      Philox4x32({static_cast<uint32_t>(i), static_cast<uint32_t>(i >> 32),
                  static_cast<uint32_t>(tensor_id), static_cast<uint32_t>(tensor_id >> 32)},
                 {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)});
  constexpr double kUnit = 1.0 / 9007199254740992.0;                           // 2^-53
  const double u = ((uint64_t{bits[0]} << 21 | bits[1] >> 11) + 0.5) * kUnit;  // in (0, 1)
  const double v = (uint64_t{bits[2]} << 21 | bits[3] >> 11) * kUnit;
  return std::sqrt(-2 * std::log(u)) * std::cos(2 * std::numbers::pi * v);
}

}  // namespace upipe::kernels
