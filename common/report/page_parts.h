// What pages are made of: tiles, cards, keys, tables, and figures in two sizes. Pure; text is
// escaped unless it is said to be HTML.
#pragma once

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "common/chart/charts.h"

namespace upipe::report {

// `note` is HTML.
std::string Tile(const std::string& name, const std::string& value, const std::string& note);

struct Card {
  std::string id;  // of the section, for links; lower case, no spaces
  std::string heading;
  std::string words;    // HTML, above the content
  std::string content;  // HTML
  bool wide = false;    // over the page's whole width
};
std::string RenderCard(const Card& card);

// Names beside the colours they have, CSS variables.
using ColourKey = std::vector<std::pair<std::string, std::string>>;
std::string RenderKey(const ColourKey& key);

// Two columns, names and values; rows without a value are left out.
std::string RenderTable(const std::vector<std::pair<std::string, std::string>>& rows);

// The first row is the heading. Columns from `first_number` on are numbers, at the right. Scrolls
// sideways by itself where the screen is narrow.
std::string RenderGrid(const std::vector<std::vector<std::string>>& rows, size_t first_number);

// A picture drawn for wide and for narrow screens, of which one is shown; the narrow one has the
// key above it.
using Draw = std::function<std::string(chart::Canvas)>;
std::string RenderFigure(const Draw& draw, chart::Canvas wide, const ColourKey& key);

inline constexpr double kCardWidth = 540;   // of a picture in a card
inline constexpr double kWideWidth = 1106;  // of one in a wide card
inline constexpr double kNarrowWidth = 300;

// "2026-01-31 08:15:30"; "" for 0.
std::string UtcTime(int64_t unix_millis);

// "3.21 s", "45.1 ms", "870 us".
std::string Seconds(double seconds);

}  // namespace upipe::report
