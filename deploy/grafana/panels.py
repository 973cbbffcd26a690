"""Kinds of panels and of variables, as Grafana's classic dashboards (schemaVersion 42) write them."""

import re

SOURCE = {"type": "prometheus", "uid": "${datasource}"}
GOOD, WARN, BAD, PLAIN = "#1a7f4e", "#d2901a", "#b3261e", "#2a6fbb"
ROWS = 24  # columns of Grafana's grid

# common/chart/palette.h, light: the same tag has the same colour in reports, figures and dashboards.
TAG_COLORS = {
    "weights": "#1f4e8c", "gradients": "#4a80c4", "optimizer": "#97bce6", "residual": "#3b9c83", "attn_q": "#7c2d06",
    "attn_kv": "#b4490f", "attn_exchange": "#d97024", "attn_out": "#ee9c55", "attn_grad": "#f8c795", "mlp": "#7a5bb0",
    "logits": "#a78fd1", "comm": "#9a9da1", "workspace": "#c4c6c8", "checkpoint": "#6fa3a8",
}
STAGE_COLORS = {
    "projection": "#4a80c4", "exchange": "#d97024", "attention": "#b4490f", "return": "#ee9c55", "mlp": "#7a5bb0",
    "loss": "#a78fd1", "embedding": "#97bce6", "weights": "#1f4e8c", "gradients": "#3b9c83", "optimizer": "#6fa3a8",
    "offload": "#9a9da1",
}


def series(expr, legend="", *, dashed=False, color=None):
    """One query of a panel. dashed: a line to compare with, never stacked."""
    return {"expr": " ".join(expr.split()), "legend": legend, "dashed": dashed, "color": color}


def steps(*levels):
    """Thresholds: (from, colour), the first from anything below."""
    (_, first), *rest = levels
    return [{"color": first, "value": None}] + [{"color": color, "value": value} for value, color in rest]


