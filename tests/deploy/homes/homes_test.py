"""Nodes without Kubernetes: the systemd units run as they are written, and the Slurm sample inside a stand-in allocation."""

import os
import pathlib
import re
import shutil
import signal
import subprocess
import time
import unittest

import cluster
from chart import ROOT
from cluster import BIN, Cluster, serves

SYSTEMD = ROOT / "deploy" / "systemd"
SLURM = ROOT / "deploy" / "slurm" / "upipe.sbatch"
STAND_INS = pathlib.Path(__file__).resolve().parent / "stand_ins"


def unit_settings(name):
    """(key, value) lines of a unit file."""
    lines = (SYSTEMD / f"{name}.service").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if re.match(r"[A-Za-z]+=", line))


def environment_of(name):
    lines = (SYSTEMD / f"{name.removeprefix('upipe-')}.env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def as_pod(name):
    """A unit in the words of a pod: systemd's user, folders, environment and patience."""
    settings, environment = unit_settings(name), environment_of(name)
    words = []
    for word in settings["ExecStart"].split():
        if re.fullmatch(r"\$\w+", word):  # split at spaces, as systemd does without braces
            words += environment[word[1:]].split()
        else:
            words.append(re.sub(r"\$\{(\w+)\}", lambda match: environment[match.group(1)], word))
    folder = "/var/lib/" + settings["StateDirectory"]
    container = {"name": name, "command": words[:1], "args": words[1:], "env": [],
                 "volumeMounts": [{"name": "state", "mountPath": folder}, {"name": "tmp", "mountPath": "/tmp"}]}
    return {"spec": {}}, {"securityContext": {"runAsUser": 990}, "containers": [container],
                          "terminationGracePeriodSeconds": int(settings["TimeoutStopSec"]),
                          "volumes": [{"name": "state", "emptyDir": {}}, {"name": "tmp", "emptyDir": {}}]}


def until(what, look, seconds=40):
    """Looks until there is something; an error says what() was waited for."""
    end = time.monotonic() + seconds
    while not (found := look()):
        if time.monotonic() > end:
            raise AssertionError(f"not within {seconds} s: {what()}")
        time.sleep(0.05)
    return found


class Systemd(unittest.TestCase):
    UNITS = ("upipe-coordinator", "upipe-worker")

    def test_they_run_and_stop_in_order(self):
        trial = Cluster({"coordinator": "127.0.0.1", **{name: "127.0.0.1" for name in self.UNITS}})
        self.addCleanup(trial.close)
        coordinator, worker = [trial.start(name, *as_pod(name)) for name in self.UNITS]
        listen = environment_of("upipe-coordinator")["LISTEN"]
        until(lambda: "the coordinator serves: " + coordinator.log(), lambda: serves(listen))

        def nodes():
            return subprocess.run([BIN / "upipe", "--coordinator", listen, "nodes"], capture_output=True, text=True).stdout
        until(lambda: "the worker joins: " + worker.log(), lambda: "READY" in nodes())
        self.assertIn(environment_of("upipe-worker")["METRICS_LISTEN"], nodes())
        self.assertEqual(worker.terminate(), 0, worker.log())
        self.assertEqual(coordinator.terminate(), 0, coordinator.log())

    def test_a_stop_leaves_time_and_spares_the_ranks(self):
        worker = unit_settings("upipe-worker")
        grace = int(re.search(r"--leave-grace=(\d+)s", worker["ExecStart"]).group(1))
        self.assertGreaterEqual(int(worker["TimeoutStopSec"]), grace + 30)
        self.assertEqual(worker["KillMode"], "mixed")       # SIGTERM to the worker alone
        self.assertEqual(worker["OOMPolicy"], "continue")   # one rank's end is not everybody's
        self.assertEqual(unit_settings("upipe-coordinator")["Restart"], "always")

    def test_environment_and_unit_agree(self):
        for name in self.UNITS:
            used = set(re.findall(r"\$\{?(\w+)\}?", unit_settings(name)["ExecStart"]))
            self.assertEqual(used, set(environment_of(name)), name)

    @unittest.skipUnless(shutil.which("systemd-analyze"), "no systemd-analyze here")
    def test_systemd_takes_them(self):
        trial = Cluster({"coordinator": "127.0.0.1"})
        self.addCleanup(trial.close)
        for name in self.UNITS:
            text = (SYSTEMD / f"{name}.service").read_text().replace("/opt/upipe/", f"{trial.folder}/image/")
            path = trial.folder / f"{name}.service"
            path.write_text(text.replace("User=upipe", "User=root"))
            done = subprocess.run(["systemd-analyze", "verify", "--man=no", path], capture_output=True, text=True)
            self.assertEqual([line for line in done.stderr.splitlines() if name in line], [])


class Slurm(unittest.TestCase):
    """stand_ins/ has srun and scontrol: as many copies as nodes, and a note of what was asked."""

    def setUp(self):
        self.cluster = Cluster({"coordinator": "127.0.0.1"})
        self.addCleanup(self.cluster.close)
        self.folder = self.cluster.folder
        self.share = self.folder / "image" / "share"

    def begin(self, *arguments):
        """The batch script, as Slurm starts it on the first node."""
        environment = {
            "PATH": f"{STAND_INS}:{os.environ['PATH']}", "SLURM_JOB_ID": "42", "SLURM_JOB_NUM_NODES": "2", "SLURMD_NODENAME": "127.0.0.1",
            "UPIPE_BIN": str(self.folder / "image" / "bin"), "UPIPE_MEMORY_PER_RANK": "256MiB", "TMPDIR": str(self.folder),
            "UPIPE_STATE": str(self.folder / "state"), "SCONTROL_LOG": str(self.folder / "scontrol.log"), "HOME": "/"}
        with open(self.folder / "slurm.out", "ab") as log:
            script = subprocess.Popen(["bash", SLURM, *arguments], cwd=self.folder, env=environment, stdout=log,
                                      stderr=subprocess.STDOUT, start_new_session=True)
        self.addCleanup(self.end, script)
        return script

    @staticmethod
    def end(script):
        """What a failed test leaves: the script's whole group."""
        try:
            os.killpg(script.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        script.wait()

    def output(self):
        return (self.folder / "slurm.out").read_text()

    def test_a_job_trains_over_its_nodes(self):
        script = self.begin(self.share / "samples" / "tiny.yaml", "--set", f"data.path={self.share / 'corpus'}")
        self.assertEqual(script.wait(90), 0, self.output())
        self.assertIn("SUCCEEDED", self.output())
        workers = (self.folder / "state" / "workers.log").read_text()
        self.assertIn("node-0", workers)
        self.assertIn("node-1", workers)

    def test_it_goes_on_after_its_time(self):
        arguments = [self.share / "samples" / "tiny.yaml", "--set", f"data.path={self.share / 'corpus'}",
                     "--set", f"checkpoint.path={self.folder / 'checkpoints'}", "--set", "train.steps=600"]
        first = self.begin(*arguments)
        until(lambda: "a step: " + self.output(), lambda: re.search(r"step \d{2,}/600", self.output()))
        os.kill(first.pid, signal.SIGTERM)
        self.assertEqual(first.wait(60), 0, self.output())
        self.assertEqual((self.folder / "scontrol.log").read_text(), "requeue 42\n")
        second = self.begin(*arguments)
        self.assertEqual(second.wait(90), 0, self.output())
        ids = set(re.findall(r"\btiny-[a-z0-9]{6}\b", self.output()))
        self.assertEqual(len(ids), 1, "a second job was submitted")
        self.assertRegex(self.output(), r"goes on after step \d+, from the checkpoint of generation 1")

    def test_its_options_leave_time(self):
        options = dict(re.findall(r"#SBATCH --([a-z-]+)=(\S+)", SLURM.read_text()))
        signal_seconds = int(options["signal"].rsplit("@", 1)[1])
        grace = int(re.search(r"UPIPE_LEAVE_GRACE:-(\d+)s", SLURM.read_text()).group(1))
        self.assertGreaterEqual(signal_seconds, grace + 60)
        self.assertEqual(options["ntasks-per-node"], "1")


if __name__ == "__main__":
    cluster.own_network()
    unittest.main()
