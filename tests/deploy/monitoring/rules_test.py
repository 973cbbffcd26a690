"""Rules: what promtool says, one situation in which each fires or records and one in which it stays silent, and runbooks that
are there. Series are as they come from a scrape: with instance, and with a job of the scrape where they have none."""

import pathlib
import re
import subprocess
import tempfile
import unittest

import yaml

from boards import ROOT, needs_prometheus

RULES = ROOT / "deploy" / "prometheus" / "rules"
C = 'job="upipe-coordinator",instance="c"'
W = 'job="upipe-worker",instance="w0",worker="w0",node="n0"'
RANK = W + ',slot="0"'
INFO = {f'upipe_attempt_info{{job="tiny-1",instance="w0",worker="w0",node="n0",slot="0",generation="1",rank="{rank}",plan="p"}}': "1x500"
        for rank in (0,)}
JOB = 'job="tiny-1",instance="c"'
BUCKETS = "upipe_store_commit_seconds_bucket"


def commits(slow):
    """An hour of commits, one in `slow` of them slower than a second."""
    return {f'{BUCKETS}{{{C},le="0.1"}}': f"0+{60 - 60 // slow}x120", f'{BUCKETS}{{{C},le="1"}}': f"0+{60 - 60 // slow}x120",
            f'{BUCKETS}{{{C},le="3"}}': "0+60x120", f'{BUCKETS}{{{C},le="+Inf"}}': "0+60x120"}


def kept(share):
    return {f'upipe_attempt_seconds_total{{{C},outcome="kept"}}': f"0+{share}x200",
            f'upipe_attempt_seconds_total{{{C},outcome="lost"}}': f"0+{100 - share}x200"}


