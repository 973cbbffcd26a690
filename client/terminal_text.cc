#include "client/terminal_text.h"

#include <cstdint>

#include "common/utf8.h"

namespace upipe::client {
namespace {

struct Span {
  uint32_t first;
  uint32_t last;
};

// Blocks whose characters take two columns: East Asian scripts, full-width forms, pictographs.
constexpr Span kWide[] = {
    {0x1100, 0x115F},   {0x231A, 0x231B},   {0x23E9, 0x23F3},   {0x2614, 0x2615},
    {0x2648, 0x2653},   {0x26A1, 0x26A1},   {0x2705, 0x2705},   {0x2728, 0x2728},
    {0x274C, 0x274C},   {0x2753, 0x2757},   {0x2795, 0x2797},   {0x2B1B, 0x2B1C},
    {0x2B50, 0x2B55},   {0x2E80, 0x303E},   {0x3041, 0xA4CF},   {0xA960, 0xA97C},
    {0xAC00, 0xD7A3},   {0xF900, 0xFAFF},   {0xFE30, 0xFE6F},   {0xFF00, 0xFF60},
    {0xFFE0, 0xFFE6},   {0x17000, 0x18CFF}, {0x1B000, 0x1B2FF}, {0x1F004, 0x1F004},
    {0x1F0CF, 0x1F0CF}, {0x1F18E, 0x1F18E}, {0x1F191, 0x1F19A}, {0x1F200, 0x1F320},
    {0x1F32D, 0x1F64F}, {0x1F680, 0x1F6FF}, {0x1F7E0, 0x1F7EB}, {0x1F900, 0x1FAFF},
    {0x20000, 0x3FFFD}};

// Characters that lie on the one before.
constexpr Span kCombining[] = {{0x0300, 0x036F}, {0x0483, 0x0489}, {0x0591, 0x05BD},
                               {0x064B, 0x065F}, {0x1AB0, 0x1AFF}, {0x1DC0, 0x1DFF},
                               {0x20D0, 0x20F0}, {0xFE00, 0xFE0F}, {0xFE20, 0xFE2F}};

// What terminals obey or nobody sees: controls, line and paragraph ends, joiners, marks and
// overrides of direction.
constexpr Span kControl[] = {
    {0x00, 0x1F},     {0x7F, 0x9F},     {0xAD, 0xAD},     {0x061C, 0x061C}, {0x200B, 0x200F},
    {0x2028, 0x202E}, {0x2060, 0x206F}, {0xFEFF, 0xFEFF}, {0xFFF9, 0xFFFB}, {0xE0000, 0xE0FFF}};

template <size_t n>
bool IsIn(const Span (&spans)[n], uint32_t code) {
  for (const Span& span : spans) {
    if (code >= span.first && code <= span.last) return true;
  }
  return false;
}

// Of a well-formed character.
uint32_t CodePoint(absl::string_view character) {
  const auto first = static_cast<unsigned char>(character[0]);
  if (character.size() == 1) return first;
  uint32_t code = first & (0xFFu >> (character.size() + 1));
  for (size_t i = 1; i < character.size(); ++i) {
    code = code << 6 | (static_cast<unsigned char>(character[i]) & 0x3Fu);
  }
  return code;
}

size_t WidthOf(uint32_t code) { return IsIn(kCombining, code) ? 0 : IsIn(kWide, code) ? 2 : 1; }

struct Line {
  std::string text;
  size_t columns = 0;
};

Line Fit(absl::string_view text, size_t width) {
  Line line;
  while (!text.empty()) {
    const size_t length = Utf8Length(text);
    absl::string_view shown = length == 0 ? "?" : text.substr(0, length);
    uint32_t code = CodePoint(shown);
    if (IsIn(kControl, code)) {
      shown = " ";
      code = ' ';
    }
    const size_t columns = WidthOf(code);
    if (line.columns + columns > width) break;
    line.text.append(shown.data(), shown.size());
    line.columns += columns;
    text.remove_prefix(length == 0 ? 1 : length);
  }
  return line;
}

}  // namespace

size_t ColumnsOf(absl::string_view text) { return Fit(text, static_cast<size_t>(-1) / 2).columns; }

std::string Fitted(absl::string_view text, size_t width) { return Fit(text, width).text; }

std::string Padded(absl::string_view text, size_t width) {
  Line line = Fit(text, width);
  return line.text.append(width - line.columns, ' ');
}

}  // namespace upipe::client
