// Bytes that lie side by side: what of another block lies among them.
#pragma once

#include <cstdint>

namespace upipe::kernels {

struct MemoryRange {
  const void* base = nullptr;
  int64_t bytes = 0;

  // Whether all, or any, of [begin, begin + length) lies in it.
  bool Contains(const void* begin, int64_t length) const {
    const auto first = reinterpret_cast<uintptr_t>(begin);
    const auto start = reinterpret_cast<uintptr_t>(base);
    return first >= start && length <= bytes &&
           first - start <= static_cast<uint64_t>(bytes - length);
  }
  bool Overlaps(const void* begin, int64_t length) const {
    const auto first = reinterpret_cast<uintptr_t>(begin);
    const auto start = reinterpret_cast<uintptr_t>(base);
    return first < start + static_cast<uint64_t>(bytes) &&
           start < first + static_cast<uint64_t>(length);
  }
};

}  // namespace upipe::kernels
