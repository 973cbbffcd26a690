#include "common/units.h"

#include <array>
#include <cmath>
#include <cstddef>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace upipe {
namespace {

constexpr std::array<const char*, 5> kByteUnits = {"B", "KiB", "MiB", "GiB", "TiB"};

struct NumberAndUnit {
  absl::string_view number;
  absl::string_view unit;
};

// "1.5 GiB" -> {"1.5", "GiB"}.
NumberAndUnit Split(absl::string_view text) {
  text = absl::StripAsciiWhitespace(text);
  size_t end = 0;
  while (end < text.size() && (absl::ascii_isdigit(text[end]) || text[end] == '.')) ++end;
  return {text.substr(0, end), absl::StripLeadingAsciiWhitespace(text.substr(end))};
}

// `number` * `scale` as a whole number: exact for digits alone, through double for a fraction. Sets
// `is_whole`. False when it is no number or above 2^62.
bool Scale(absl::string_view number, int64_t scale, int64_t& result, bool& is_whole) {
  constexpr int64_t kMax = int64_t{1} << 62;
  int64_t digits = 0;
  is_whole = true;
  if (absl::SimpleAtoi(number, &digits)) {
    if (digits < 0 || digits > kMax / scale) return false;
    result = digits * scale;
    return true;
  }
  double value = 0;
  if (number.empty() || number.find('.') == absl::string_view::npos ||
      !absl::SimpleAtod(number, &value)) {
    return false;
  }
  value *= static_cast<double>(scale);
  if (!(value >= 0 && value <= static_cast<double>(kMax))) return false;
  is_whole = value == std::floor(value);
  result = static_cast<int64_t>(std::llround(value));
  return true;
}

}  // namespace

std::string FormatBytes(int64_t bytes) {
  double value = std::fabs(static_cast<double>(bytes));
  if (value < 1024) return absl::StrCat(bytes, " B");
  size_t unit = 0;
  while (value >= 1023.95 && unit + 1 < kByteUnits.size()) {
    value /= 1024;
    ++unit;
  }
  return absl::StrFormat("%s%.1f %s", bytes < 0 ? "-" : "", value, kByteUnits[unit]);
}

absl::StatusOr<int64_t> ParseBytes(absl::string_view text) {
  const NumberAndUnit parts = Split(text);
  int64_t scale = parts.unit.empty() ? 1 : 0;
  for (size_t i = 0; i < kByteUnits.size(); ++i) {
    if (parts.unit == kByteUnits[i]) scale = int64_t{1} << (10 * i);
  }
  int64_t bytes = 0;
  bool is_whole = false;
  if (scale == 0 || !Scale(parts.number, scale, bytes, is_whole) || (scale == 1 && !is_whole)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "'", text,
        "' is not a number of bytes: write digits and B, KiB, MiB, GiB or TiB, e.g. 80GiB"));
  }
  return bytes;
}

std::string FormatTokenCount(int64_t tokens) {
  constexpr int64_t kK = 1024, kM = 1024 * 1024;
  if (tokens != 0 && tokens % kM == 0) return absl::StrCat(tokens / kM, "M");
  if (tokens != 0 && tokens % kK == 0) return absl::StrCat(tokens / kK, "K");
  return absl::StrCat(tokens);
}

absl::StatusOr<int64_t> ParseTokenCount(absl::string_view text) {
  const NumberAndUnit parts = Split(text);
  int64_t scale = 0;
  if (parts.unit.empty()) scale = 1;
  if (parts.unit == "K") scale = int64_t{1} << 10;
  if (parts.unit == "M") scale = int64_t{1} << 20;
  int64_t tokens = 0;
  bool is_whole = false;
  if (scale == 0 || !Scale(parts.number, scale, tokens, is_whole) || !is_whole) {
    return absl::InvalidArgumentError(
        absl::StrCat("'", text,
                     "' is not a whole number of tokens: write digits, or a number and K "
                     "(1,024) or M (1,048,576), e.g. 8K"));
  }
  return tokens;
}

std::string FormatTimeSpan(absl::Duration duration) {
  if (duration == absl::InfiniteDuration()) return "unknown";
  if (duration <= absl::ZeroDuration()) return "0 s";
  const double seconds = absl::ToDoubleSeconds(duration);
  if (seconds < 0.9995) return absl::StrFormat("%.0f ms", seconds * 1e3);
  if (seconds < 59.95) return absl::StrFormat("%.1f s", seconds);
  const int64_t whole = std::llround(seconds);
  if (whole < 3600) return absl::StrCat(whole / 60, " min ", whole % 60, " s");
  if (whole < 86400) return absl::StrCat(whole / 3600, " h ", whole % 3600 / 60, " min");
  return absl::StrCat(whole / 86400, " d ", whole % 86400 / 3600, " h");
}

std::string FormatCount(int64_t count) {
  const std::string digits = absl::StrCat(count);
  const size_t sign = count < 0 ? 1 : 0;
  std::string out = digits.substr(0, sign);
  for (size_t i = sign; i < digits.size(); ++i) {
    if (i > sign && (digits.size() - i) % 3 == 0) out += ',';
    out += digits[i];
  }
  return out;
}

}  // namespace upipe
