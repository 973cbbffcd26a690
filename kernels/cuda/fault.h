// Bad data that a kernel met, such as a token outside the vocabulary: two words in device memory,
// written by kernels (report_fault.cuh), read by the host once the stream has passed the op. Pure
// C++.
#pragma once

#include <array>
#include <cstdint>

#include "absl/status/status.h"

namespace upipe::kernels::cuda {

using FaultWords = std::array<int64_t, 2>;

// What the words hold while nothing is wrong: the lowest row wins by atomicMin on the first.
inline constexpr FaultWords kNoFault = {INT64_MAX, 0};

// Which op met it, in the upper half of the second word; the vocabulary is in the lower.
enum class FaultKind : int32_t { kNone = 0, kEmbeddingToken = 1, kCrossEntropyLabel = 2 };

// OutOfRange naming value, row and vocabulary; OK without a fault.
absl::Status FaultStatus(const FaultWords& words);

}  // namespace upipe::kernels::cuda
