"""The kustomize base: what its script makes of the chart today, whole, and valid."""

import pathlib
import subprocess
import sys
import tempfile
import unittest

import kubernetes_validate
import yaml

from chart import ROOT
from chart_test import VERSIONS

KUSTOMIZE = ROOT / "deploy" / "kustomize"
BASE = KUSTOMIZE / "base"


def texts(folder):
    return {path.name: path.read_text() for path in folder.iterdir()}


class Kustomize(unittest.TestCase):
    def test_it_is_up_to_date(self):
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run([sys.executable, "-B", KUSTOMIZE / "generate.py", folder], check=True)
            self.maxDiff = None
            self.assertEqual(texts(BASE), texts(pathlib.Path(folder)), "run deploy/kustomize/generate.py")

    def test_it_names_every_file(self):
        listed = yaml.safe_load((BASE / "kustomization.yaml").read_text())
        self.assertEqual(set(listed), {"apiVersion", "kind", "namespace", "resources"})
        self.assertEqual(sorted(listed["resources"] + ["kustomization.yaml"]), sorted(texts(BASE)))

    def test_every_object_is_valid(self):
        kinds = []
        for name, text in texts(BASE).items():
            if name == "kustomization.yaml":
                continue
            thing = yaml.safe_load(text)
            kinds.append(thing["kind"])
            for version in VERSIONS:
                kubernetes_validate.validate(thing, version, strict=True)
        self.assertEqual(sorted(kinds), ["DaemonSet", "Namespace", "NetworkPolicy", "NetworkPolicy", "Service",
                                         "ServiceAccount", "ServiceAccount", "StatefulSet"])

    def test_it_fits_its_namespace(self):
        """The pod security level `restricted` has no hostPath, host network or added capability."""
        for text in texts(BASE).values():
            for word in ("hostPath", "hostNetwork", "add:"):
                self.assertNotIn(word, text)


if __name__ == "__main__":
    unittest.main()
