// One bf16 number in memory: the upper half of an fp32. Rounds to nearest even, keeps infinities,
// makes every NaN a quiet one. Loops over many use the backend's vectors, with the
// same results; bf16 products may take denormals for zero.
#pragma once

#include <bit>
#include <cstdint>

namespace upipe::kernels {

struct BFloat16 {
  uint16_t bits = 0;

  static constexpr BFloat16 From(float value) {
    const auto wide = std::bit_cast<uint32_t>(value);
    if ((wide & 0x7fffffffu) > 0x7f800000u) {
      return {static_cast<uint16_t>((wide >> 16) | 0x40u)};
    }
    return {static_cast<uint16_t>((wide + 0x7fffu + ((wide >> 16) & 1u)) >> 16)};
  }
  constexpr float ToFloat() const {
    return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
  }
};
static_assert(sizeof(BFloat16) == 2);

}  // namespace upipe::kernels