def one(title, description, unit, expr, *, thresholds=None, decimals=None, width=4, height=4):
    """One number, with its course behind it."""
    return panel("stat", title, description, unit, [series(expr)], width, height, thresholds, decimals=decimals, options={
        "colorMode": "value" if thresholds else "none", "graphMode": "area", "justifyMode": "auto", "orientation": "auto",
        "textMode": "auto", "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False}})


def lines(title, description, unit, queries, *, stacked=False, colors=None, thresholds=None, low=0, high=None, width=12,
          height=8, points=False, soft_low=None):
    """Courses over time. stacked: on one another, those that are dashed apart. soft_low: the axis begins there, or lower."""
    custom = {"drawStyle": "line", "lineWidth": 1 if stacked else 2, "fillOpacity": 70 if stacked else 0, "showPoints": "never",
              "spanNulls": False, "stacking": {"mode": "normal" if stacked else "none", "group": "A"},
              "thresholdsStyle": {"mode": "line" if thresholds else "off"}}
    if soft_low is not None:
        low, custom["axisSoftMin"] = None, soft_low
    if points:
        custom |= {"drawStyle": "bars", "fillOpacity": 80, "lineWidth": 0}
    found = panel("timeseries", title, description, unit, queries, width, height, thresholds, custom=custom, low=low, high=high, options={
        "legend": {"showLegend": True, "displayMode": "table", "placement": "bottom", "calcs": ["lastNotNull", "max"]},
        "tooltip": {"mode": "multi", "sort": "desc"}})
    overrides = found["fieldConfig"]["overrides"]
    for name, color in (colors or {}).items():
        overrides.append(override({"id": "byName", "options": name}, color=fixed(color)))
    for target, query in zip(found["targets"], queries):
        matcher = {"id": "byFrameRefID", "options": target["refId"]}
        if query["dashed"]:
            overrides.append(override(matcher, **{
                "custom.stacking": {"mode": "none", "group": "A"}, "custom.fillOpacity": 0, "custom.lineWidth": 2,
                "custom.lineStyle": {"fill": "dash", "dash": [8, 6]}}))
        if query["color"]:
            overrides.append(override(matcher, color=fixed(query["color"])))
    return found


def bars(title, description, unit, expr, legend, *, high=None, thresholds=None, width=8, height=8):
    """One bar for each series, as it is now."""
    found = panel("bargauge", title, description, unit, [series(expr, legend)], width, height, thresholds, low=0, high=high, options={
        "displayMode": "basic", "orientation": "horizontal", "showUnfilled": True, "valueMode": "color",
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False}})
    found["targets"][0] |= {"instant": True, "range": False}
    return found


def table(title, description, labels, columns, *, width=12, height=8):
    """A row for each set of the labels: {label: title}, then (title, unit, expr) for each column, joined by the labels."""
    queries = [series(expr) for _, _, expr in columns]
    found = panel("table", title, description, columns[0][1], queries, width, height, None,
                  options={"showHeader": True, "cellHeight": "sm"})
    renamed = dict(labels)
    for target, (name, unit, _) in zip(found["targets"], columns):
        target |= {"instant": True, "range": False, "format": "table"}
        value = "Value" if len(columns) == 1 else f"Value #{target['refId']}"
        renamed[value] = name
        found["fieldConfig"]["overrides"].append(override({"id": "byName", "options": name}, unit=unit))
    found["transformations"] = [
        {"id": "merge", "options": {}},
        {"id": "organize", "options": {"excludeByName": {"Time": True}, "renameByName": renamed,
                                       "indexByName": {name: place for place, name in enumerate(renamed)}}}]
    return found


def fixed(color):
    return {"mode": "fixed", "fixedColor": color}


def override(matcher, **properties):
    return {"matcher": matcher, "properties": [{"id": key, "value": value} for key, value in properties.items()]}


def panel(kind, title, description, unit, queries, width, height, thresholds, *, options, custom=None, low=None, high=None, decimals=None):
    defaults = {"unit": unit, "color": {"mode": "thresholds" if kind in ("stat", "bargauge") else "palette-classic"},
                "thresholds": {"mode": "absolute", "steps": thresholds or steps((None, PLAIN))}, "custom": custom or {}}
    defaults |= {key: value for key, value in (("min", low), ("max", high), ("decimals", decimals)) if value is not None}
    targets = [{"refId": chr(ord("A") + i), "datasource": SOURCE, "expr": query["expr"], "legendFormat": query["legend"] or "__auto",
                "instant": False, "range": True} for i, query in enumerate(queries)]
    return {"type": kind, "title": title, "description": description, "datasource": SOURCE, "targets": targets,
            "gridPos": {"w": width, "h": height}, "fieldConfig": {"defaults": defaults, "overrides": []}, "options": options}


def variable(name, label, query, *, many=True):
    """A choice among the values of a label; many: several, or all, which is where it begins."""
    expr, found = re.fullmatch(r"label_values\((.*), (\w+)\)", query).groups()
    chosen = {"includeAll": True, "allValue": ".+", "current": {"text": ["All"], "value": ["$__all"]}} if many else \
        {"includeAll": False, "current": {}}
    return {"type": "query", "name": name, "label": label, "datasource": SOURCE, "definition": f"label_values({expr}, {found})",
            "query": {"query": f"label_values({expr}, {found})", "refId": name}, "refresh": 2, "sort": 3, "multi": many, **chosen}


def dashboard(name, title, description, variables, rows):
    """rows: (title, panels); panels flow from left to right and wrap."""
    placed, y = [], 0
    for row, panels in rows:
        placed.append({"type": "row", "title": row, "collapsed": False, "panels": [], "gridPos": {"x": 0, "y": y, "w": ROWS, "h": 1}})
        y += 1
        x, deepest = 0, 0
        for found in panels:
            where = found["gridPos"]
            if x + where["w"] > ROWS:
                x, y, deepest = 0, y + deepest, 0
            found["gridPos"] = {"x": x, "y": y, **where}
            x += where["w"]
            deepest = max(deepest, where["h"])
            placed.append(found)
        y += deepest
    for number, found in enumerate(placed, 1):
        found["id"] = number
    source = {"type": "datasource", "name": "datasource", "label": "Data source", "query": "prometheus", "current": {}, "refresh": 1}
    links = [{"type": "dashboards", "title": "UPipe", "tags": ["upipe"], "asDropdown": True, "keepTime": True, "includeVars": True}]
    return {"uid": f"upipe-{name}", "title": f"UPipe / {title}", "description": description, "tags": ["upipe"], "schemaVersion": 42,
            "version": 1, "editable": False, "graphTooltip": 1, "refresh": "30s", "time": {"from": "now-1h", "to": "now"},
            "timezone": "browser", "links": links, "annotations": {"list": []},
            "templating": {"list": [source, *variables]}, "panels": placed}
