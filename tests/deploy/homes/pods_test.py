"""The chart's pods, run on this machine with the arguments, users, mounts and ports of the manifests."""

import pathlib
import re
import subprocess
import time
import unittest

import cluster
from chart import pods, value_sets
from cluster import BIN, Cluster

ADDRESSES = {"coordinator": "127.0.1.1", "worker": "127.0.1.2", "check": "127.0.1.3"}


def help_of(program, *verbs):
    return subprocess.run([BIN / program, *verbs, "--help"], check=True, capture_output=True, text=True).stdout


class Flags(unittest.TestCase):
    def test_every_flag_exists(self):
        texts = {}
        for name, values in value_sets().items():
            for component, (_, pod) in pods(values).items():
                container, = pod["containers"]
                program = container["command"][0].rsplit("/", 1)[1]
                self.assertEqual(container["command"], [f"/opt/upipe/bin/{program}"])
                if program not in texts:
                    verbs = ["submit"] if program == "upipe" else []
                    texts[program] = help_of(program) + (help_of(program, *verbs) if verbs else "")
                for argument in container["args"]:
                    if not argument.startswith("--"):
                        continue
                    with self.subTest(values=name, component=component, argument=argument):
                        self.assertRegex(texts[program], r"(?<![\w-])" + re.escape(argument.split("=")[0]) + r"[\s{]")


class Running(unittest.TestCase):
    """Values of values/small.yaml, whose worker asks for what a small machine has."""

    @classmethod
    def setUpClass(cls):
        cls.values = value_sets()["small"]
        cls.owners = pods(cls.values)
        cls.cluster = Cluster(ADDRESSES)
        cls.addClassCleanup(cls.cluster.close)
        cls.coordinator = cls.start("coordinator")
        cls.worker = cls.start("worker")
        cls.coordinator.await_probe("startupProbe")
        cls.worker.await_probe("startupProbe")

    @classmethod
    def start(cls, component):
        return cls.cluster.start(component, *cls.owners[component])

    def client(self, *arguments):
        port = self.values["coordinator"]["port"]
        done = subprocess.run([BIN / "upipe", "--coordinator", f"127.0.1.1:{port}", *arguments], capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout

    def test_1_probes_succeed(self):
        for pod in (self.coordinator, self.worker):
            for name in ("startupProbe", "readinessProbe", "livenessProbe"):
                with self.subTest(component=pod.component, probe=name):
                    pod.await_probe(name)

    def test_1_a_worker_is_ready_once_its_coordinator_has_answered(self):
        lone = Cluster({"coordinator": "127.0.1.8", "worker": "127.0.1.9"})  # nobody listens on the former
        self.addCleanup(lone.close)
        worker = lone.start("worker", *self.owners["worker"])
        worker.await_probe("livenessProbe")
        self.assertTrue(worker.probe("startupProbe"))
        self.assertFalse(worker.probe("readinessProbe"))

    def test_2_they_run_as_the_manifest_says(self):
        for pod in (self.coordinator, self.worker):
            with self.subTest(component=pod.component), open(f"/proc/{pod.main_process()}/status") as file:
                status = dict(line.rstrip("\n").split(":\t", 1) for line in file if ":\t" in line)
                user = str(pod.spec["securityContext"]["runAsUser"])
                self.assertEqual(status["Uid"].split(), [user] * 4)
                self.assertEqual(status["NoNewPrivs"], "1")
                self.assertEqual(int(status["CapEff"], 16) | int(status["CapBnd"], 16), 0)
                mounts = pathlib.Path(f"/proc/{pod.main_process()}/mounts").read_text()
                self.assertRegex(mounts, r"(?m)^root / tmpfs ro,")
                for mount in pod.container["volumeMounts"]:
                    self.assertIn(f" {mount['mountPath']} ", mounts)

    def test_3_the_worker_joins_under_its_node_s_name(self):
        until = time.monotonic() + 20
        while "READY" not in (text := self.client("nodes")) and time.monotonic() < until:
            time.sleep(0.1)
        self.assertRegex(text, r"(?m)^node-1 +node-1 +READY")
        self.assertIn(f"127.0.1.2:{self.values['worker']['metricsPort']}", text)

    def test_4_the_check_job_trains(self):
        check = self.start("check")
        owner, _ = self.owners["check"]
        code = check.process.wait(owner["spec"]["activeDeadlineSeconds"])
        self.assertEqual(code, 0, check.log() + self.worker.log())
        self.assertIn("SUCCEEDED", check.log())

    def test_5_a_new_coordinator_pod_goes_on_from_the_claim(self):
        self.assertEqual(self.coordinator.terminate(), 0, self.coordinator.log())
        type(self).coordinator = self.start("coordinator")
        self.coordinator.await_probe("readinessProbe")
        self.assertIn("SUCCEEDED", self.client("list"))

    def test_6_a_worker_leaves_within_its_grace(self):
        self.assertEqual(self.worker.terminate(), 0, self.worker.log())


class WrongFlag(unittest.TestCase):
    def test_a_wrong_flag_is_found(self):
        owner, pod = pods(value_sets()["small"])["coordinator"]
        pod["containers"][0]["args"].append("--no-such-flag")
        trial = Cluster(ADDRESSES)
        self.addCleanup(trial.close)
        with self.assertRaisesRegex(AssertionError, "no-such-flag"):
            trial.start("coordinator", owner, pod).await_probe("startupProbe")


if __name__ == "__main__":
    cluster.own_network()
    unittest.main()
