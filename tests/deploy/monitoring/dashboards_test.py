"""Dashboards as Grafana wants them: its published schema, what its linter asks of a dashboard, and what we ask."""

import json
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

from grafana_foundation_sdk.cog import plugins
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import dashboard as schema

from boards import GRAFANA, ROOT, dashboards, each_panel, each_query, panels
from expectations import EXPECTED, PROVOKED, QUIET, RECORDED
from rules_test import rules

KINDS = {"timeseries", "stat", "bargauge", "table"}
UNITS = {"none", "short", "s", "bytes", "Bps", "percentunit", "ops", "wps", "reqps", "sci"}
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
OF_TIME = {"__rate_interval", "__range"}
COUNTER = r"\bupipe_\w+_(?:total|bucket|count|sum)\b"


def texts(folder):
    return {path.name: path.read_text() for path in folder.iterdir()}


def outside_rates(expr):
    """The query without what stands below rate() or increase()."""
    while (found := re.search(r"\b(?:rate|increase)\(", expr)) is not None:
        depth, end = 1, found.end()
        while depth:
            depth += {"(": 1, ")": -1}.get(expr[end], 0)
            end += 1
        expr = expr[:found.start()] + expr[end:]
    return expr


class Dashboards(unittest.TestCase):
    def test_they_are_what_the_program_writes(self):
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run([sys.executable, "-B", GRAFANA / "generate.py", folder], check=True)
            self.assertEqual(texts(GRAFANA / "dashboards"), texts(pathlib.Path(folder)), "run deploy/grafana/generate.py")

    def test_frames(self):
        uids = set()
        for name, board in dashboards().items():
            with self.subTest(dashboard=name):
                self.assertEqual(board["schemaVersion"], 42)
                self.assertNotIn("__inputs", board)
                self.assertFalse(board["editable"])
                self.assertTrue(board["description"])
                self.assertEqual(board["uid"], f"upipe-{name}")
                uids.add(board["uid"])
                source, *others = board["templating"]["list"]
                self.assertEqual((source["type"], source["name"], source["query"]), ("datasource", "datasource", "prometheus"))
                for variable in others:
                    self.assertEqual((variable["type"], variable["refresh"], variable["datasource"]), ("query", 2, SOURCE))
                    self.assertTrue(not variable["multi"] or variable["allValue"] == ".+")
        self.assertEqual(len(uids), 5)

    def test_panels_explain_themselves(self):
        for name, panel in each_panel():
            with self.subTest(dashboard=name, panel=panel["title"]):
                self.assertIn(panel["type"], KINDS)
                self.assertTrue(panel["title"])
                self.assertTrue(panel["description"].endswith("."))
                self.assertIn(panel["fieldConfig"]["defaults"]["unit"], UNITS)
                self.assertEqual(panel["datasource"], SOURCE)
                self.assertTrue(panel["targets"])
                self.assertTrue(panel["fieldConfig"]["defaults"]["thresholds"]["steps"])
                for target in panel["targets"]:
                    self.assertEqual(target["datasource"], SOURCE)
                    if panel["type"] in ("timeseries", "bargauge"):
                        self.assertNotEqual(target["legendFormat"], "__auto")

    def test_titles_and_ids_are_used_once(self):
        for name, board in dashboards().items():
            titles = [panel["title"] for panel in panels(board)]
            self.assertEqual(sorted(titles), sorted(set(titles)), name)
            ids = [panel["id"] for panel in board["panels"]]
            self.assertEqual(sorted(ids), sorted(set(ids)), name)

    def test_panels_do_not_overlap(self):
        for name, board in dashboards().items():
            taken = set()
            for panel in board["panels"]:
                where = panel["gridPos"]
                cells = {(x, y) for x in range(where["x"], where["x"] + where["w"]) for y in range(where["y"], where["y"] + where["h"])}
                self.assertLessEqual(where["x"] + where["w"], 24)
                self.assertFalse(cells & taken, f"{name}: {panel['title']}")
                taken |= cells

    def test_queries(self):
        for name, panel, target in each_query():
            expr = target["expr"]
            with self.subTest(dashboard=name, panel=panel["title"], expr=expr):
                used = set(re.findall(r"\$\{?(\w+)", expr))
                self.assertLessEqual(used - OF_TIME, {v["name"] for v in dashboards()[name]["templating"]["list"]})
                self.assertNotIn("$__interval", expr)
                # Quantiles over an hour need that window, whatever the panel shows; nothing else has one of its own.
                fixed = set(re.findall(r"\[(\w+)\]", expr))
                self.assertLessEqual(fixed, {"1h"} if panel["description"].endswith("last hour.") or "hour" in panel["title"] else set())
                self.assertEqual(re.findall(COUNTER, outside_rates(expr)), [], "a counter outside of rate and increase")
                for counter in re.findall(r"(?:rate|increase)\((\w+)", expr):
                    self.assertRegex(counter, r"_(total|bucket|count|sum)$", "a rate of what is no counter")
                for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]):
                    self.assertIn(label, expr if "by" in expr or "group_left" in expr else expr + " worker")

    def test_every_variable_is_used(self):
        for name, board in dashboards().items():
            text = "".join(target["expr"] for panel in panels(board) for target in panel["targets"])
            for variable in board["templating"]["list"][1:]:
                self.assertIn("$" + variable["name"], text, name)

    def test_tags_have_the_colours_of_the_reports(self):
        palette = (ROOT / "common" / "chart" / "palette.h").read_text().split("@media")[0]
        of_report = dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", palette))
        text = (GRAFANA / "panels.py").read_text().split("STAGE_COLORS")[0]
        tags = dict(re.findall(r'"(\w+)": "(#[0-9a-f]{6})"', text))
        self.assertGreater(len(tags), 10)
        for tag in set(tags) & set(of_report):
            self.assertEqual(tags[tag], of_report[tag], tag)


