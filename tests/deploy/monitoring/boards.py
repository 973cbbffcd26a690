"""The dashboards as files: their panels and queries."""

import json
import pathlib

ROOT = pathlib.Path(__file__).resolve().parents[3]
GRAFANA = ROOT / "deploy" / "grafana"


def dashboards():
    """Name -> dashboard."""
    return {path.stem: json.loads(path.read_text()) for path in sorted((GRAFANA / "dashboards").glob("*.json"))}


def panels(board):
    return [panel for panel in board["panels"] if panel["type"] != "row"]


def each_panel():
    """(dashboard's name, panel)."""
    for name, board in dashboards().items():
        for panel in panels(board):
            yield name, panel


def each_query():
    """(dashboard's name, panel, target)."""
    for name, panel in each_panel():
        for target in panel["targets"]:
            yield name, panel, target
