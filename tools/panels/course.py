"""Panels over time: axes, lines, stacks and bars, with a legend that says the last and the highest value of each."""

import svg
import units

SMALL = 10.5
ROW = 15  # height of a legend row


class Curve:
    """One series: its name, points, colour, and how it is drawn."""

    def __init__(self, name, points, color, *, dashed, stacked, bars):
        self.name, self.points, self.color = name, points, color
        self.dashed, self.stacked, self.bars = dashed, stacked and not dashed, bars


def timeseries(panel, curves, start, end, step, width, height):
    """Everything below the title, in a room of width x height from (0, 0)."""
    unit = panel["fieldConfig"]["defaults"]["unit"]
    rows, legend = legend_of(panel, curves, unit, width, max(1, int(min(height - 96, 0.42 * height) // ROW)))
    bottom = height - rows * ROW - 24
    stacks = stack([curve for curve in curves if curve.stacked], start, end, step)
    low, high = limits(panel, curves, stacks)
    marks = units.ticks(low, high, unit, 4 if bottom > 90 else 2)
    left = 10 + max(svg.width_of(units.shown(mark, unit), SMALL) for mark in marks)
    right, top = width - 8, 6

    def x(time):
        return left + (time - start) / (end - start) * (right - left)

    def y(value):
        return bottom - (min(max(value, low), high) - low) / (high - low) * (bottom - top)

    parts = axes(marks, unit, start, end, x, y, left, right, bottom)
    for curve, lower, upper in stacks:
        parts += stacked(curve, lower, upper, step, x, y)
    if panel["fieldConfig"]["defaults"]["custom"].get("thresholdsStyle", {}).get("mode") == "line":
        for threshold in panel["fieldConfig"]["defaults"]["thresholds"]["steps"][1:]:
            if low <= threshold["value"] <= high:
                parts.append(svg.line(left, y(threshold["value"]), right, y(threshold["value"]), svg.color(threshold["color"]), dash="2 3"))
    for curve in curves:
        if not curve.stacked:
            parts += bars(curve, step, x, y, low) if curve.bars else lines(curve, step, x, y)
    return parts + [f'<g transform="translate(0 {height - rows * ROW})">' + "".join(legend) + "</g>"]


def limits(panel, curves, stacks):
    defaults = panel["fieldConfig"]["defaults"]
    values = [value for curve in curves if not curve.stacked for _, value in curve.points]
    values += [top for _, _, upper in stacks for top in upper.values()]
    soft = defaults["custom"].get("axisSoftMin")
    low = min(values + [bound for bound in (defaults.get("min"), soft) if bound is not None])
    high = max(values + [low])
    if defaults["custom"].get("thresholdsStyle", {}).get("mode") == "line":  # where they are near, so that one sees the distance
        span = high - low
        near = [t["value"] for t in defaults["thresholds"]["steps"][1:] if low - span <= t["value"] <= high + 2 * span]
        low, high = min([low, *near]), max([high, *near])
    if "max" in defaults:
        high = max(high, defaults["max"]) if high > 0.3 * defaults["max"] else high
    if high <= low:
        high = low + (abs(low) * 0.2 or 1)
    room = 0.06 * (high - low)
    return (low if low in (0, defaults.get("min")) else low - room), high + room


def axes(marks, unit, start, end, x, y, left, right, bottom):
    parts = []
    for mark in marks:
        parts.append(svg.line(left, y(mark), right, y(mark), "var(--faint)"))
        parts.append(svg.words(left - 5, y(mark) + 3.5, units.shown(mark, unit), size=SMALL, anchor="end", fill="var(--soft)"))
    times = units.time_ticks(start, end, (right - left) / 90)
    for time, text in zip(times, units.clock(times)):
        half = svg.width_of(text, SMALL) / 2
        place = min(max(x(time), left + half), right - half)
        parts.append(svg.line(x(time), bottom, x(time), bottom + 3, "var(--rule)"))
        parts.append(svg.words(place, bottom + 15, text, size=SMALL, anchor="middle", fill="var(--soft)"))
    return parts + [svg.line(left, bottom, right, bottom, "var(--rule)")]


def runs(points, step):
    """Parted where values are missing."""
    found = []
    for time, value in points:
        if not found or time - found[-1][-1][0] > 1.5 * step:
            found.append([])
        found[-1].append((time, value))
    return found


def lines(curve, step, x, y):
    dash = "6 4" if curve.dashed else None
    parts = []
    for run in runs(curve.points, step):
        points = [(x(time), y(value)) for time, value in run]
        if len(points) == 1:
            points.append((points[0][0] + 2, points[0][1]))
        parts.append(svg.path(points, curve.color, dash=dash))
    return parts


def bars(curve, step, x, y, low):
    wide = max(x(step) - x(0) - 0.5, 1.5)
    return [svg.box(x(time) - wide / 2, y(value), wide, y(max(low, 0)) - y(value), curve.color) for time, value in curve.points if value]


def stack(curves, start, end, step):
    """[(curve, time -> lower, time -> upper)], each on those before it."""
    floor, found = {}, []
    for curve in curves:
        lower = {time: floor.get(time, 0) for time, _ in curve.points}
        upper = {time: lower[time] + value for time, value in curve.points}
        floor |= upper
        found.append((curve, lower, upper))
    return found


def stacked(curve, lower, upper, step, x, y):
    if curve.bars:
        wide = max(x(step) - x(0) - 0.5, 1.5)
        return [svg.box(x(time) - wide / 2, y(upper[time]), wide, y(lower[time]) - y(upper[time]), curve.color)
                for time in upper if upper[time] > lower[time]]
    parts = []
    for run in runs(sorted(upper.items()), step):
        times = [time for time, _ in run]
        last = times[-1] + (step / 2 if len(times) == 1 else 0)
        top = [(x(time), y(upper[time])) for time in times] + [(x(last), y(upper[times[-1]]))]
        below = [(x(last), y(lower[times[-1]]))] + [(x(time), y(lower[time])) for time in reversed(times)]
        parts.append(svg.area(top + below, curve.color))
    return parts


def legend_of(panel, curves, unit, width, most):
    """Rows it takes, and its parts: swatch, name, last and highest value, in as many columns as there is room for."""
    columns = max(1, min(len(curves), int(width // 230)))
    rows = -(-len(curves) // columns)
    shown, left_out = curves, 0
    if rows > most:
        rows = most
        shown = curves[:rows * columns - 1]
        left_out = len(curves) - len(shown)
    room = width / columns
    parts = []
    for number, curve in enumerate(shown):
        left, y = number % columns * room + 6, number // columns * ROW + 11
        values = [value for _, value in curve.points]
        text, highest = units.shown(values[-1], unit), units.shown(max(values), unit)
        both = f"{text}, max {highest}"
        if highest != text and svg.width_of(curve.name, SMALL) + svg.width_of(both, SMALL) + 38 <= room:
            text = both
        parts.append(svg.line(left, y - 4, left + 14, y - 4, curve.color, width=3, dash="4 3") if curve.dashed else
                     svg.box(left, y - 8, 14, 8, curve.color, radius=1.5))
        value_width = svg.width_of(text, SMALL)
        name = svg.cut(curve.name, SMALL, room - value_width - 38)
        parts.append(svg.words(left + 19, y, name, size=SMALL))
        parts.append(svg.words(left + 19 + svg.width_of(name, SMALL) + 7, y, text, size=SMALL, fill="var(--soft)"))
    if left_out:
        left, y = len(shown) % columns * room + 25, len(shown) // columns * ROW + 11
        parts.append(svg.words(left, y, f"and {left_out} more", size=SMALL, fill="var(--soft)"))
    return rows, parts