def checkpoints(until):
    """A checkpoint every ten minutes, the last one at a minute."""
    times = " ".join(str(60 * (minute // 10 * 10)) for minute in range(until)) + f" {60 * (until // 10 * 10)}x400"
    return {f"upipe_job_checkpoint_timestamp_seconds{{{JOB}}}": times}


# Alert -> (series that make it fire, when, its labels, words of its summary), (series that must not, when).
ALERTS = {
    "UpipeCoordinatorAbsent": (({"up": "1x60"}, "10m", {}, "No coordinator"), ({f"upipe_coordinator_epoch{{{C}}}": "1x60"}, "10m")),
    "UpipeTargetDown": (({f"up{{{C}}}": "1x5 0x60", 'up{job="upipe/upipe-worker",instance="w"}': "1x60"}, "20m",
                         {"job": "upipe-coordinator", "instance": "c"}, "c does not answer"),
                        ({f"up{{{C}}}": "1x4 0x60", 'up{job="node",instance="w"}': "0x60"}, "8m")),
    "UpipeWorkerLost": (({f'upipe_nodes{{{C},state="lost"}}': "0 2x60"}, "10m", {}, "2 workers are lost"),
                        ({f'upipe_nodes{{{C},state="lost"}}': "0x60", f'upipe_nodes{{{C},state="suspect"}}': "2x60"}, "10m")),
    "UpipeWorkerDisconnected": (({f"upipe_worker_connected{{{W}}}": "1 0x60"}, "10m",
                                 {"job": "upipe-worker", "instance": "w0", "worker": "w0", "node": "n0"}, "Worker w0 has no session"),
                                ({f"upipe_worker_connected{{{W}}}": "1x9 0x60"}, "10m")),
    "UpipeDeviceSick": (({f'upipe_slots{{{W},state="sick"}}': "0 1x60"}, "10m",
                         {"job": "upipe-worker", "instance": "w0", "worker": "w0", "node": "n0", "state": "sick"},
                         "1 devices of worker w0"),
                        ({f'upipe_slots{{{W},state="sick"}}': "0x60", f'upipe_slots{{{W},state="free"}}': "1x60"}, "10m")),
    "UpipeSlotQuarantined": (({f'upipe_slots{{{W},state="quarantined"}}': "1x60"}, "15m",
                              {"job": "upipe-worker", "instance": "w0", "worker": "w0", "node": "n0", "state": "quarantined"},
                              "1 slots of worker w0"),
                             ({f'upipe_slots{{{W},state="quarantined"}}': "0x4 1x60"}, "14m")),
    "UpipeStoreCommitsSlow": ((commits(slow=20), "40m", {}, "longer than 2."), (commits(slow=10**6), "40m")),
    "UpipeRequestsFail": (({f'upipe_rpc_requests_total{{{C},method="JobService.Submit",code="internal"}}': "0+6x60"}, "20m",
                           {"method": "JobService.Submit", "code": "internal"}, "Calls of JobService.Submit end with internal"),
                          ({f'upipe_rpc_requests_total{{{C},method="JobService.Submit",code="invalid_argument"}}': "0+6x60",
                            f'upipe_rpc_requests_total{{{C},method="JobService.Submit",code="internal"}}': "0x60"}, "20m")),
    "UpipeQueueWaits": (({f'upipe_queue_length{{{C},reason="too_few_slots"}}': "1x90"}, "70m", {"reason": "too_few_slots"},
                         "1 jobs have waited for an hour, reason too_few_slots"),
                        ({f'upipe_queue_length{{{C},reason="held"}}': "1x90",
                          f'upipe_queue_length{{{C},reason="busy_slots"}}': "0x20 1x90"},
                         "70m")),
    "UpipeGoodputLow": ((kept(50), "120m", {}, "Only 50%"), (kept(95), "120m")),
    "UpipeJobsRestartOften": (({f'upipe_restarts_total{{{C},cause="signal",budget="infrastructure"}}': "0+0.1x60"}, "60m",
                               {"cause": "signal"}, "6 restarts within an hour, cause signal"),
                              ({f'upipe_restarts_total{{{C},cause="drain",budget="none"}}': "0+0.1x60",
                                f'upipe_restarts_total{{{C},cause="signal",budget="infrastructure"}}': "0x9 1 2x50"}, "60m")),
    "UpipeJobStalled": (({f"upipe_stalls_total{{{C}}}": "0 1x60"}, "5m", {"job": "upipe-coordinator", "instance": "c"}, "no rank moved"),
                        ({f"upipe_stalls_total{{{C}}}": "1x60"}, "5m")),
    "UpipeNoStepProgress": (({f"upipe_rank_in_place_seconds{{{RANK}}}": "0+60x60", **INFO}, "20m", {"job": "tiny-1"},
                             "No rank of tiny-1 has moved for 20m"),
                            ({f"upipe_rank_in_place_seconds{{{RANK}}}": "0 60 120 0 60 120x10", **INFO}, "12m")),
    "UpipeStraggler": (({f"upipe_job_own_seconds_max{{{JOB}}}": "4x60", f"upipe_job_own_seconds_median{{{JOB}}}": "2x60"}, "20m",
                        {"job": "tiny-1", "instance": "c"}, "takes 2 times"),
                       ({f"upipe_job_own_seconds_max{{{JOB}}}": "2.2x60", f"upipe_job_own_seconds_median{{{JOB}}}": "2x60"}, "20m")),
    "UpipeStepsSkipped": (({f"upipe_skipped_steps_total{{{RANK}}}": "0x9 3x20", **INFO}, "10m", {"job": "tiny-1"}, "tiny-1 left out 3"),
                          ({f"upipe_skipped_steps_total{{{RANK}}}": "3x60", **INFO}, "10m")),
    "UpipeMemoryAbovePlan": (({f'upipe_memory_peak_bytes{{{RANK},pool="device"}}': "110x60", **INFO,
                               f'upipe_memory_planned_bytes{{{RANK},pool="device"}}': "100x60"}, "5m",
                              {"job": "tiny-1", "rank": "0", "pool": "device", "worker": "w0", "node": "n0", "slot": "0", "instance": "w0"},
                              "Rank 0 of tiny-1 took 110% of its planned device memory"),
                             ({f'upipe_memory_peak_bytes{{{RANK},pool="device"}}': "102x60", **INFO,
                               f'upipe_memory_peak_bytes{{{RANK},pool="host"}}': "0x60",
                               f'upipe_memory_planned_bytes{{{RANK},pool="host"}}': "0x60",
                               f'upipe_memory_planned_bytes{{{RANK},pool="device"}}': "100x60"}, "5m")),
    "UpipeMemoryNearLimit": (({f'upipe_memory_peak_bytes{{{RANK},pool="device"}}': "99x60", **INFO,
                               f'upipe_memory_limit_bytes{{{RANK},pool="device"}}': "100x60"}, "10m",
                              {"job": "tiny-1", "rank": "0", "pool": "device", "worker": "w0", "node": "n0", "slot": "0", "instance": "w0"},
                              "Rank 0 of tiny-1 took 99% of its device limit"),
                             ({f'upipe_memory_peak_bytes{{{RANK},pool="device"}}': "90x60", **INFO,
                               f'upipe_memory_limit_bytes{{{RANK},pool="device"}}': "100x60"}, "10m")),
    "UpipeCheckpointOld": ((checkpoints(120), "6h", {"job": "tiny-1", "instance": "c"}, "The newest checkpoint of tiny-1"),
                           (checkpoints(359), "5h59m")),
    "UpipeCheckpointProblems": (({f"upipe_coordinator_checkpoint_problems_total{{{C}}}": "0x5 2x60"}, "10m",
                                 {"job": "upipe-coordinator", "instance": "c"}, "A checkpoint was not made"),
                                ({f"upipe_coordinator_checkpoint_problems_total{{{C}}}": "2x60"}, "10m")),
}

RATE = f'upipe_tokens_total{{{RANK}}}'
# Record -> series, when, what it is worth by its labels.
RECORDS = {
    "job:upipe_tokens:rate5m": ({RATE: "0+600x60", **INFO}, "10m", {'{job="tiny-1"}': 10}),
    "job_operation:upipe_comm_bytes_per_second:ratio_rate5m": (
        {f'upipe_comm_bytes_total{{{RANK},operation="ring"}}': "0+6000x60",
         f'upipe_comm_seconds_total{{{RANK},operation="ring"}}': "0+30x60", **INFO},
        "10m", {'{job="tiny-1",operation="ring"}': 200}),
    "job_rank_pool:upipe_memory_planned:ratio": (
        {f'upipe_memory_peak_bytes{{{RANK},pool="device"}}': "50x60",
         f'upipe_memory_planned_bytes{{{RANK},pool="device"}}': "100x60", **INFO},
        "5m", {'{job="tiny-1",rank="0",pool="device",worker="w0",node="n0",slot="0",instance="w0"}': 0.5}),
    "job_rank_pool:upipe_memory_limit:ratio": (
        {f'upipe_memory_peak_bytes{{{RANK},pool="device"}}': "50x60",
         f'upipe_memory_limit_bytes{{{RANK},pool="device"}}': "200x60", **INFO},
        "5m", {'{job="tiny-1",rank="0",pool="device",worker="w0",node="n0",slot="0",instance="w0"}': 0.25}),
    "job:upipe_job_own_seconds:max_over_median": (
        {f"upipe_job_own_seconds_max{{{JOB}}}": "3x60", f"upipe_job_own_seconds_median{{{JOB}}}": "2x60"}, "5m",
        {'{job="tiny-1",instance="c"}': 1.5}),
    "job:upipe_job_checkpoint_interval_seconds:mean6h": (checkpoints(400), "6h", {'{job="tiny-1",instance="c"}': 600}),
    "cluster:upipe_attempt_seconds_kept:ratio_rate1h": (kept(75), "120m", {"{}": 0.75}),
    "cluster:upipe_store_commit_seconds:p99_10m": (commits(slow=20), "40m", {"{}": 2.6}),
}


def rules(kind):
    """Name -> rule."""
    found = {}
    for path in RULES.glob("*.yaml"):
        for group in yaml.safe_load(path.read_text())["groups"]:
            found |= {rule[kind]: rule for rule in group["rules"] if kind in rule}
    return found


def inputs(series):
    return [{"series": name, "values": values} for name, values in series.items()]


def promtool(tests):
    """What `promtool test rules` prints; nothing when all is well."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "tests.yaml"
        files = [str(found) for found in sorted(RULES.glob("*.yaml"))]
        path.write_text(yaml.safe_dump({"rule_files": files, "evaluation_interval": "1m", "tests": tests}, width=1000))
        done = subprocess.run(["promtool", "test", "rules", path], capture_output=True, text=True)
        return "" if done.returncode == 0 else done.stdout + done.stderr


def expect(name, expr, value_by_labels, series, when):
    samples = [{"labels": labels, "value": value} for labels, value in value_by_labels.items()]
    return {"name": name, "interval": "1m", "input_series": inputs(series),
            "promql_expr_test": [{"expr": expr, "eval_time": when, "exp_samples": samples}]}


class Rules(unittest.TestCase):
    def test_promtool_takes_them(self):
        done = subprocess.run(["promtool", "check", "config", ROOT / "deploy" / "prometheus" / "prometheus.yml"],
                              capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    def test_every_rule_is_tested(self):
        self.assertEqual(set(rules("alert")), set(ALERTS))
        self.assertEqual(set(rules("record")), set(RECORDS))

    def test_records(self):
        tests = [expect(name, f"round({name}, 0.001)", values, series, when) for name, (series, when, values) in RECORDS.items()]
        self.assertEqual(promtool(tests), "")

    def test_alerts_fire(self):
        tests = []
        for name, ((series, when, labels, _), _) in ALERTS.items():
            fixed = {"alertname": name, "alertstate": "firing", **rules("alert")[name]["labels"], **labels}
            sample = "ALERTS{" + ",".join(f'{key}="{value}"' for key, value in fixed.items()) + "}"
            expr = f'ALERTS{{alertname="{name}"}}'
            tests.append(expect(name, expr, {sample: 1}, series, when))
        self.assertEqual(promtool(tests), "")

    def test_summaries_say_what_it_is(self):
        """Without an expected alert promtool shows the one there is."""
        tests = [{"name": name, "interval": "1m", "input_series": inputs(series),
                  "alert_rule_test": [{"alertname": name, "eval_time": when, "exp_alerts": []}]}
                 for name, ((series, when, _, _), _) in ALERTS.items()]
        shown = promtool(tests).replace('\\"', '"')
        self.assertNotIn("error executing template", shown)
        for name, ((_, _, _, summary), _) in ALERTS.items():
            self.assertIn(summary, shown, name)

    def test_alerts_stay_silent(self):
        tests = [expect(name, f'ALERTS{{alertname="{name}",alertstate="firing"}}', {}, series, when)
                 for name, (_, (series, when)) in ALERTS.items()]
        self.assertEqual(promtool(tests), "")

    def test_alerts_are_whole(self):
        text = (ROOT / "docs" / "operations.md").read_text()
        titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
        anchors = {re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-") for title in titles}
        for name, rule in rules("alert").items():
            with self.subTest(alert=name):
                self.assertIn("for", rule)
                self.assertIn(rule["labels"]["severity"], ("critical", "warning", "info"))
                self.assertEqual(set(rule["annotations"]), {"summary", "description", "runbook_url"})
                path, anchor = rule["annotations"]["runbook_url"].split("#")
                self.assertEqual(path, "docs/operations.md")
                self.assertIn(anchor, anchors)


if __name__ == "__main__":
    needs_prometheus()
    unittest.main()
