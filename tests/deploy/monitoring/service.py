"""The real daemons and a real Prometheus on the configuration that is shipped, in a network of their own."""

import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request

from boards import ROOT

BIN = pathlib.Path(os.environ["UPIPE_BIN_DIR"])
sys.path.insert(0, str(ROOT / "tests" / "deploy" / "homes"))
sys.path.insert(0, str(ROOT / "tools" / "panels"))

from cluster import own_network  # noqa: F401, for tests
from prometheus import Prometheus

COORDINATOR, PROMETHEUS = "127.0.0.1:7077", "http://127.0.0.1:9090"
# Fast timing: a worker is lost 8 s after its last word.
TIMING = ["--heartbeat=0.2", "--kill-bound=2", "--autonomy=5", "--margin=1", "--backoff=0.2", "--settle=0.5", "--stall-floor=3"]
PEAK_FLOPS, MEMORY_PER_RANK = 1.0e11, "64MiB"
WORKERS = {"w0": (2, 9465), "w1": (1, 9475)}  # slots, port of /metrics


class Service:
    def __init__(self):
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="upipe-seen-"))
        self.processes = {}

    def start(self):
        for name in ("corpus", "checkpoints"):
            (self.folder / name).mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "small", self.folder / "checkpoints"], check=True)
        self.run(BIN / "upipe-data", "pack", ROOT / "docs", ROOT / "proto", "--output", self.folder / "corpus" / "packed")
        self.start_coordinator()
        for name, (slots, port) in WORKERS.items():
            self.spawn(name, BIN / "upipe-worker", f"--coordinator={COORDINATOR}", f"--name={name}", f"--node=node-{name}",
                       f"--slots={slots}", f"--memory-per-rank={MEMORY_PER_RANK}", f"--metrics-listen=127.0.0.1:{port}",
                       "--no-cpu-placement",
                       f"--state-dir={self.folder / name}")
        self.start_prometheus()

    def start_coordinator(self):
        """Its plans are for a CPU whose peak is told, so that there is an MFU of jobs in bf16."""
        devices = self.folder / "devices"
        devices.mkdir()
        known = (ROOT / "deploy" / "devices" / "cpu-epyc-2core.yaml").read_text()
        (devices / "cpu.yaml").write_text(f"{known}\npeak_flops: {{value: {PEAK_FLOPS}, source: a test}}\n")
        planner = self.folder / "plan"
        planner.write_text(f'#!/bin/sh\nexec "{BIN}/upipe-plan" --device-files "{devices}" "$@"\n')
        planner.chmod(0o755)
        self.spawn("coordinator", BIN / "upipe-coordinator", f"--listen={COORDINATOR}", "--metrics-listen=127.0.0.1:9464",
                   f"--state-dir={self.folder / 'state'}", f"--plan-binary={planner}", *TIMING)

    def start_prometheus(self):
        """deploy/prometheus as it is, but for the pace and for further workers."""
        where = self.folder / "prometheus"
        shutil.copytree(ROOT / "deploy" / "prometheus", where)
        config = where / "prometheus.yml"
        config.write_text(re.sub(r"(scrape|evaluation)_interval: 15s", r"\1_interval: 1s", config.read_text()))
        targets = where / "targets" / "workers.yaml"
        _, *further = [port for _, port in WORKERS.values()]
        targets.write_text(targets.read_text() + "".join(f"- targets: [127.0.0.1:{port}]\n" for port in further))
        self.spawn("prometheus", "prometheus", f"--config.file={config}", f"--storage.tsdb.path={self.folder / 'tsdb'}",
                   "--web.listen-address=127.0.0.1:9090", "--log.level=warn")
        self.prometheus = Prometheus(PROMETHEUS)
        self.until("Prometheus is ready", self.is_ready)

    @staticmethod
    def is_ready():
        try:
            with urllib.request.urlopen(PROMETHEUS + "/-/ready", timeout=5) as answer:
                return answer.status == 200
        except (urllib.error.URLError, ConnectionError):
            return False

    def spawn(self, name, *command):
        with open(self.folder / f"{name}.log", "ab") as log:
            self.processes[name] = subprocess.Popen(["setpriv", "--pdeathsig", "KILL", *map(str, command)], stdout=log,
                                                    stderr=subprocess.STDOUT)

    def signal(self, name, number):
        os.kill(self.processes[name].pid, number)

    def close(self):
        for process in self.processes.values():
            process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait()
        for rank in self.trainers():
            os.kill(rank, signal.SIGKILL)
        subprocess.run(["umount", "--lazy", self.folder / "checkpoints"])
        shutil.rmtree(self.folder, ignore_errors=True)

    def run(self, *command, outcome=0):
        done = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=60)
        if done.returncode != outcome:
            raise AssertionError(f"{command}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
        return done.stdout

    def upipe(self, *words, outcome=0):
        return self.run(BIN / "upipe", "--coordinator", COORDINATOR, *words, outcome=outcome)

    def json(self, *words):
        return json.loads(self.upipe(*words, "-o", "json"))

    def submit(self, name, *settings, flags=()):
        words = [word for setting in (f"name={name}", f"data.path={self.folder / 'corpus' / 'packed'}", *settings)
                 for word in ("--set", setting)]
        return self.json("submit", ROOT / "deploy" / "samples" / "tiny.yaml", *words, *flags)["id"]

    def steps(self, job):
        """The lines of the coordinator's metrics.jsonl: every step of rank 0."""
        text = (self.folder / "state" / "jobs" / job / "metrics.jsonl").read_text()
        return [json.loads(line) for line in text.splitlines() if line.endswith("}")]

    @staticmethod
    def trainers():
        """Processes of ranks in this network."""
        found = []
        for folder in pathlib.Path("/proc").glob("[0-9]*"):
            try:
                if os.readlink(folder / "ns" / "net") == os.readlink("/proc/self/ns/net") and \
                        (folder / "comm").read_text().startswith("upipe-trainer"):
                    found.append(int(folder.name))
            except OSError:
                continue
        return sorted(found)

    def until(self, what, look, seconds=60):
        """Looks until there is something; what it is."""
        end = time.monotonic() + seconds
        while not (found := look()):
            for name, process in self.processes.items():
                if process.poll() is not None and process.returncode != -signal.SIGKILL:
                    raise AssertionError(f"{name} ended while waiting until {what}:\n" + (self.folder / f"{name}.log").read_text()[-2000:])
            if time.monotonic() > end:
                raise AssertionError(f"not within {seconds} s: {what}")
            time.sleep(0.1)
        return found

    def await_query(self, expr, seconds=60):
        """Until Prometheus answers with something."""
        return self.until(expr, lambda: self.prometheus.now(expr, time.time()), seconds)
