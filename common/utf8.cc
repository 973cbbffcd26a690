#include "common/utf8.h"

#include <algorithm>
#include <cstdint>

namespace upipe {

size_t Utf8Length(absl::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<uint8_t>(text[i]); };
  const uint8_t first = byte(0);
  if (first < 0x80) return 1;
  const size_t length = first >= 0xf0 ? 4 : first >= 0xe0 ? 3 : 2;
  if (first < 0xc2 || first > 0xf4 || text.size() < length) return 0;
  uint32_t code = first & (0x7f >> length);
  for (size_t i = 1; i < length; ++i) {
    if ((byte(i) & 0xc0) != 0x80) return 0;
    code = code << 6 | (byte(i) & 0x3f);
  }
  const bool overlong = (length == 3 && code < 0x800) || (length == 4 && code < 0x10000);
  return overlong || code > 0x10ffff || (code >= 0xd800 && code < 0xe000) ? 0 : length;
}

std::string ToUtf8(absl::string_view text, size_t bytes_max) {
  std::string clean;
  while (!text.empty()) {
    const size_t length = Utf8Length(text);
    if (clean.size() + std::max<size_t>(length, 1) > bytes_max) break;
    if (length == 0) {
      clean += '?';
    } else {
      clean.append(text.data(), length);
    }
    text.remove_prefix(std::max<size_t>(length, 1));
  }
  return clean;
}

}  // namespace upipe
