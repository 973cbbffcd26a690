"""UPipe service beside PyTorch: the same model, tokens, weights, dtype, context and optimizer, one after the other in
one run, on the same cores.

Ours is the service itself: a coordinator, a worker and one trainer process per rank, over UCX. The peer is
peer_train.py: as many processes, over gloo. Each configuration alternates peer and ours; steps before the measured
ones are dropped on both sides. Exits with 1 when losses of the two do not agree. `./dev bench peer` starts this with
the Python of its virtual environment.
"""

import argparse
import datetime
import glob
import json
import os
import platform
import shutil
import subprocess
import sys
import threading
import time

import numpy
import torch

import initial_weights
from bench_job import HEADS_PER_STAGE, MODEL, OPTIMIZER, make_job, to_yaml
from comparison import AIM, compare

HERE = os.path.dirname(os.path.abspath(__file__))
SETUPS = [(1, 2), (2, 1), (4, 1)]  # ranks, threads of each
# Context: (dropped steps, measured steps, pairs of runs). Long steps average over a machine's drift by themselves, and
# what a first step does once (touching pages) is under a hundredth of theirs.
PLAN = {4096: (1, 3, 2), 8192: (1, 2, 2), 16384: (1, 1, 1), 32768: (0, 1, 1)}
QUICK_PLAN = {2048: (1, 2, 1)}


class TrainerMemory(threading.Thread):
    """Peak resident memory of a job's trainers, known by what their worker puts into their environment; read until
    stopped."""

    def __init__(self, job_name, ranks):
        super().__init__(daemon=True)
        self.job_name, self.ranks = job_name, ranks
        self.folders = {}  # rank -> /proc/PID
        self.peaks = {}  # rank -> bytes
        self.ended = threading.Event()

    def run(self):
        while not self.ended.wait(0.05):
            if len(self.folders) < self.ranks:
                for folder in glob.glob("/proc/[0-9]*"):
                    self.recognise(folder)
            for rank, folder in self.folders.items():
                self.look(rank, folder)

    def recognise(self, folder):
        try:
            with open(folder + "/environ", "rb") as file:
                entries = dict(e.split(b"=", 1) for e in file.read().split(b"\0") if b"=" in e)
            if entries.get(b"UPIPE_JOB", b"").startswith(self.job_name.encode() + b"-"):
                self.folders[int(entries[b"UPIPE_RANK"])] = folder
        except OSError:
            pass  # it ended, or is another user's

    def look(self, rank, folder):
        try:
            with open(folder + "/status") as file:
                for line in file:
                    if line.startswith("VmHWM:"):
                        self.peaks[rank] = 1024 * int(line.split()[1])
        except OSError:
            pass  # it ended; the last reading stays

    def stop(self):
        """Peak bytes by rank."""
        self.ended.set()
        self.join()
        if len(self.peaks) < self.ranks:
            raise SystemExit(f"saw {len(self.peaks)} of {self.ranks} trainers: no peak memory of the others")
        return [self.peaks[rank] for rank in range(self.ranks)]


