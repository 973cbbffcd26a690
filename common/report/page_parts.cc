#include "common/report/page_parts.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/time.h"
#include "common/chart/svg.h"

namespace upipe::report {

using chart::Escape;

std::string Tile(const std::string& name, const std::string& value, const std::string& note) {
  return absl::StrCat("<div class=\"tile\"><div class=\"name\">", Escape(name),
                      "</div><div class=\"value\">", Escape(value), "</div><div class=\"note\">",
                      note, "</div></div>\n");
}

std::string RenderCard(const Card& card) {
  return absl::StrCat("<section id=\"", card.id, "\" class=\"card", card.wide ? " wide" : "",
                      "\"><h2>", Escape(card.heading), "</h2><p>", card.words, "</p>\n",
                      card.content, "</section>\n");
}

std::string RenderKey(const ColourKey& key) {
  std::string out = "<div class=\"key\">";
  for (const auto& [name, colour] : key) {
    absl::StrAppend(&out, "<span><i style=\"background:var(", colour, ")\"></i>", Escape(name),
                    "</span>");
  }
  return absl::StrCat(out, "</div>\n");
}

std::string RenderTable(const std::vector<std::pair<std::string, std::string>>& rows) {
  std::string out = "<table>";
  for (const auto& [name, value] : rows) {
    if (value.empty()) continue;
    absl::StrAppend(&out, "<tr><td class=\"name\">", Escape(name), "</td><td>", Escape(value),
                    "</td></tr>\n");
  }
  return absl::StrCat(out, "</table>\n");
}

std::string RenderGrid(const std::vector<std::vector<std::string>>& rows, size_t first_number) {
  std::string out = "<div class=\"scroll\" tabindex=\"0\"><table>";
  for (size_t r = 0; r < rows.size(); ++r) {
    const char* cell = r == 0 ? "th" : "td";
    absl::StrAppend(&out, r == 0 ? "<thead><tr>" : "<tr>");
    for (size_t i = 0; i < rows[r].size(); ++i) {
      absl::StrAppend(&out, "<", cell, i >= first_number ? " class=\"n\">" : ">",
                      Escape(rows[r][i]), "</", cell, ">");
    }
    absl::StrAppend(&out, r == 0 ? "</tr></thead>\n" : "</tr>\n");
  }
  return absl::StrCat(out, "</table></div>\n");
}

std::string RenderFigure(const Draw& draw, chart::Canvas wide, const ColourKey& key) {
  const chart::Canvas narrow = {
      .width = kNarrowWidth, .height = std::clamp(wide.height, 150.0, 260.0), .compact = true};
  return absl::StrCat("<div class=\"desk\">", draw(wide), "</div><div class=\"phone\">",
                      key.empty() ? "" : RenderKey(key), draw(narrow), "</div>\n");
}

std::string UtcTime(int64_t unix_millis) {
  if (unix_millis == 0) return "";
  return absl::FormatTime("%Y-%m-%d %H:%M:%S", absl::FromUnixMillis(unix_millis),
                          absl::UTCTimeZone());
}

std::string Seconds(double seconds) {
  if (!std::isfinite(seconds)) return "-";
  if (std::abs(seconds) < 5e-7) return "0 s";
  if (seconds < 0.001) return absl::StrFormat("%.0f us", seconds * 1e6);
  if (seconds < 1) return absl::StrFormat("%.1f ms", seconds * 1e3);
  return absl::StrFormat(seconds < 100 ? "%.2f s" : "%.0f s", seconds);
}

}  // namespace upipe::report
