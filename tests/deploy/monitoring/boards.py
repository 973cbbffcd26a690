"""The dashboards as files, their panels and queries; and what tests of them need."""

import json
import pathlib
import shutil
import sys

ROOT = pathlib.Path(__file__).resolve().parents[3]
GRAFANA = ROOT / "deploy" / "grafana"


def needs_prometheus():
    """Ends the test as skipped where `./dev test` has not installed it."""
    if shutil.which("prometheus") is None or shutil.which("promtool") is None:
        print("skipped: no prometheus and promtool here; ./dev test installs Debian's package `prometheus`")
        sys.exit(77)


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
