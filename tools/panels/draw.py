#!/usr/bin/env python3
"""Draws a Grafana dashboard without Grafana: each panel, and the whole page, as SVG from Prometheus. Python alone.

  tools/panels/draw.py --prometheus http://127.0.0.1:9090 --dashboard deploy/grafana/dashboards/memory.json -o out/panels

--panel TITLE draws only that one, as often as given; the page then holds those. --png makes PNG beside SVG, where there is
a chromium.
"""

import argparse
import json
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time

import course
import moment
import svg
from prometheus import Prometheus, Refused

CELL, ROW, GAP, HEAD = 46, 36, 8, 26  # one column, one row of the grid, between panels, a panel's title


def seconds(text):
    number, unit = re.fullmatch(r"(\d+)([smhd])", text).groups()
    return int(number) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[unit]


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prometheus", required=True, metavar="URL")
    parser.add_argument("--dashboard", required=True, type=pathlib.Path, metavar="FILE")
    parser.add_argument("-o", "--output", required=True, type=pathlib.Path, metavar="DIR")
    parser.add_argument("--var", action="append", default=[], metavar="NAME=VALUE", help="of a variable; all values where it may")
    parser.add_argument("--range", type=seconds, default=3600, help="how far back, such as 30m (default: 1h)")
    parser.add_argument("--end", type=float, help="Unix time (default: now)")
    parser.add_argument("--scrape-interval", type=seconds, default=15, help="of that Prometheus (default: 15s)")
    parser.add_argument("--panel", action="append", default=[], metavar="TITLE")
    parser.add_argument("--png", action="store_true")
    return parser.parse_args()


class Drawing:
    """One dashboard, one stretch of time."""

    def __init__(self, source, board, given, end, length, scrape_interval):
        self.source, self.board = source, board
        self.end, self.start = end, end - length
        self.scrape_interval = scrape_interval
        self.variables = self.choose(given)

    def choose(self, given):
        """Name -> what stands for it in a query."""
        found = {}
        for variable in self.board["templating"]["list"]:
            if variable["type"] != "query":
                continue
            if variable["name"] in given:
                found[variable["name"]] = given[variable["name"]]
            elif variable["includeAll"]:
                found[variable["name"]] = variable["allValue"]
            else:
                expr, label = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["definition"]).groups()
                values = self.source.label_values(expr, label, self.start, self.end)
                if not values:
                    raise Refused(f"no {label} in {expr}; name one with --var {variable['name']}=..")
                found[variable["name"]] = values[0]
        return found

    def filled(self, expr, step):
        interval = max(4 * self.scrape_interval, step + self.scrape_interval)
        expr = expr.replace("$__rate_interval", f"{interval:.0f}s").replace("$__range", f"{self.end - self.start:.0f}s")
        for name, value in self.variables.items():
            expr = expr.replace(f"${name}", value)
        return expr

    def content(self, panel, width, height):
        """What stands below the title, or nothing where there is no data."""
        # Whole seconds, and points that do not move from one drawing to the next.
        step = max(1, round((self.end - self.start) / (width / 2.5)))
        if panel["type"] in ("timeseries", "stat"):
            start = self.start // step * step
            found = [(target, self.source.course(self.filled(target["expr"], step), start, self.end, step)) for target in panel["targets"]]
            if not any(points for _, courses in found for _, points in courses):
                return None
            if panel["type"] == "stat":
                return moment.stat(panel, next(points for _, courses in found for _, points in courses if points), width, height)
            return course.timeseries(panel, curves(panel, found), start, self.end, step, width, height)
        found = [(target, self.source.now(self.filled(target["expr"], step), self.end)) for target in panel["targets"]]
        if not any(entries for _, entries in found):
            return None
        if panel["type"] == "bargauge":
            (target, entries), = found
            return moment.bargauge(panel, sorted(((named(target, labels), value) for labels, value in entries), key=natural), width, height)
        return moment.table(panel, merged(panel, found), width, height)

    def draw(self, panel):
        """(width, height, SVG parts, whether there was data)."""
        where = panel["gridPos"]
        width, height = where["w"] * CELL - GAP, where["h"] * ROW - GAP
        content = self.content(panel, width, height - HEAD - 6)
        parts = [svg.box(0.5, 0.5, width - 1, height - 1, "var(--card)", stroke="var(--faint)", radius=4),
                 svg.words(10, 18, panel["title"], size=12, weight=600, room=width - 16)]
        if content is None:
            parts.append(svg.words(width / 2, height / 2 + 8, "no data", anchor="middle", fill="var(--soft)"))
        else:
            parts.append(f'<g transform="translate(0 {HEAD})">' + "\n".join(content) + "</g>")
        return width, height, "\n".join(parts), content is not None


def natural(entry):
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", entry[0])]


def named(target, labels):
    name = re.sub(r"\{\{(\w+)\}\}", lambda match: labels.get(match.group(1), ""), target["legendFormat"])
    return " ".join(name.split())


