"""The Python client of deploy/samples, against real daemons, with the protos that the image carries."""

import subprocess
import sys
import unittest

import cluster
from chart import ROOT, pods, value_sets
from cluster import Cluster

CLIENT = ROOT / "deploy" / "samples" / "python" / "train.py"
ADDRESSES = {"coordinator": "127.0.2.1", "worker": "127.0.2.2"}


class Client(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        owners = pods(value_sets()["small"])
        cls.cluster = Cluster(ADDRESSES)
        cls.addClassCleanup(cls.cluster.close)
        cls.coordinator = cls.cluster.start("coordinator", *owners["coordinator"])
        cls.cluster.start("worker", *owners["worker"]).await_probe("startupProbe")
        cls.coordinator.await_probe("startupProbe")
        cls.port = value_sets()["small"]["coordinator"]["port"]

    def run_client(self, *arguments):
        return subprocess.run([sys.executable, "-B", CLIENT, "--coordinator", f"127.0.2.1:{self.port}", *arguments],
                              capture_output=True, text=True, timeout=90)

    def test_it_trains(self):
        done = self.run_client("--data", "/opt/upipe/share/corpus", "--proto", self.cluster.folder / "image" / "share" / "proto")
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertRegex(done.stdout, r"submitted from-python-\w+")
        self.assertRegex(done.stdout, r"step 20/20  loss \d\.\d{4}")
        self.assertTrue(done.stdout.rstrip().endswith("SUCCEEDED"), done.stdout)

    def test_it_says_what_is_wrong(self):
        done = self.run_client("--data", "/opt/upipe/share/corpus", "--steps", "0")
        self.assertEqual(done.returncode, 2, done.stdout)
        self.assertIn("INVALID_ARGUMENT: ", done.stderr)
        self.assertIn("train.steps", done.stderr)


if __name__ == "__main__":
    cluster.own_network()
    unittest.main()
