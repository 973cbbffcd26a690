#!/usr/bin/env python3
"""Writes the tables of docs/performance.md from benchmarks/results/*.json, so that no number there is typed by hand.

A table stands between `<!-- table NAME -->` and `<!-- end -->`; one whose benchmark has not been run says so. With
--check nothing is written, and the exit code is 1 when the document does not say what the results say.
"""

import json
import os
import re
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
DOCUMENT = os.path.join(ROOT, "docs", "performance.md")
RESULTS = os.path.join(ROOT, "benchmarks", "results")
TABLE = re.compile(r"(<!-- table (\w+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def table(head, rows):
    lines = ["| " + " | ".join(cells) + " |" for cells in [head, ["---"] * len(head), *rows]]
    return "\n".join(lines) + "\n"


def provenance(report):
    return f"\n`{report['command']}`, commit {report['commit']}, {report['machine']}, {report['date']}.\n"


def tokens(count):
    return f"{count // 1024}K" if count % 1024 == 0 else str(count)


def mib(count):
    return f"{count / 2**20:,.0f}"


def attention(report):
    rows = []
    for row in report["rows"]:
        if row["op"] not in ("attention_fwd", "attention_bwd"):
            continue
        ratios = f"{row['ratio_median']:.2f} ({row['ratio_min']:.2f} to {row['ratio_max']:.2f})"
        direction = "forward" if row["op"] == "attention_fwd" else "backward"
        cells = [row.get("dtype", "fp32"), direction, str(row.get("heads", 1)), str(row["head_dim"])]
        cells.append(tokens(row["tokens"]))
        rows.append([*cells, f"{row['gflops_median']:.0f}", ratios])
    return table(["dtype", "pass", "heads", "D", "tokens", "GFLOP/s", "of the matmul rate (least to most)"], rows)


def step(report):
    rows = []
    for row in report["rows"]:
        rows.append(
            [
                row["dtype"],
                str(row["threads"]),
                tokens(row["context"]),
                f"{row['step_seconds']['median']:.2f}",
                f"{row['tokens_per_second']:,.0f}",
                f"{row['matmul_gflops']['median']:.0f}",
                f"{row['hfu']['median']:.2f} ({row['hfu']['min']:.2f} to {row['hfu']['max']:.2f})",
                f"{row['causal_mfu']['median']:.2f}",
            ]
        )
    head = ["dtype", "threads", "tokens", "step, s", "tokens/s", "matmul, GFLOP/s", "HFU (least to most)", "causal MFU"]
    return table(head, rows)


def profile(report):
    """Shares of the step of every op that takes 1 % of any row's, one thread."""
    columns = [row for row in report["rows"] if row["threads"] == 1]
    shares = [{op["op"]: op for op in row["ops"] if op["stream"] == "compute"} for row in columns]
    names = sorted({n for ops in shares for n in ops}, key=lambda n: -sum(o[n]["share"] for o in shares if n in o))
    rows = []
    for name in names:
        found = [ops.get(name) for ops in shares]
        if all(op is None or op["share"] < 0.01 for op in found):
            continue
        cells = []
        for op in found:
            if op is None:
                cells.append("")
            elif op["op"] in ("matmul", "attention_fwd", "attention_bwd"):
                cells.append(f"{100 * op['share']:.1f} % at {op['of_matmul_rate']:.2f}")
            else:
                cells.append(f"{100 * op['share']:.1f} %, {op['gbytes_per_second']:.0f} GB/s")
        rows.append([f"`{name}`", *cells])
    rows.append(["outside ops", *(f"{100 * row['outside_ops_share']:.1f} %" for row in columns)])
    return table(["op", *(f"{row['dtype']}, {tokens(row['context'])}" for row in columns)], rows)


def peer(report):
    rows = []
    for row in report["rows"]:
        ours, other = row["ours"], row["peer"]
        ratio = row["tokens_per_second_ratio"]
        rows.append(
            [
                f"{row['ranks']} x {row['threads_per_rank']}",
                row["dtype"],
                tokens(row["context"]),
                f"{ours['step_seconds']['median']:.2f}",
                f"{other['step_seconds']['median']:.2f}",
                f"{ours['tokens_per_second']:,.0f}",
                f"{other['tokens_per_second']:,.0f}",
                f"{ratio['median']:.2f}",
                mib(ours["peak_bytes_total"]),
                f"{mib(other['peak_bytes_total'])} ({mib(other['start_bytes_total'])})",
                f"{row['loss']['greatest_relative_difference']:.0e}",
            ]
        )
    head = ["ranks x threads", "dtype", "tokens", "our step, s", "peer's, s", "our tokens/s", "peer's", "ratio"]
    return table([*head, "our peak, MiB", "peer's (before the model)", "losses differ by"], rows)


# Table: the results it is made of, and how.
TABLES = {
    "attention": ("kernels", attention),
    "step": ("step", step),
    "profile": ("step", profile),
    "peer": ("peer", peer),
}


def render(name, folder):
    source, build = TABLES[name]
    path = os.path.join(folder, source + ".json")
    if not os.path.exists(path):
        return f"Not run: `./dev bench {source}`.\n"
    with open(path) as file:
        report = json.load(file)
    return build(report) + provenance(report)


def filled(text, folder):
    return TABLE.sub(lambda match: match[1] + render(match[2], folder) + match[4], text)


def main():
    with open(DOCUMENT) as file:
        text = file.read()
    wanted = filled(text, RESULTS)
    if "--check" in sys.argv[1:]:
        if wanted != text:
            sys.exit(f"{DOCUMENT} does not say what benchmarks/results does: run benchmarks/performance_tables.py")
        return
    with open(DOCUMENT, "w") as file:
        file.write(wanted)


if __name__ == "__main__":
    main()