def merged(panel, found):
    """Rows of a table: entries of all queries with the same labels."""
    renamed = panel["transformations"][-1]["options"]["renameByName"]
    rows = {}
    for target, entries in found:
        value_name = renamed.get("Value") or renamed[f"Value #{target['refId']}"]
        for labels, value in entries:
            shown = {renamed[name]: text for name, text in labels.items() if name in renamed}
            rows.setdefault(tuple(sorted(shown.items())), shown)[value_name] = value
    return [row for _, row in sorted(rows.items(), key=lambda item: natural(["".join(text for _, text in item[0])]))]


def curves(panel, found):
    """Every series of the queries as it is drawn, by name within a query."""
    custom, overrides = panel["fieldConfig"]["defaults"]["custom"], panel["fieldConfig"]["overrides"]

    def property_of(matcher, value, wanted):
        for override in overrides:
            if override["matcher"] == {"id": matcher, "options": value}:
                for prop in override["properties"]:
                    if prop["id"] == wanted:
                        return prop["value"]
        return None

    result, used = [], 0
    order = {override["matcher"]["options"]: place for place, override in enumerate(overrides)}
    for target, courses in found:
        ref = target["refId"]
        dashed = property_of("byFrameRefID", ref, "custom.lineStyle") is not None
        entries = [(named(target, labels), points) for labels, points in courses if points]
        for name, points in sorted(entries, key=lambda entry: (order.get(entry[0], len(order)), natural(entry))):
            chosen = property_of("byName", name, "color") or property_of("byFrameRefID", ref, "color")
            if chosen is None:
                chosen, used = {"fixedColor": svg.SERIES[used % len(svg.SERIES)]}, used + 1
            result.append(course.Curve(name, points, svg.color(chosen["fixedColor"]), dashed=dashed,
                                       stacked=custom["stacking"]["mode"] == "normal", bars=custom["drawStyle"] == "bars"))
    return result


def page(title, note, drawn):
    """All panels where the grid has them; with rows' titles."""
    parts = [svg.words(GAP + 4, 26, title, size=17, weight=600), svg.words(GAP + 4, 44, note, size=11, fill="var(--soft)")]
    bottom, right, top = 0, 0, 56
    for where, width, height, content in drawn:
        x, y = where["x"] * CELL + GAP, where["y"] * ROW + top
        bottom, right = max(bottom, y + height), max(right, x + width)
        parts.append(f'<g transform="translate({x} {y})">\n{content}\n</g>')
    return svg.document(right + GAP, bottom + GAP, "\n".join(parts), title)


def packed(panels):
    """Only some panels: one after the other, from left to right."""
    x = y = deepest = 0
    for panel in panels:
        where = panel["gridPos"]
        if x + where["w"] > 24:
            x, y, deepest = 0, y + deepest, 0
        panel["gridPos"] = {**where, "x": x, "y": y}
        x, deepest = x + where["w"], max(deepest, where["h"])
    return panels


def png(path):
    chromium = shutil.which("chromium")
    if chromium is None:
        sys.exit("--png needs chromium")
    width, height = re.search(r'width="(\d+)" height="(\d+)"', path.read_text()).groups()
    with tempfile.TemporaryDirectory() as profile:
        subprocess.run([chromium, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={profile}",
                        f"--window-size={width},{height}", f"--screenshot={path.with_suffix('.png')}", path.resolve().as_uri()],
                       check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def main():
    given = arguments()
    board = json.loads(given.dashboard.read_text())
    end = given.end if given.end is not None else time.time()
    panels = board["panels"]
    if given.panel:
        by_title = {panel["title"]: panel for panel in panels}
        missing = [title for title in given.panel if title not in by_title]
        if missing:
            sys.exit(f"no panel {missing[0]!r} in {given.dashboard}; there are: {', '.join(by_title)}")
        panels = packed([by_title[title] for title in given.panel])
    try:
        drawing = Drawing(Prometheus(given.prometheus), board, dict(word.split("=", 1) for word in given.var), end, given.range,
                          given.scrape_interval)
        folder = given.output / given.dashboard.stem
        folder.mkdir(parents=True, exist_ok=True)
        drawn = []
        for panel in panels:
            where = panel["gridPos"]
            if panel["type"] == "row":
                drawn.append((where, 0, ROW, svg.words(4, 24, panel["title"], size=13, weight=600, fill="var(--soft)")))
                continue
            width, height, content, has_data = drawing.draw(panel)
            name = re.sub(r"\W+", "-", panel["title"].lower()).strip("-")
            (folder / f"{name}.svg").write_text(svg.document(width, height, content, panel["title"]))
            drawn.append((where, width, height, content))
            print(f"{given.dashboard.stem}: {panel['title']}: {'drawn' if has_data else 'no data'}")
    except Refused as refused:
        sys.exit(f"draw: {refused}")
    stretch = f"{time.strftime('%Y-%m-%d %H:%M:%S', time.gmtime(drawing.start))} to {time.strftime('%H:%M:%S', time.gmtime(end))} UTC"
    chosen = [f"{name} {value}" for name, value in drawing.variables.items() if value != ".+"]
    whole = given.output / f"{given.dashboard.stem}.svg"
    whole.write_text(page(board["title"], ", ".join([stretch, *chosen]), drawn))
    if given.png:
        png(whole)


if __name__ == "__main__":
    main()
