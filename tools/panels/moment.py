"""Panels of one moment: a number with its course behind it, bars against what they may reach, a table."""

import math

import svg
import units


def level(panel, value):
    """The colour of the threshold that the value is above."""
    found = None
    for step in panel["fieldConfig"]["defaults"]["thresholds"]["steps"]:
        if step["value"] is None or value >= step["value"]:
            found = step["color"]
    return svg.color(found)


def stat(panel, points, width, height):
    defaults = panel["fieldConfig"]["defaults"]
    value = points[-1][1]
    plain = panel["options"]["colorMode"] == "none"
    fill = "var(--ink)" if plain else level(panel, value)
    text = units.shown(value, defaults["unit"], defaults.get("decimals"))
    size = min(26, height * 0.42, 26 * (width - 20) / max(svg.width_of(text, 26), 1))
    low, high = min(v for _, v in points), max(v for _, v in points)
    first, last = points[0][0], points[-1][0]
    parts = []
    if high > low and last > first:
        def place(time, value):
            return 6 + (time - first) / (last - first) * (width - 12), height - 5 - (value - low) / (high - low) * height * 0.32
        curve = [place(time, value) for time, value in points]
        parts.append(svg.area([(6, height - 3), *curve, (width - 6, height - 3)], "var(--train)" if plain else fill, 0.16))
    return parts + [svg.words(width / 2, height * 0.56, text, size=round(size, 1), anchor="middle", fill=fill, weight=600)]


def bargauge(panel, entries, width, height):
    """entries: [(name, value)]."""
    defaults = panel["fieldConfig"]["defaults"]
    high = defaults.get("max") or max([value for _, value in entries if math.isfinite(value)] + [1e-9]) * 1.05
    most = max(1, int(height // 26))
    left_out = len(entries) - most if len(entries) > most else 0
    shown = entries[:most - 1] if left_out else entries
    pitch = min(42, (height - 4) / (len(shown) + bool(left_out)))
    parts = []
    for number, (name, value) in enumerate(shown):
        y = number * pitch + 2
        fill = level(panel, value)
        text = units.shown(value, defaults["unit"], defaults.get("decimals"))
        share = min(max(value / high, 0), 1) if math.isfinite(value) else 0
        thick = max(5, min(14, pitch - 18))
        room = width - 20
        parts.append(svg.words(10, y + 11, name, size=10.5, room=room - svg.width_of(text, 11) - 12))
        parts.append(svg.words(width - 10, y + 11, text, size=11, anchor="end", fill=fill, weight=600))
        parts.append(svg.box(10, y + 15, room, thick, "var(--faint)", radius=2))
        parts.append(svg.box(10, y + 15, room * share, thick, fill, radius=2))
        for step in defaults["thresholds"]["steps"][1:]:
            if 0 < step["value"] < high:
                place = 10 + room * step["value"] / high
                parts.append(svg.line(place, y + 13, place, y + 17 + thick, svg.color(step["color"])))
        if "max" in defaults:
            parts.append(svg.line(width - 10, y + 12, width - 10, y + 18 + thick, "var(--ink)", width=2))
    if left_out:
        parts.append(svg.words(10, len(shown) * pitch + 13, f"and {left_out + 1} more", fill="var(--soft)"))
    return parts


def table(panel, rows, width, height):
    """rows: [{column: value}]; values of queries are numbers, of labels words."""
    unit_of = {override["matcher"]["options"]: prop["value"] for override in panel["fieldConfig"]["overrides"]
               for prop in override["properties"] if prop["id"] == "unit"}
    organize = panel["transformations"][-1]["options"]
    columns = [organize["renameByName"][name] for name in organize["indexByName"]]
    cells = [[units.shown(row[c], unit_of[c]) if c in unit_of and c in row else row.get(c, "") for c in columns] for row in rows]
    most = max(1, int((height - 26) // 19))
    left_out = max(0, len(cells) - most)
    widths = [max(svg.width_of(text, 11.5) for text in [column, *(line[i] for line in cells)]) + 14 for i, column in enumerate(columns)]
    stretch = (width - 16) / sum(widths)
    parts, left = [], 8.0
    for i, column in enumerate(columns):
        room = widths[i] * stretch
        number = column in unit_of
        x, anchor = (left + room - 6, "end") if number else (left, "start")
        parts.append(svg.words(x, 14, column, size=11, anchor=anchor, fill="var(--soft)", room=room - 6, weight=600))
        for place, line in enumerate(cells[:most]):
            parts.append(svg.words(x, 36 + place * 19, line[i], size=11, anchor=anchor, room=room - 4))
        left += room
    for place in range(min(len(cells), most)):
        parts.append(svg.line(8, 22 + place * 19, width - 8, 22 + place * 19, "var(--faint)"))
    if left_out:
        parts.append(svg.words(8, height - 3, f"and {left_out} more", size=10.5, fill="var(--soft)"))
    return parts
