#include "common/chart/svg.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"
#include "common/chart/palette.h"

namespace upipe::chart {
namespace {

// Text that lies on other things has a rim of the background's colour.
constexpr char kPictureStyle[] = R"css(
text { font: 12px system-ui, "Segoe UI", "DejaVu Sans", sans-serif; fill: var(--soft);
  font-variant-numeric: tabular-nums; }
text.title { font-size: 16px; font-weight: 600; fill: var(--ink); }
text.strong { fill: var(--ink); } text.small { font-size: 11px; } text.bad { fill: var(--bad); }
text.rim { paint-order: stroke; stroke: var(--card); stroke-width: 3.5px; stroke-linejoin: round; }
.grid { stroke: var(--faint); } .axis { stroke: var(--rule); }
.section { stroke: var(--rule); stroke-dasharray: 2 3; }
.line { fill: none; stroke-width: 2; stroke-linejoin: round; stroke-linecap: round; }
.level { stroke: var(--ink); stroke-width: 1.25; stroke-dasharray: 5 4; }
.limit { stroke: var(--bad); stroke-width: 1.5; }
.beyond { fill: var(--bad); fill-opacity: 0.08; }
.marker { stroke: var(--card); stroke-width: 1.5; }
.hover { fill: transparent; } .hover:hover { fill: var(--ink); fill-opacity: 0.07; }
)css";

}  // namespace

std::string Escape(const std::string& text) {
  std::string allowed;
  for (const char c : text) {
    const auto code = static_cast<unsigned char>(c);
    if (code >= 0x20 || c == '\n' || c == '\t') allowed.push_back(c);
  }
  return absl::StrReplaceAll(allowed,
                             {{"&", "&amp;"}, {"<", "&lt;"}, {">", "&gt;"}, {"\"", "&quot;"}});
}

std::string Number(double value) {
  const std::string text = absl::StrFormat("%.2f", value);
  return text == "-0.00" ? "0.00" : text;
}

std::string Fill(const std::string& colour) { return absl::StrCat("fill=\"var(", colour, ")\""); }

std::string Text(double x, double y, const char* anchor, const std::string& text,
                 const std::string& more) {
  return absl::StrCat("<text x=\"", Number(x), "\" y=\"", Number(y), "\" text-anchor=\"", anchor,
                      "\" ", more, ">", Escape(text), "</text>\n");
}

std::string OpenPicture(double width, double height, const std::string& title) {
  const std::string size =
      absl::StrCat("width=\"", Number(width), "\" height=\"", Number(height), "\"");
  return absl::StrCat("<svg xmlns=\"http://www.w3.org/2000/svg\" ", size, " viewBox=\"0 0 ",
                      Number(width), " ", Number(height), "\" role=\"img\" aria-label=\"",
                      Escape(title), "\">\n<style>", kPalette, kPictureStyle, "</style>\n<rect ",
                      size, " ", Fill("--card"), "/>\n");
}

std::string Rule(double x1, double y1, double x2, double y2, const std::string& more) {
  return absl::StrCat("<line x1=\"", Number(x1), "\" y1=\"", Number(y1), "\" x2=\"", Number(x2),
                      "\" y2=\"", Number(y2), "\" ", more, "/>\n");
}

}  // namespace upipe::chart
