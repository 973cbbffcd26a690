#!/usr/bin/env python3
"""Writes the tables of docs/performance.md and README.md and the pictures of methods from benchmarks/results/*.json, so
that no number there is typed by hand.

A table stands between `<!-- table NAME -->` and `<!-- end -->`; one whose benchmark has not been run says so. With
--check nothing is written, and the exit code is 1 when the document does not say what the results say.
"""

import json
import os
import re
import sys

import method_pictures

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
DOCUMENTS = [os.path.join(ROOT, *path) for path in (("docs", "performance.md"), ("docs", "planning.md"), ("README.md",))]
PICTURES = os.path.join(ROOT, "docs", "pictures")
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


def mib1(count):
    return f"{count / 2**20:,.1f}"


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


def overlap(report):
    rows = []
    for row in report["rows"]:
        memory, links = row["seconds_over_memory"]["median"], row["seconds_over_links"]["median"]
        cells = [row["program"], str(row["stages"]), f"{memory:.2f}", f"{links:.2f}", mib(row["bytes_sent_per_rank"])]
        rows.append([*cells, mib(row["attention_peak_bytes"])])
    head = ["program", "stages", "step over memory, s", "over links, s", "sent per rank, MiB", "attention peak, MiB"]
    exposed, hidden = report["exposed_share_without_overlap"], report["hidden_share"]
    return table(head, rows) + (
        f"\nLinks of {report['link_mib_per_second']:.3g} MiB/s. Without overlap they take "
        f"{100 * exposed['median']:.0f} % of UPipe's step; overlap hides {100 * hidden['median']:.0f} % of that "
        f"({100 * hidden['min']:.0f} to {100 * hidden['max']:.0f}). UPipe with overlap takes "
        f"{report['overlap_of_ulysses_time']['median']:.2f} of Ulysses's time.\n"
    )


def like(row, method, rows):
    """The row of another method on as many ranks at the same context."""
    same = [r for r in rows if (r["method"], r["ranks"], r["context"]) == (method, row["ranks"], row["context"])]
    return same[0]


def methods(report):
    rows = []
    for row in report["rows"]:
        cpu, base = row["cpu_seconds"], like(row, "ulysses", report["rows"])
        device = row["device_memory"]
        rows.append(
            [
                row["method"],
                str(row["ranks"]),
                tokens(row["context"]),
                f"{row['tokens_per_second']:,.0f}",
                f"{cpu['median']:.2f} ({cpu['min']:.2f} to {cpu['max']:.2f})",
                f"{cpu['median'] / base['cpu_seconds']['median']:.3f}",
                f"{row['executed_tflop'] / base['executed_tflop']:.3f}",
                f"{mib1(device['peak_bytes'])}",
                f"{mib1(device['attention_peak_bytes'])}",
                f"{mib1(row['host_memory']['peak_bytes'])}",
                f"{mib1(row['bytes_sent'])}",
                f"{mib1(row['bytes_to_host'] + row['bytes_from_host'])}",
            ]
        )
    head = ["method", "ranks", "tokens", "tokens/s", "CPU s (least to most)", "of Ulysses's", "FLOPs, of Ulysses's"]
    memory = ["device peak, MiB", "attention, MiB", "host peak, MiB", "sent, MiB", "to and from host, MiB"]
    return table([*head, *memory], rows)


def methods_compared(report):
    rows = []
    for row in report["comparisons"]:
        interval = "one pair" if "interval_95" not in row else "{:.3f} to {:.3f}".format(*row["interval_95"])
        rows.append(
            [
                f"`{row['method']}` and `{row['other']}`",
                str(row["ranks"]),
                tokens(row["context"]),
                f"{row['cpu_seconds']['median']:.2f}",
                f"{row['other_cpu_seconds']['median']:.2f}",
                str(len(row["ratios"])),
                f"{row['ratio']:.3f}",
                interval,
            ]
        )
    head = ["methods", "ranks", "tokens", "CPU s", "CPU s of the other", "ABBA pairs", "ratio", "95 % interval"]
    return table(head, rows)


