"""What comparison.py and bench_job.py promise. Needs Python alone: python3 comparison_test.py."""

import unittest

from bench_job import make_job, to_yaml
from comparison import LOSS_BOUND, compare

OURS = {"losses": [6.0, 5.0], "seconds": [9.0, 1.0], "peak_bytes": [60, 40], "planned_bytes": [50, 30]}
PEER = {"losses": [6.0, 5.0], "seconds": [1.0, 2.0], "peak_bytes": [300, 200], "start_bytes": [200, 100]}


class Compare(unittest.TestCase):
    def row(self, ours=None, peer=None, dtype="fp32"):
        return compare([OURS | (ours or {})], [PEER | (peer or {})], 1, 4096, dtype)

    def test_ratios_leave_dropped_steps_out(self):
        row = self.row()
        self.assertEqual(row["tokens_per_second_ratio"]["median"], 2.0)
        self.assertEqual(row["ours"]["tokens_per_second"], 4096.0)
        self.assertEqual(row["peak_bytes_ratio"], 100 / 500)
        self.assertEqual(row["peak_bytes_ratio_without_start"], 100 / 200)

    def test_a_pair_is_compared_with_itself(self):
        ours = [OURS | {"seconds": [9.0, s]} for s in (1.0, 2.0)]
        peers = [PEER | {"seconds": [9.0, s]} for s in (2.0, 6.0)]
        ratio = compare(ours, peers, 1, 4096, "fp32")["tokens_per_second_ratio"]
        self.assertEqual((ratio["min"], ratio["max"]), (2.0, 3.0))

    def test_losses_must_agree_at_every_step(self):
        for dtype, bound in LOSS_BOUND.items():
            near, far = 5.0 * (1 + 0.9 * bound), 5.0 * (1 + 1.1 * bound)
            self.assertTrue(self.row({"losses": [6.0, near]}, dtype=dtype)["loss"]["agree"])
            self.assertFalse(self.row({"losses": [6.0, far]}, dtype=dtype)["loss"]["agree"])
            self.assertFalse(self.row({"losses": [far, 5.0]}, dtype=dtype)["loss"]["agree"])
        self.assertFalse(self.row({"losses": [6.0, float("nan")]})["loss"]["agree"])
        self.assertFalse(self.row({"losses": [float("nan"), 5.0]})["loss"]["agree"])
        with self.assertRaises(ValueError):
            self.row({"losses": [6.0]})


class Job(unittest.TestCase):
    def test_yaml_says_what_the_dictionary_says(self):
        job = make_job("/data", 7, 4, 1, 8192, 3, "bf16")
        lines = to_yaml(job).splitlines()
        self.assertEqual(lines[0], "name: bench-peer-007")
        self.assertIn("  rope:", lines)
        self.assertIn("    theta: 500000.0", lines)
        self.assertIn("  dtype: bf16", lines)
        values = [line for line in lines if not line.endswith(":")]

        def leaves(fields):
            return sum(leaves(v) if isinstance(v, dict) else 1 for v in fields.values())

        self.assertEqual(len(values), leaves(job))


if __name__ == "__main__":
    unittest.main()