def unknown(ours, theirs, path=""):
    """Paths of what is in `ours` and not, or not so, in `theirs`."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return [found for key, value in ours.items() for found in
                (unknown(value, theirs[key], f"{path}/{key}") if key in theirs else [f"{path}/{key}"])]
    if isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        return [found for pair in zip(ours, theirs) for found in unknown(*pair, f"{path}[]")]
    return [] if ours == theirs else [path]


def strange_to_grafana(board):
    """Paths of what Grafana's own types of a dashboard, its panels and queries drop or change: a misspelt field does nothing."""
    understood = json.loads(JSONEncoder().encode(schema.Dashboard.from_json(board)))
    # Grafana writes it beside the query, and its types leave it out.
    return sorted(set(unknown(board, understood)) - {"/templating/list[]/definition"})


class Schema(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        plugins.register_default_plugins()

    def test_grafana_knows_every_field(self):
        for name, board in dashboards().items():
            self.assertEqual(strange_to_grafana(board), [], name)

    def test_a_misspelt_field_is_found(self):
        board = dashboards()["memory"]
        places = {panel["type"]: place for place, panel in enumerate(board["panels"])}
        for kind in KINDS:
            panel = board["panels"][places[kind]]
            for path, fields in {"": board, "/panels[]/options": panel["options"], "/panels[]/targets[]": panel["targets"][0],
                                 "/panels[]/fieldConfig/defaults": panel["fieldConfig"]["defaults"]}.items():
                with self.subTest(kind=kind, path=path):
                    fields["misspelt"] = 1
                    self.assertEqual(strange_to_grafana(board), [f"{path}/misspelt"])
                    del fields["misspelt"]


class Expectations(unittest.TestCase):
    def test_every_query_has_one(self):
        for name, panel in each_panel():
            with self.subTest(dashboard=name, panel=panel["title"]):
                _, checks = EXPECTED[name][panel["title"]]
                self.assertEqual(len(checks), len(panel["targets"]))
        titles = {name: {panel["title"] for board, panel in each_panel() if board == name} for name in EXPECTED}
        self.assertEqual({name: set(panels) for name, panels in EXPECTED.items()}, titles)

    def test_every_rule_has_one(self):
        self.assertEqual(set(PROVOKED) | set(QUIET), set(rules("alert")))
        self.assertEqual(set(RECORDED), set(rules("record")))


if __name__ == "__main__":
    unittest.main()
