// Numbers as people read and write them. Bytes are binary (KiB to TiB); token counts with K or M
// are binary too (8K = 8,192); every Parse accepts what the matching Format writes.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace upipe {

// "0 B", "512 B", "1.5 KiB", "80.0 GiB": one decimal from KiB on.
std::string FormatBytes(int64_t bytes);

// "80GiB", "1.5 MiB", "4096", "4096 B". A fraction is taken to the nearest whole byte. Not
// negative.
absl::StatusOr<int64_t> ParseBytes(absl::string_view text);

// "8K", "5M" when the count is a whole number of them, otherwise plain digits.
std::string FormatTokenCount(int64_t tokens);

// "8K" = 8,192, "5M" = 5,242,880, "1.5M", "8192". The result must be a whole number, not negative.
absl::StatusOr<int64_t> ParseTokenCount(absl::string_view text);

// "12 ms", "3.2 s", "4 min 10 s", "2 h 5 min", "3 d 4 h". Negative is written as zero, infinite as
// "unknown".
std::string FormatTimeSpan(absl::Duration duration);

// "1,048,576".
std::string FormatCount(int64_t count);

}  // namespace upipe