def methods_profile(report):
    """Processor seconds by op, at the fewest ranks and the shortest context; small ones are summed."""
    ranks, context = min(row["ranks"] for row in report["rows"]), min(row["context"] for row in report["rows"])
    columns = [row for row in report["rows"] if (row["ranks"], row["context"]) == (ranks, context)]
    by_op = [{op["op"]: op for op in row["ops"]} for row in columns]
    totals = [sum(op["cpu_seconds"] for op in ops.values()) for ops in by_op]
    names = sorted({n for ops in by_op for n in ops}, key=lambda n: -sum(o[n]["cpu_seconds"] for o in by_op if n in o))
    rows, rest = [], [0.0] * len(columns)
    for name in names:
        seconds = [ops[name]["cpu_seconds"] if name in ops else 0.0 for ops in by_op]
        if all(s < 0.005 * total for s, total in zip(seconds, totals)):
            rest = [r + s for r, s in zip(rest, seconds)]
            continue
        cells = []
        for ops, s in zip(by_op, seconds):
            work = ops.get(name, {}).get("tflop", 0)
            rated = name in ("matmul", "attention_fwd", "attention_bwd") and s > 0
            cells.append("" if s == 0 else f"{s:.3f} at {1000 * work / s:.0f} GFLOP/s" if rated else f"{s:.3f}")
        rows.append([name if " " in name else f"`{name}`", *cells])
    rows.append(["other ops", *(f"{r:.3f}" for r in rest)])
    rows.append(["all", *(f"{total:.3f}" for total in totals)])
    return table([f"CPU s, {ranks} ranks, {tokens(context)}", *(row["method"] for row in columns)], rows)


def methods_pictures(report):
    lines = [f"![{what}](pictures/{name})\n" for name, (_, what) in method_pictures.PICTURES.items()]
    return "\n".join(lines)


def methods_short(report):
    """For the README: the most ranks and the longest context."""
    rows = []
    for row in method_pictures.widest(report):
        rows.append(
            [
                row["method"],
                f"{row['tokens_per_second']:,.0f}",
                f"{row['cpu_seconds']['median']:.1f}",
                mib1(row["device_memory"]["peak_bytes"]),
                mib1(row["device_memory"]["attention_peak_bytes"]),
                mib1(row["host_memory"]["peak_bytes"]),
            ]
        )
    row = method_pictures.widest(report)[0]
    head = [f"{row['ranks']} ranks, {tokens(row['context'])} tokens", "tokens/s", "CPU s a step", "device peak, MiB"]
    text = table([*head, "attention, MiB", "host peak, MiB"], rows)
    for pair in report["comparisons"]:
        interval, pairs = pair.get("interval_95"), len(pair["ratios"])
        text += f"\nAt {tokens(pair['context'])} tokens UPipe takes {pair['ratio']:.3f} of the processor seconds of "
        text += f"`{pair['other']}`"
        text += f" ({interval[0]:.3f} to {interval[1]:.3f} at 95 %, {pairs} ABBA pairs)." if interval else "."
        text += "\n"
    return text


def milliseconds(seconds):
    return f"{1000 * seconds:,.1f}"


def coordinator(report):
    rows = []
    for row in report["rows"]:
        steady, silence, tick = row["steady"], row["silence"], row["steady"]["step_seconds"]["tick"]
        submit, alone = row["submit_seconds"], row["submit_alone_seconds"]
        rows.append(
            [
                f"{row['workers']:,}",
                f"{milliseconds(submit['p50'])}, {milliseconds(submit['p99'])}",
                f"{milliseconds(alone['p50'])}, {milliseconds(alone['p99'])}",
                f"{milliseconds(tick['mean'])} ({milliseconds(tick['p99_at_most'])})",
                milliseconds(silence["step_seconds"]["tick"]["mean"]),
                f"{steady['cpu_seconds_per_second']:.2f}",
                mib(steady["rss_bytes"]),
                milliseconds(steady["heartbeat_ack_seconds"]["p99"]),
                f"{row['restart_serving_seconds']:.1f}, {row['reconnect_seconds']:.1f}",
                f"{row['return_seconds']:.1f}",
            ]
        )
    head = ["workers", "submit, ms: p50, p99", "alone", "pass, ms: mean (p99 at most)", "pass, all silent"]
    return table(
        [*head, "CPU s/s", "RSS, MiB", "ack p99, ms", "restart, s: serving, all back", "network back, s"], rows
    )


