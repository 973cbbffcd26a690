"""tools/panels against a Prometheus that answers what it is told: lengths and places of what is drawn, units, and no data."""

import http.server
import json
import pathlib
import re
import subprocess
import sys
import tempfile
import threading
import unittest
import urllib.parse
import xml.etree.ElementTree

from boards import ROOT, dashboards

TOOL = ROOT / "tools" / "panels"
sys.path.insert(0, str(TOOL))

import svg
import units

END = 1_700_000_000
SVG = "{http://www.w3.org/2000/svg}"


class Answers(http.server.BaseHTTPRequestHandler):
    """By the beginning of the query: [(labels, value)], each the same at all times."""
    known = {}
    asked = []

    def do_GET(self):
        url = urllib.parse.urlparse(self.path)
        given = {key: value[0] for key, value in urllib.parse.parse_qs(url.query).items()}
        if url.path.endswith("/values"):
            data = ["seen-1"]
        else:
            self.asked.append(given["query"])
            entries = next((entries for start, entries in self.known.items() if given["query"].startswith(start)), [])
            if url.path.endswith("query_range"):
                times = range(int(float(given["start"])), END + 1, int(float(given["step"])))
                data = {"resultType": "matrix", "result": [{"metric": labels, "values": [[time, str(value)] for time in times]}
                                                           for labels, value in entries]}
            else:
                data = {"resultType": "vector", "result": [{"metric": labels, "value": [END, str(value)]} for labels, value in entries]}
        body = json.dumps({"status": "success", "data": data}).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


