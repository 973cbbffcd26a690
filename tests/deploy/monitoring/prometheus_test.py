"""A real Prometheus, the real daemons and a job: every query of every panel and every rule answers what it should, in the
situation it is for. Failures are made: ranks killed and stopped, steps that are skipped, a full checkpoint folder, a worker
and a coordinator that are gone."""

import os
import re
import signal
import subprocess
import sys
import time
import unittest
import xml.etree.ElementTree

import service
from boards import ROOT, dashboards, each_panel, each_query, needs_prometheus
from expectations import EXPECTED, FULL, GONE, LOST, MAY_HOLD, PROVOKED, QUEUE, QUIET, RECORDED, RESTARTED, SKIPPED, STEADY
from rules_test import rules
from service import Service

EVERY_STEPS = 20


class Facts:
    """What the service itself says of the job and of itself at one moment."""

    def __init__(self, here, job):
        told = here.json("describe", job)
        self.job, self.every_steps = job, EVERY_STEPS
        self.generation = int(told["generation"])
        self.plans = told["plan"]["ranks"]
        self.limit = float(told["plan"]["budget"]["device_bytes"])
        self.reports = [rank["last_report"] for rank in told["ranks"]]
        self.checkpoint_bytes = float(told["last_commit"]["bytes"])
        self.lines = here.steps(job)
        recent = [line for line in self.lines if line["unix_millis"] > self.lines[-1]["unix_millis"] - 10_000]
        seconds = [line["step_seconds"] for line in recent]
        # Of rank 0; other ranks take a little more or less for the same steps.
        self.fastest, self.slowest = min(seconds) * 0.8, max(seconds) * 1.25
        self.past_step, step = recent[0]["step"], recent[-1]["step"]
        self.coming_step = 2 * step - self.past_step
        passed = (recent[-1]["unix_millis"] - recent[0]["unix_millis"]) / 1e3
        self.rate = sum(line["tokens"] for line in recent[1:]) / passed
        self.plan = told["plan"]
        nodes = here.json("nodes")
        self.version, self.isa = nodes["coordinator_version"], nodes["nodes"][0]["isa"]
        self.methods = {labels["method"] for labels, _ in here.prometheus.now("upipe_rpc_seconds_count", time.time())}
        self.events = {labels["event"] for labels, _ in here.prometheus.now("upipe_coordinator_step_seconds_count", time.time())}


    def mfu(self, seconds):
        """Causal MFU of a step that takes so long."""
        return float(self.plan["model_flops"]) / len(self.plans) / seconds / float(self.plan["peak_flops"])