def kill_soak(report):
    # Aimed kills by the process they hit: failpoints are named `process.place`.
    places = {
        "trainer.": "trainer, at a named point",
        "checkpoint.": "trainer, inside a checkpoint",
        "worker.": "worker, at a named point",
        "coordinator.": "coordinator, at a named point",
        "inside STARTING": "anybody, during the rendezvous",
        "inside STOPPING": "anybody, while the job stops",
        "inside RESTARTING": "anybody, while the job restarts",
        "trainer, stopped": "trainer stopped (SIGSTOP), at random",
        "trainer": "trainer, at random",
        "worker": "worker, at random",
        "coordinator": "coordinator, at random",
    }
    counts = dict.fromkeys(places, 0)
    for where, count in report["histogram"].items():
        counts[next(place for place in places if where.startswith(place))] += count
    rows = [[text, f"{counts[place]:,}"] for place, text in places.items() if counts[place]]
    text = table(["where the kill landed", "kills"], rows)
    text += f"\n{report['kills']:,} kills, {report['aimed']:,} of them aimed, in {report['seconds'] / 60:.0f} minutes on "
    text += f"{report['workers']} workers: {report['jobs_ended']:,} jobs ended in {report['generations']:,} generations, "
    return text + "each with the bits of an undisturbed run.\n"


def plans(report):
    rows = []
    for row in report["beyond"]:
        split = f"{row['method']}, {row['mesh']}" + (f", U {row['heads_per_stage']}" if row["heads_per_stage"] else "")
        cells = [f"{row['model']} on {row['ranks']}", f"{row['context'] // 2**20}M", split, row["policy"]]
        cells += [f"{row['device_bytes'] / 2**30:.1f}", f"{row['host_bytes'] / 2**30:,.0f}"]
        cells += [f"{row['step_seconds'] / 3600:.1f}", f"{row['tokens_per_second_per_rank']:.1f}"]
        rows.append([*cells, f"{row['planning_seconds']:.0f} ({row['planning_cpu_seconds']:.0f})"])
    head = ["model on devices", "context, tokens", "split", "policy", "device, GiB", "host per node, GiB"]
    search, named = report["search"], report["named"]
    return table([*head, "step, hours", "tokens/s per rank", "planned in, s (CPU s)"], rows) + (
        f"\nBytes are for attention kernel \"{report['beyond'][0]['attention_kernel']}\". Planning here: a search at 5M tokens "
        f"of llama3-8b on 8 took {search['planning_seconds']:.1f} s ({search['planning_cpu_seconds']:.1f} s of CPU, "
        f"{search['points_priced']:,} points priced), the same plan with everything named {named['planning_seconds']:.1f} s.\n"
    )


# Table: the results it is made of, and how.
TABLES = {
    "attention": ("kernels", attention),
    "step": ("step", step),
    "profile": ("step", profile),
    "peer": ("peer", peer),
    "plans": ("plans", plans),
    "overlap": ("overlap", overlap),
    "coordinator": ("coordinator", coordinator),
    "kill_soak": ("kill_soak", kill_soak),
    "methods": ("methods", methods),
    "methods_compared": ("methods", methods_compared),
    "methods_profile": ("methods", methods_profile),
    "methods_pictures": ("methods", methods_pictures),
    "methods_short": ("methods", methods_short),
}


def render(name, folder):
    source, build = TABLES[name]
    path = os.path.join(folder, source + ".json")
    if not os.path.exists(path):
        command = "soak faults" if source == "kill_soak" else f"bench {source}"
        return f"Not run: `./dev {command}`.\n"
    with open(path) as file:
        report = json.load(file)
    return build(report) + provenance(report)


def filled(text, folder):
    return TABLE.sub(lambda match: match[1] + render(match[2], folder) + match[4], text)


def read(path):
    if not os.path.exists(path):
        return None
    with open(path) as file:
        return file.read()


def wanted(folder):
    """What every file made from the results in `folder` should hold; None for one that should not be there."""
    files = {path: filled(read(path), folder) for path in DOCUMENTS}
    results = read(os.path.join(folder, "methods.json"))
    for name, (draw, _) in method_pictures.PICTURES.items():
        files[os.path.join(PICTURES, name)] = draw(json.loads(results)) if results else None
    return files


def main():
    stale = {path: text for path, text in wanted(RESULTS).items() if read(path) != text}
    if "--check" in sys.argv[1:]:
        if stale:
            sys.exit(f"{', '.join(stale)}: not what benchmarks/results says; run benchmarks/performance_tables.py")
        return
    for path, text in stale.items():
        if text is None:
            os.remove(path)
            continue
        with open(path, "w") as file:
            file.write(text)


if __name__ == "__main__":
    main()
