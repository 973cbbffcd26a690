"""SVG text: shapes, words that are cut to their room, colours that follow light and dark as common/chart/palette.h has them."""

import html
import pathlib
import re

PALETTE = pathlib.Path(__file__).resolve().parents[2] / "common" / "chart" / "palette.h"
FONT = "font-family: system-ui, 'Segoe UI', 'DejaVu Sans', sans-serif"
# Of series without a colour of their own, far apart from each other.
SERIES = ["#2a6fbb", "#d2601a", "#1f8a70", "#8a6bbd", "#97bce6", "#7c2d06", "#6fa3a8", "#ee9c55", "#6d6f73", "#4a80c4", "#a78fd1",
          "#b4490f"]
DARK = {"#d2901a": "#e6b04d", "#5c5f63": "#a2a5a9", "#e9c9a8": "#6b5136"}  # what is not in the palette: light -> dark


def palette():
    """The style sheet of the palette, and light colour -> its variable."""
    text = re.search(r'R"css\((.*?)\)css"', PALETTE.read_text(), re.DOTALL).group(1)
    light, dark = text.split("@media", 1)
    names = {color: f"var(--{name})" for name, color in re.findall(r"--([\w-]+): (#[0-9a-f]{6})", light)}
    for number, (color, of_dark) in enumerate(DARK.items()):
        light = light.replace("}", f"  --extra-{number}: {color};\n}}", 1)
        dark = dark.replace("{\n  :root {", f"{{\n  :root {{\n    --extra-{number}: {of_dark};", 1)
        names.setdefault(color, f"var(--extra-{number})")
    return light + "@media" + dark, names


STYLE, NAMES = palette()


def color(hexadecimal):
    return NAMES.get(hexadecimal, hexadecimal)


def width_of(text, size):
    """About, for a sans-serif font; rather too much."""
    narrow = sum(char in "iljt.,:;|'!()[] fr" for char in text)
    wide = sum(char in "mwMW%@" for char in text)
    return size * (0.64 * len(text) - 0.25 * narrow + 0.28 * wide)


def cut(text, size, room):
    if width_of(text, size) <= room:
        return text
    while text and width_of(text + "…", size) > room:
        text = text[:-1]
    return text + "…"


def words(x, y, text, *, size=11, anchor="start", fill="var(--ink)", weight=None, room=None):
    if room is not None:
        text = cut(text, size * (1.1 if weight else 1), room)
    bold = f' font-weight="{weight}"' if weight else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{fill}"{bold}>{html.escape(text)}</text>'


def box(x, y, width, height, fill, *, stroke=None, radius=0, opacity=None):
    extra = (f' stroke="{stroke}"' if stroke else "") + (f' rx="{radius}"' if radius else "") + (f' opacity="{opacity}"' if opacity else "")
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0):.1f}" height="{max(height, 0):.1f}" fill="{fill}"{extra}/>'


def line(x1, y1, x2, y2, stroke, *, width=1, dash=None):
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{stroke}" stroke-width="{width}"{dashed}/>'


def path(points, stroke, *, width=1.8, dash=None):
    steps = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<polyline points="{steps}" fill="none" stroke="{stroke}" stroke-width="{width}" stroke-linejoin="round"{dashed}/>'


def area(points, fill, opacity=0.85):
    steps = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polygon points="{steps}" fill="{fill}" opacity="{opacity}"/>'


def document(width, height, content, title):
    return (f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}" '
            f'role="img">\n<title>{html.escape(title)}</title>\n<style>{STYLE}text {{ {FONT}; }}</style>\n'
            + box(0, 0, width, height, "var(--page)") + "\n" + content + "\n</svg>\n")