class Ours:
    """A coordinator and one worker with a slot per rank; up while the context is open."""

    def __init__(self, bin_dir, work_dir, ranks):
        self.bin_dir, self.work_dir, self.ranks = bin_dir, work_dir, ranks
        self.state = os.path.join(work_dir, "state")
        self.environment = {**os.environ, "XDG_STATE_HOME": self.state}
        self.environment.pop("UPIPE_COORDINATOR", None)

    def call(self, *arguments):
        done = subprocess.run(
            [os.path.join(self.bin_dir, "upipe"), *arguments],
            env=self.environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        if done.returncode != 0:
            raise SystemExit(f"upipe {' '.join(arguments)} ended with {done.returncode}:\n{done.stdout}")
        return done.stdout

    def __enter__(self):
        self.call("local", "up", "--workers", "1", "--ranks-per-worker", str(self.ranks))
        return self

    def __exit__(self, *_):
        self.call("local", "down")

    def run(self, job):
        path = os.path.join(self.work_dir, "job.yaml")
        with open(path, "w") as file:
            file.write(to_yaml(job) + "\n")
        memory = TrainerMemory(job["name"], self.ranks)
        memory.start()
        self.call("submit", path, "--watch")
        peaks = memory.stop()
        described = json.loads(self.call("describe", job["name"], "-o", "json"))
        ranks = [self.reports(described["id"], rank) for rank in range(self.ranks)]
        return {
            "losses": [r["loss"] for r in ranks[0]],
            "seconds": [max(r["step_seconds"] for r in step) for step in zip(*ranks)],
            "peak_bytes": peaks,
            "planned_bytes": [int(r["memory"]["arena_bytes"]) for r in described["plan"]["ranks"]],
        }

    def reports(self, job_id, rank):
        found = glob.glob(f"{self.state}/**/ranks/{job_id}/g*/r{rank}/metrics.jsonl", recursive=True)
        if len(found) != 1:
            raise SystemExit(f"{len(found)} step records of rank {rank} of {job_id} below {self.state}")
        with open(found[0]) as file:
            return [json.loads(line) for line in file]


def await_ranks(processes):
    """Until all have ended; the first to fail ends the others, which would wait for it."""
    while None in (codes := [process.poll() for process in processes]):
        if any(codes):
            for process in processes:
                process.kill()
        time.sleep(0.05)
    if any(codes):
        raise SystemExit(f"the peer's ranks ended with {codes}")


def run_peer(job, work_dir, weights):
    """Starts a process per rank and waits for them."""
    ranks, threads = job["parallel"]["ranks"], job["parallel"]["threads_per_rank"]
    path, rendezvous = os.path.join(work_dir, "job.json"), os.path.join(work_dir, "rendezvous")
    with open(path, "w") as file:
        json.dump(job, file)
    if os.path.exists(rendezvous):
        os.remove(rendezvous)
    outputs = [os.path.join(work_dir, f"peer-{rank}.json") for rank in range(ranks)]
    processes = []
    for rank, output in enumerate(outputs):
        environment = {
            **os.environ,
            "RANK": str(rank),
            "OMP_NUM_THREADS": str(threads),
            "MKL_NUM_THREADS": str(threads),
            "GLOO_SOCKET_IFNAME": "lo",
        }
        command = [sys.executable, os.path.join(HERE, "peer_train.py"), path, "--weights", weights]
        command += ["--output", output, "--rendezvous", rendezvous]
        processes.append(subprocess.Popen(command, env=environment))
    await_ranks(processes)
    results = []
    for output in outputs:
        with open(output) as file:
            results.append(json.load(file))
    return {
        "losses": [s["loss"] for s in results[0]["steps"]],
        "seconds": [max(s["step_seconds"] for s in step) for step in zip(*(r["steps"] for r in results))],
        "peak_bytes": [r["peak_bytes"] for r in results],
        "start_bytes": [r["start_bytes"] for r in results],
    }


def say(row):
    ours, peer = row["ours"], row["peer"]
    print(
        f"{row['ranks']} ranks x {row['threads_per_rank']} threads, {row['context']:6d} tokens, {row['dtype']}: "
        f"ours {ours['step_seconds']['median']:.3f} s, {ours['tokens_per_second']:.0f} tokens/s, "
        f"{ours['peak_bytes_total'] / 2**20:.0f} MiB; "
        f"peer {peer['step_seconds']['median']:.3f} s, {peer['tokens_per_second']:.0f} tokens/s, "
        f"{peer['peak_bytes_total'] / 2**20:.0f} MiB; "
        f"{row['tokens_per_second_ratio']['median']:.2f} x tokens/s, {row['peak_bytes_ratio']:.2f} x memory "
        f"({row['peak_bytes_ratio_without_start']:.2f} without what the peer has before the model), "
        f"losses within {row['loss']['greatest_relative_difference']:.1e}"
        + ("" if row["loss"]["agree"] else f", held to {row['loss']['bound']:.1e}: DISAGREE"),
        flush=True,
    )


def measure(flags, weights):
    plan = QUICK_PLAN if flags.quick else PLAN
    rows, number = [], 0  # of the job: names are unique
    for ranks, threads in flags.setups:
        with Ours(flags.bin_dir, flags.work_dir, ranks) as service:
            for context in flags.contexts or plan:
                dropped, measured, pairs = plan.get(context, (1, 1, 1))
                for dtype in flags.dtypes:
                    ours, peers = [], []
                    for _ in range(pairs):
                        number += 1
                        steps = dropped + measured
                        job = make_job(flags.data, number, ranks, threads, context, steps, dtype)
                        peers.append(run_peer(job, flags.work_dir, weights))
                        ours.append(service.run(job))
                    row = {"ranks": ranks, "threads_per_rank": threads, "context": context, "dtype": dtype}
                    row |= compare(ours, peers, dropped, context, dtype)
                    say(row)
                    rows.append(row)
    return rows


def cpu_model():
    with open("/proc/cpuinfo") as file:
        return next((line.split(": ", 1)[1].strip() for line in file if line.startswith("model name")), "unknown")


def parse(arguments):
    def setup(text):
        ranks, threads = text.split("x")
        return int(ranks), int(threads)

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one short context: about a minute")
    parser.add_argument("--output", help="JSON file; standard output when absent")
    parser.add_argument("--commit", default="unknown", help="commit recorded in the JSON")
    parser.add_argument("--bin-dir", required=True, help="folder of the built programs")
    parser.add_argument("--work-dir", required=True, help="folder for jobs and state; may exist")
    parser.add_argument("--data", required=True, help="packed folder (upipe-data pack)")
    parser.add_argument("--setups", type=setup, nargs="+", default=SETUPS, help="RANKSxTHREADS, e.g. 1x2 4x1")
    parser.add_argument("--contexts", type=int, nargs="+", help="tokens of a sequence")
    parser.add_argument("--dtypes", nargs="+", default=["fp32", "bf16"], choices=["fp32", "bf16"])
    return parser.parse_args(arguments)


def main():
    flags = parse(sys.argv[1:])
    started = time.monotonic()
    os.makedirs(flags.work_dir, exist_ok=True)
    shutil.rmtree(os.path.join(flags.work_dir, "state"), ignore_errors=True)  # of a service that is down
    flags.work_dir, flags.data = os.path.abspath(flags.work_dir), os.path.abspath(flags.data)
    weights = os.path.join(flags.work_dir, "weights.bin")
    initial_weights.write(MODEL, 1, weights)
    report = {
        "machine": cpu_model(),
        "processors": len(os.sched_getaffinity(0)),
        "commit": flags.commit,
        "command": " ".join(sys.argv),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "python": platform.python_version(),
        "model": MODEL,
        "optimizer": OPTIMIZER,
        "heads_per_stage": HEADS_PER_STAGE,
    }
    report["rows"] = measure(flags, weights)
    report["seconds"] = round(time.monotonic() - started)
    text = json.dumps(report, indent=1) + "\n"
    if flags.output:
        with open(flags.output, "w") as file:
            file.write(text)
    else:
        print(text, end="")
    short = [r for r in report["rows"] if r["tokens_per_second_ratio"]["median"] < AIM or r["peak_bytes_ratio"] >= 1]
    print(f"{len(report['rows']) - len(short)} of {len(report['rows'])} rows reach {AIM} x tokens/s at lower memory")
    sys.exit(0 if all(r["loss"]["agree"] for r in report["rows"]) else 1)


if __name__ == "__main__":
    main()