class Seen(unittest.TestCase):
    """One service goes through all situations, in the order of the tests."""

    @classmethod
    def setUpClass(cls):
        cls.here = Service()
        cls.addClassCleanup(cls.here.close)
        cls.here.start()
        cls.here.await_query('sum(upipe_slots{state="free"}) == 3')
        cls.job = cls.here.submit("seen", "train.steps=100000", "train.dtype=bf16", "train.context=1K", "model.num_layers=2",
                                  "train.eval_every=10", "memory.overlap=on",
                                  f"checkpoint.path={cls.here.folder / 'checkpoints'}", f"checkpoint.every_steps={EVERY_STEPS}")

    def filled(self, expr, job):
        expr = expr.replace("$__rate_interval", "10s").replace("$__range", "10m")
        return expr.replace("$job", job).replace("$node", ".+").replace("$slot", ".+")

    def hold_panels_to(self, situation, job=None):
        """Of the job that all facts are of, unless another one is chosen in the dashboards."""
        facts = Facts(self.here, self.job) if situation != GONE else None
        for name, panel, target in each_query():
            where, checks = EXPECTED[name][panel["title"]]
            if where != situation:
                continue
            check = checks[panel["targets"].index(target)]
            with self.subTest(dashboard=name, panel=panel["title"], query=target["refId"]):
                expr = self.filled(target["expr"], job or self.job)
                entries = self.here.prometheus.now(expr, time.time())
                wrong = check(entries, facts)
                if wrong is not None and facts is not None:  # of a step that the facts do not know yet
                    facts = Facts(self.here, self.job)
                    wrong = check(entries, facts)
                self.assertIsNone(wrong, f"{wrong}\n{expr}")
        self.hold_alerts_to(situation)

    def hold_alerts_to(self, situation):
        for name, where in PROVOKED.items():
            if where == situation:
                with self.subTest(alert=name):
                    self.assertTrue(self.here.prometheus.now(rules("alert")[name]["expr"], time.time()))

    def test_1_steady(self):
        here = self.here
        here.await_query("min(changes(upipe_step[10s])) > 2 and min(upipe_step offset 12s) > 0")  # rates are of steps only
        here.await_query("max(upipe_job_checkpoint_step) > 0 and max(changes(upipe_job_checkpoint_timestamp_seconds[1m])) > 1")
        here.await_query(f"max(upipe_step) > {3 * EVERY_STEPS}")
        self.hold_panels_to(STEADY)
        facts = Facts(here, self.job)
        for name, check in QUIET.items():
            expr = rules("alert")[name]["expr"]
            with self.subTest(alert=name):
                if name not in MAY_HOLD:
                    self.assertEqual(here.prometheus.now(expr, time.time()), [], "its condition holds")
                compared = re.match(r"(.*?) (?:[<>]|==) [\d.]+( \* .*)?$", expr, re.DOTALL).group(1)
                self.assertIsNone(check(here.prometheus.now(compared, time.time()), facts), compared)

    def test_2_records(self):
        facts = Facts(self.here, self.job)
        for name, check in RECORDED.items():
            with self.subTest(record=name):
                self.here.await_query(name)
                self.assertIsNone(check(self.here.prometheus.now(name, time.time()), facts))

    def test_3_a_queue_and_wrong_requests(self):
        here = self.here
        here.submit("held", flags=["--hold"])
        second = here.submit("second")
        for _ in range(3):
            here.upipe("describe", "nobody-000000", outcome=2)
            here.upipe("list")
        here.await_query('sum(upipe_queue_length) == 2 and sum(upipe_jobs{state="queued"}) == 2')
        here.await_query('sum(increase(upipe_rpc_requests_total{code="not_found"}[10s])) > 0')
        self.hold_panels_to(QUEUE)
        here.upipe("cancel", second)  # it would take the slots of the job that is to restart

    def test_4_restarts(self):
        here = self.here
        generation = Facts(here, self.job).generation
        os.kill(here.trainers()[0], signal.SIGKILL)
        here.await_query(f'count(upipe_attempt_info{{job="{self.job}", generation="{generation + 1}"}}) == 2')
        here.await_query("min(upipe_step_seconds) > 0")
        os.kill(here.trainers()[0], signal.SIGSTOP)
        here.await_query("sum(upipe_stalls_total) == 1")
        here.await_query(f'count(upipe_attempt_info{{job="{self.job}", generation="{generation + 2}"}}) == 2')
        here.await_query('sum(upipe_jobs{state="running"}) == 1')
        here.await_query("min(upipe_step) > 0")
        self.hold_panels_to(RESTARTED)

    def test_4_skipped_steps(self):
        here = self.here
        wild = here.submit("wild", "parallel.ranks=1", "train.steps=1000000", "optimizer.learning_rate=1e30",
                           "optimizer.max_skipped_steps=1000000")
        here.await_query("max(increase(upipe_skipped_steps_total[10s])) > 1")
        self.hold_panels_to(SKIPPED, wild)
        here.upipe("cancel", wild)
        here.await_query(f'absent(upipe_attempt_info{{job="{wild}"}})')

    def test_5_a_full_checkpoint_folder(self):
        filler = self.here.folder / "checkpoints" / "filler"
        problems = ("sum(increase(upipe_coordinator_checkpoint_problems_total[10s])) > 0.5 "
                    "and sum(increase(upipe_checkpoint_problems_total[10s])) > 0.5")
        with open(filler, "wb", buffering=0) as file:
            def full():
                """Also of what older checkpoints left since."""
                try:
                    while True:
                        file.write(b"x" * 65536)
                except OSError:
                    return self.here.prometheus.now(problems, time.time())
            self.here.until(problems, full, 60)
        self.hold_panels_to(FULL)
        filler.unlink()

    def test_6_pictures(self):
        """Every panel is drawn, none is empty."""
        for name in dashboards():
            out = self.here.folder / "pictures"
            shown = self.here.run("/usr/bin/python3", "-B", ROOT / "tools" / "panels" / "draw.py", "--prometheus", service.PROMETHEUS,
                                  "--dashboard", ROOT / "deploy" / "grafana" / "dashboards" / f"{name}.json", "-o", out,
                                  "--var", f"job={self.job}",
                                  "--range", "1m", "--scrape-interval", "1s")
            with self.subTest(dashboard=name):
                self.assertEqual([line for line in shown.splitlines() if not line.endswith(": drawn")], [])
                drawn = xml.etree.ElementTree.parse(out / f"{name}.svg").getroot()
                text = " ".join(drawn.itertext())
                for board, panel in each_panel():
                    if board == name:
                        self.assertIn(panel["title"], text)

    def test_6_the_page(self):
        """The commands of docs/monitoring.md, in order, beside this Prometheus."""
        folder = self.here.folder / "page"
        folder.mkdir()
        for name in ("deploy", "docs", "tools", "common"):
            (folder / name).symlink_to(ROOT / name)
        stand_ins = ROOT / "tests" / "deploy" / "homes" / "stand_ins"
        environment = {"PATH": f"{stand_ins}:{os.environ['PATH']}", "HOME": str(folder), "UPIPE_SOURCE_DIR": str(ROOT),
                       "UPIPE_BIN_DIR": str(service.BIN), "DEPLOY_PYTHON": sys.executable}
        blocks = re.findall(r"(?ms)^```\n(.*?)^```$", (ROOT / "docs" / "monitoring.md").read_text())
        self.assertGreater(len(blocks), 3)
        done = subprocess.run(["bash", "-exc", "".join(blocks)], cwd=folder, env=environment, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True, timeout=60)
        self.assertEqual(done.returncode, 0, done.stdout)
        self.assertIn("upipe_coordinator_epoch{", done.stdout)
        self.assertTrue((folder / "out" / "panels" / "memory.svg").exists())

    def test_7_a_worker_that_does_not_answer(self):
        here = self.here
        here.upipe("cordon", "w1")
        here.signal("w1", signal.SIGSTOP)
        here.await_query('sum(upipe_nodes{state="lost"}) == 1')
        here.await_query('count(up{instance="127.0.0.1:9475"} == 0) == 1')
        here.await_query("sum(upipe_worker_connected) == 1")  # w0: a busy machine may have kept it from speaking
        self.hold_panels_to(LOST)
        here.signal("w1", signal.SIGCONT)
        here.await_query('sum(upipe_nodes{state="lost"}) == 0')

    def test_8_no_coordinator(self):
        self.here.signal("coordinator", signal.SIGKILL)
        self.here.await_query("absent(upipe_coordinator_epoch) and sum(upipe_worker_connected) == 0")
        self.hold_panels_to(GONE)


if __name__ == "__main__":
    needs_prometheus()
    service.own_network()
    unittest.main()
