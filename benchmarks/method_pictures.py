"""Pictures of benchmarks/results/methods.json as SVG files: pure functions from the report to text.

Colours are those of all pictures (common/chart/palette.h), light and dark in one file. Shapes tell their numbers
on hover.
"""

import math
import os
import re

STYLE = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "common", "chart", "palette.h")
WIDTH = 860
NAMES = 130  # left of what is drawn
VALUES = 110  # right of it


def escape(text):
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace('"', "&quot;")


def mib(count):
    return f"{count / 2**20:,.1f} MiB"


def style():
    with open(STYLE) as file:
        light, dark = re.findall(r":root \{(.*?)\}", file.read(), re.DOTALL)
    colours = [" ".join(re.findall(r"--[\w-]+: #[0-9a-f]+;", block)) for block in (light, dark)]
    return (
        f"<style>:root {{ {colours[0]} }}\n"
        f"@media (prefers-color-scheme: dark) {{ :root {{ {colours[1]} }} }}\n"
        'text { font: 12px system-ui, "DejaVu Sans", sans-serif; fill: var(--soft); }\n'
        "text.strong { fill: var(--ink); } .axis { stroke: var(--rule); } .aim { stroke-dasharray: 5 4; }</style>\n"
    )


def picture(height, title, parts):
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" role="img" '
    head += f'aria-label="{escape(title)}">\n'
    back = f'<rect width="{WIDTH}" height="{height:.0f}" fill="var(--card)"/>\n'
    return head + style() + back + text(16, 24, title, "strong") + "".join(parts) + "</svg>\n"


def text(x, y, content, kind="", anchor="start"):
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{kind}">{escape(content)}</text>\n'


def bar(x, y, width, height, colour, tip):
    shape = f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.5):.1f}" height="{height}" fill="var(--{colour})">'
    return f"{shape}<title>{escape(tip)}</title></rect>\n"


def line(x1, y1, x2, y2, kind="axis", colour="rule", width=1):
    ends = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {ends} class="{kind}" style="stroke: var(--{colour}); stroke-width: {width}"/>\n'


def dot(x, y, radius, colour, tip):
    shape = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="var(--{colour})">'
    return f"{shape}<title>{escape(tip)}</title></circle>\n"


def key(tags):
    """The tags' names with their colours, in lines from y = 44, and where the next line would be."""
    parts, x, y = [], NAMES, 44
    for tag in tags:
        width = 26 + 7 * len(tag)
        if x + width > WIDTH:
            x, y = NAMES, y + 18
        parts += [bar(x, y - 9, 10, 10, tag, tag), text(x + 15, y, tag)]
        x += width
    return parts, y + 18


def widest(report):
    """The rows of the most ranks and the longest context that all methods ran at."""
    ranks = max(row["ranks"] for row in report["rows"])
    context = max(row["context"] for row in report["rows"])
    return [row for row in report["rows"] if (row["ranks"], row["context"]) == (ranks, context)]


def stack(y, height, scale, tags, memory, owner):
    """One bar of a memory's categories, and where it ends."""
    parts, x = [], NAMES
    for tag in tags:
        count = memory["at_peak_bytes"].get(tag, 0)
        if count:
            parts.append(bar(x, y, count * scale, height, tag, f"{owner}, {tag}: {mib(count)}"))
            x += count * scale
    return parts, x


def memory(report):
    """Bytes of the fullest rank at its peak by category, one bar per method; host memory as a second, thinner bar."""
    rows = widest(report)
    both = [row[pool] for pool in ("device_memory", "host_memory") for row in rows]
    tags = list(dict.fromkeys(tag for memory in both for tag in memory["at_peak_bytes"]))
    scale = (WIDTH - NAMES - VALUES) / max(memory["peak_bytes"] for memory in both)
    parts, y = key(tags)
    for row in rows:
        parts.append(text(NAMES - 10, y + 13, row["method"], "strong", "end"))
        device, host = row["device_memory"], row["host_memory"]
        bars, end = stack(y, 18, scale, tags, device, row["method"])
        parts += [*bars, text(end + 6, y + 13, mib(device["peak_bytes"]))]
        y += 21
        if host["peak_bytes"]:
            bars, end = stack(y, 8, scale, tags, host, f"{row['method']}, host memory")
            parts += [*bars, text(end + 6, y + 8, f"host {mib(host['peak_bytes'])}")]
            y += 12
        y += 9
    title = f"Peak memory of the fullest rank, {rows[0]['ranks']} ranks, {rows[0]['context']:,} tokens"
    return picture(y + 6, title, parts)


def axis_step(low, high):
    """A round distance of about six ticks."""
    exact = (high - low) / 6
    power = 10 ** math.floor(math.log10(exact))
    return next(power * step for step in (1, 2, 5, 10) if power * step >= exact)


def ratio(report):
    """Ratio of processor seconds, UPipe to others: every ABBA pair a dot, their mean and its interval above them."""
    aim = 1.03
    rows = report["comparisons"]
    values = [v for row in rows for v in [*row["ratios"], *row.get("interval_95", [])]] + [1, aim]
    margin = 0.04 * (max(values) - min(values))
    low, high = min(values) - margin, max(values) + margin
    bottom = 48 + 52 * len(rows)

    def at(value):
        return NAMES + (value - low) / (high - low) * (WIDTH - NAMES - VALUES)

    parts = [line(at(1), 40, at(1), bottom), line(at(aim), 40, at(aim), bottom, "aim", "bad")]
    parts.append(text(at(aim) + 6, 48, f"aim: at most {aim}"))
    step = axis_step(low, high)
    for tick in range(math.ceil(low / step), math.floor(high / step) + 1):
        parts.append(text(at(tick * step), bottom + 18, f"{tick * step:.4g}", "", "middle"))
    parts.append(line(NAMES, bottom, WIDTH - VALUES, bottom))
    for index, row in enumerate(rows):
        y = 66 + 52 * index
        parts.append(text(NAMES - 10, y + 12, f"beside {row['other']}", "strong", "end"))
        interval = row.get("interval_95")
        if interval:
            parts.append(line(at(interval[0]), y, at(interval[1]), y, "", "upipe", 3))
        tip = f"{row['ratio']:.4f}" + (f", {interval[0]:.4f} to {interval[1]:.4f} at 95 %" if interval else "")
        parts.append(dot(at(row["ratio"]), y, 6, "upipe", tip))
        parts.append(text(WIDTH - VALUES + 8, y + 4, f"{row['ratio']:.3f}", "strong"))
        parts += [dot(at(value), y + 18, 3.5, "upipe-plan", f"pair: {value:.4f}") for value in row["ratios"]]
    title = f"UPipe's processor seconds over others', {rows[0]['ranks']} ranks, {rows[0]['context']:,} tokens"
    return picture(bottom + 28, title, parts)


# File in docs/pictures: what draws it, and what it shows for those who cannot see it.
PICTURES = {
    "methods-memory.svg": (memory, "Peak memory by category of every method"),
    "methods-ratio.svg": (ratio, "Ratio of processor seconds, UPipe to Ulysses and to ring"),
}
