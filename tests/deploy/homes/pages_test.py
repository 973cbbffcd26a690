"""The pages about deploying: every command in their fences is run, in order. Ours are real; stand_ins/ has those of Kubernetes,
Slurm and the machine, which hold their arguments to the chart and the files instead of acting on a cluster."""

import os
import re
import shutil
import subprocess
import unittest

import cluster
from chart import ROOT, pods
from cluster import BIN, Cluster
from homes_test import STAND_INS, until

VALUES = {"worker": {"memoryPerRank": "256MiB"}}


def commands(page):
    """The lines of its fences."""
    blocks = re.findall(r"(?ms)^```\n(.*?)^```$", (ROOT / "docs" / page).read_text())
    return "".join(blocks)


class Pages(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        owners = pods(VALUES)
        cls.cluster = Cluster({"coordinator": "127.0.0.1", "worker": "127.0.3.2"})
        cls.addClassCleanup(cls.cluster.close)
        cluster.mount_as(cls.cluster.folder / "image", "/opt/upipe")
        for component in ("coordinator", "worker"):
            cls.cluster.start(component, *owners[component]).await_probe("startupProbe")
        nodes = ["/opt/upipe/bin/upipe", "--coordinator", "127.0.0.1:7077", "nodes"]
        until(lambda: "the worker joins", lambda: "READY" in subprocess.run(nodes, capture_output=True, text=True).stdout)

    def run_page(self, page):
        folder = self.cluster.folder / page.removesuffix(".md")
        (folder / "build").mkdir(parents=True)
        for name in ("deploy", "docs", "tests", "proto"):
            (folder / name).symlink_to(ROOT / name)
        (folder / "build" / "bin").symlink_to(BIN)
        shutil.copy(STAND_INS / "dev", folder / "dev")
        environment = {"PATH": f"{STAND_INS}:/opt/upipe/bin:{os.environ['PATH']}", "HOME": str(folder), "TMPDIR": str(folder),
                       "UPIPE_SOURCE_DIR": str(ROOT), "UPIPE_BIN_DIR": str(BIN), "DEPLOY_PYTHON": os.sys.executable,
                       "SCONTROL_LOG": str(folder / "scontrol.log")}
        text = commands(page)
        self.assertGreater(len(text.splitlines()), 1)
        # In a process namespace of its own, so that nothing it leaves behind outlives it.
        alone = ["setpriv", "--pdeathsig", "KILL", "unshare", "--pid", "--fork", "--mount-proc", "--kill-child=SIGKILL"]
        done = subprocess.run([*alone, "bash", "-exc", text], cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              text=True, timeout=100)
        self.assertEqual(done.returncode, 0, done.stdout)
        return done.stdout

    def test_kubernetes(self):
        self.assertIn("node-1", self.run_page("deploy-kubernetes.md"))

    def test_slurm(self):
        self.assertIn("SUCCEEDED", self.run_page("deploy-slurm.md"))

    def test_one_machine(self):
        self.assertEqual(self.run_page("deploy-one-machine.md").count("SUCCEEDED after"), 1)


if __name__ == "__main__":
    cluster.own_network()
    unittest.main()