class Drawn(unittest.TestCase):
    def setUp(self):
        Answers.known, Answers.asked = {}, []
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers)
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()
        self.addCleanup(self.server.server_close)
        self.addCleanup(self.server.shutdown)
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.out = pathlib.Path(folder.name)

    def draw(self, dashboard, panel, *options):
        """(the panel as an element, what the tool says)."""
        done = subprocess.run([TOOL / "draw.py", "--prometheus", f"http://127.0.0.1:{self.server.server_port}", "--dashboard",
                               ROOT / "deploy" / "grafana" / "dashboards" / f"{dashboard}.json", "-o", self.out, "--end", str(END),
                               "--range", "10m", "--panel", panel, *options], capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stderr)
        name = re.sub(r"\W+", "-", panel.lower()).strip("-")
        xml.etree.ElementTree.parse(self.out / f"{dashboard}.svg")
        return xml.etree.ElementTree.parse(self.out / dashboard / f"{name}.svg").getroot(), done.stdout

    def test_bars_are_as_long_as_their_share(self):
        Answers.known = {"upipe_memory_peak_bytes": [({"job": "j", "rank": "0"}, 0.5), ({"job": "j", "rank": "1"}, 0.99)]}
        picture, _ = self.draw("memory", "Peak against limit")
        boxes = [box for box in picture.iter(SVG + "rect") if box.get("rx") == "2"]
        tracks, bars = boxes[::2], boxes[1::2]
        for track, bar, share, color in zip(tracks, bars, (0.5, 0.99), ("var(--good)", "var(--bad)")):
            self.assertAlmostEqual(float(bar.get("width")) / float(track.get("width")), share, places=3)
            self.assertEqual(bar.get("fill"), color)
        self.assertIn("99 %", " ".join(picture.itertext()))

    def test_a_stack_ends_at_its_sum(self):
        Answers.known = {"sum by (tag)": [({"tag": "weights"}, 3 * 2**30), ({"tag": "optimizer"}, 5 * 2**30)],
                         "sum(upipe_memory_limit_bytes": [({}, 8 * 2**30)]}
        picture, _ = self.draw("memory", "Device memory by tag")
        areas = {area.get("fill"): area.get("points").split() for area in picture.iter(SVG + "polygon")}
        self.assertEqual(set(areas), {"var(--weights)", "var(--optimizer)"})
        limit, = [line for line in picture.iter(SVG + "polyline") if line.get("stroke") == "var(--bad)"]
        self.assertIsNotNone(limit.get("stroke-dasharray"))
        top = min(float(point.split(",")[1]) for points in areas.values() for point in points)
        self.assertAlmostEqual(top, float(limit.get("points").split()[0].split(",")[1]), delta=0.11)

    def test_one_number_has_its_colour_and_unit(self):
        Answers.known = {"max(upipe_memory_peak_bytes": [({}, 0.953)]}
        picture, said = self.draw("memory", "Closest to its limit")
        number, = [text for text in picture.iter(SVG + "text") if text.text == "95.3 %"]
        self.assertIn("--extra", number.get("fill"))  # not green any more, not red yet
        self.assertIn("Closest to its limit: drawn", said)

    def test_a_table_joins_by_labels(self):
        Answers.known = {"max by (tag) (upipe_memory_planned": [({"tag": "mlp"}, 4096), ({"tag": "comm"}, 1024)],
                         "max by (tag) (upipe_memory_tag": [({"tag": "comm"}, 512), ({"tag": "mlp"}, 2048)]}
        picture, _ = self.draw("memory", "Tags, planned and measured")
        words = [text.text for text in picture.iter(SVG + "text") if text.text]
        self.assertEqual(words[1:], ["Tag", "comm", "mlp", "Planned", "1 KiB", "4 KiB", "Measured", "512 B", "2 KiB", "Difference"])

    def test_nothing_is_said_to_be_nothing(self):
        picture, said = self.draw("throughput", "Bus bandwidth")
        self.assertIn("no data", list(picture.itertext()))
        self.assertIn("Bus bandwidth: no data", said)

    def test_variables_are_filled_in(self):
        self.draw("job", "Ranks")
        self.draw("memory", "Host peak", "--var", "job=mine")
        self.assertEqual([query for query in Answers.asked if "$" in query], [])
        self.assertIn('job=~"seen-1"', Answers.asked[0])
        self.assertIn('job=~"mine", node=~".+"', Answers.asked[1])

    def test_words_do_not_leave_their_panel(self):
        long = "a-job-with-a-name-of-many-words-" * 4
        Answers.known = {"sum by (job)": [({"job": f"{long}{number}"}, number) for number in range(30)]}
        for dashboard in dashboards():
            by_job = [panel for panel in dashboards()[dashboard]["panels"]
                      if panel["type"] == "timeseries" and panel["targets"][0]["legendFormat"] == "{{job}}"]
            for panel in by_job[:1]:
                picture, _ = self.draw(dashboard, panel["title"])
                width = float(picture.get("width"))
                for text in picture.iter(SVG + "text"):
                    size = svg.width_of(text.text, float(text.get("font-size")))
                    begins = float(text.get("x")) - {"start": 0, "middle": size / 2, "end": size}[text.get("text-anchor")]
                    self.assertGreaterEqual(begins, -1, text.text)
                    self.assertLessEqual(begins + size, width + 1, text.text)


class Units(unittest.TestCase):
    def test_values(self):
        for value, unit, text in ((1536, "bytes", "1.5 KiB"), (72 * 2**30, "bytes", "72 GiB"), (0.4567, "percentunit", "45.7 %"),
                                  (0.0021, "s", "2.1 ms"),
                                  (95, "s", "95 s"), (4500, "s", "1.25 h"), (1.83e11, "Bps", "183 GB/s"), (17499, "short", "17.5 k"),
                                  (3e-4, "sci", "0.0003"), (41, "none", "41"), (2.2238, "none", "2.224"), (float("nan"), "s", "no value"),
                                  (0, "bytes", "0 B")):
            self.assertEqual(units.shown(value, unit), text)

    def test_ticks_are_round(self):
        self.assertEqual(units.ticks(0, 2.5 * 2**30, "bytes"), [0, 2**30, 2 * 2**30])
        self.assertEqual(units.ticks(0, 0.9, "percentunit"), [0, 0.5])
        self.assertEqual(units.ticks(0, 400, "s"), [0, 120, 240, 360])
        self.assertEqual(units.ticks(0, 5, "none"), [0, 2, 4])


if __name__ == "__main__":
    unittest.main()
