#!/usr/bin/env python3
"""The tables and pictures of methods say what the report says, and stale ones are found."""

import json
import os
import re
import shutil
import tempfile
import unittest
import xml.dom.minidom

import method_pictures
import performance_tables

MIB = 2**20


def memory(**tags):
    peak = sum(tags.values())
    return {"peak_bytes": peak, "attention_peak_bytes": peak // 2, "arena_bytes": peak, "at_peak_bytes": tags}


def row(method, ranks, context, cpu, host=0):
    return {
        "method": method,
        "ranks": ranks,
        "context": context,
        "step_seconds": {"median": cpu / 2},
        "tokens_per_second": 2 * context / cpu,
        "cpu_seconds": {"median": cpu, "min": cpu - 1, "max": cpu + 1},
        "executed_tflop": 0.5,
        "bytes_sent": 3 * MIB,
        "bytes_to_host": MIB,
        "bytes_from_host": MIB,
        "device_memory": memory(weights=4 * MIB, attn_q=2 * MIB),
        "host_memory": memory(residual=host) if host else memory(),
        "ops": [
            {"op": "attention_fwd", "calls": 4, "cpu_seconds": 2.0, "tflop": 0.25, "gbytes": 1},
            {"op": "fill", "calls": 1, "cpu_seconds": 0.001, "tflop": 0, "gbytes": 1},
            {"op": "outside streams", "cpu_seconds": 1.5},
        ],
    }


def report(pairs=2):
    rows = [row(m, r, 8192, cpu) for r in (4, 8) for m, cpu in (("upipe", 11), ("ulysses", 10))]
    rows.append(row("fpdt n=4", 8, 8192, 12, host=7 * MIB))
    comparison = {"method": "upipe", "other": "ulysses", "ranks": 4, "context": 32768, "ratio": 1.01}
    comparison |= {"cpu_seconds": {"median": 50}, "other_cpu_seconds": {"median": 49}, "ratios": [1.0, 1.02][:pairs]}
    if pairs > 1:
        comparison["interval_95"] = [0.99, 1.035]
    head = {"command": "bench", "commit": "abc", "machine": "M", "date": "today"}
    return head | {"rows": rows, "comparisons": [comparison]}


class Tables(unittest.TestCase):
    def test_side_by_side(self):
        lines = performance_tables.methods(report()).splitlines()
        self.assertEqual(len(lines), 2 + 5)
        self.assertIn("| upipe | 4 | 8K | 1,489 | 11.00 (10.00 to 12.00) | 1.100 | 1.000 | 6.0 | 3.0 | 0.0 |", lines[2])
        self.assertIn("| 7.0 | 3.0 | 2.0 |", lines[6])

    def test_comparison(self):
        self.assertIn("| 2 | 1.010 | 0.990 to 1.035 |", performance_tables.methods_compared(report()))
        self.assertIn("| 1 | 1.010 | one pair |", performance_tables.methods_compared(report(pairs=1)))

    def test_profile_sums_what_is_small(self):
        text = performance_tables.methods_profile(report())
        self.assertIn("| `attention_fwd` | 2.000 at 125 GFLOP/s | 2.000 at 125 GFLOP/s |", text)
        self.assertIn("| other ops | 0.001 | 0.001 |", text)
        self.assertIn("| all | 3.501 | 3.501 |", text)
        self.assertNotIn("`fill`", text)

    def test_short_form(self):
        text = performance_tables.methods_short(report())
        self.assertIn("| 8 ranks, 8K tokens |", text)
        self.assertIn("1.010 of the processor seconds of `ulysses` (0.990 to 1.035 at 95 %, 2 ABBA pairs).", text)


class Pictures(unittest.TestCase):
    def test_are_well_formed_and_tell_their_numbers(self):
        for pairs in (1, 2):
            for draw, _ in method_pictures.PICTURES.values():
                xml.dom.minidom.parseString(draw(report(pairs)))
        memory_picture = method_pictures.memory(report())
        self.assertIn("fpdt n=4, host memory, residual: 7.0 MiB", memory_picture)
        self.assertIn("upipe, attn_q: 2.0 MiB", memory_picture)
        self.assertIn("1.0100, 0.9900 to 1.0350 at 95 %", method_pictures.ratio(report()))

    def test_bars_are_as_long_as_their_bytes_end_to_end(self):
        drawn = xml.dom.minidom.parseString(method_pictures.memory(report()))
        widths, starts = {}, {}
        for shape in drawn.getElementsByTagName("rect"):
            title = shape.getElementsByTagName("title")
            if title:
                widths[title[0].firstChild.data] = float(shape.getAttribute("width"))
                starts[title[0].firstChild.data] = float(shape.getAttribute("x"))
        first, second = "upipe, weights: 4.0 MiB", "upipe, attn_q: 2.0 MiB"
        self.assertAlmostEqual(widths[first], 2 * widths[second], delta=0.2)
        self.assertAlmostEqual(starts[first] + widths[first], starts[second], delta=0.2)

    def test_every_category_has_a_colour(self):
        tags = os.path.join(performance_tables.ROOT, "kernels", "api", "memory_tag.h")
        with open(tags) as file:
            names = re.search(r"kMemoryTagNames = \{(.*?)\}", file.read(), re.DOTALL)[1].replace('"', "").split(",")
        for name in [*map(str.strip, names), "upipe", "upipe-plan", "bad"]:
            self.assertIn(f"--{name}:", method_pictures.style())


class StaleFiles(unittest.TestCase):
    def test_documents_and_pictures_follow_the_results(self):
        with tempfile.TemporaryDirectory() as folder:
            for result in os.listdir(performance_tables.RESULTS):
                shutil.copy(os.path.join(performance_tables.RESULTS, result), folder)
            methods = os.path.join(folder, "methods.json")
            if os.path.exists(methods):
                os.remove(methods)
            before = performance_tables.wanted(folder)
            with open(methods, "w") as file:
                json.dump(report(), file)
            after = performance_tables.wanted(folder)
        changed = {os.path.relpath(path, performance_tables.ROOT) for path in before if before[path] != after[path]}
        pictures = {os.path.join("docs", "pictures", name) for name in method_pictures.PICTURES}
        self.assertLessEqual({os.path.join("docs", "performance.md"), *pictures}, changed)
        for picture in pictures:
            self.assertIsNone(before[os.path.join(performance_tables.ROOT, picture)])


if __name__ == "__main__":
    unittest.main()
