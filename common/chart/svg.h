// The few SVG elements that every picture is made of, as text. Colours are the CSS variables of
// palette.h.
#pragma once

#include <string>

namespace upipe::chart {

// Text as HTML, SVG and XML show it: & < > and quotes escaped, characters that XML forbids left
// out.
std::string Escape(const std::string& text);

// A coordinate, two digits after the point.
std::string Number(double value);

// Attribute that fills with a variable: Fill("--weights").
std::string Fill(const std::string& colour);

// `anchor` is start, middle or end; `more` are further attributes. `text` is escaped.
std::string Text(double x, double y, const char* anchor, const std::string& text,
                 const std::string& more = "");

// Begins a picture that is a file of its own: the palette, the styles of text and lines, and a
// background; `title` is read by screen readers. Ends with "</svg>\n".
std::string OpenPicture(double width, double height, const std::string& title);

std::string Rule(double x1, double y1, double x2, double y2, const std::string& more);

}  // namespace upipe::chart
