#!/usr/bin/env python3
"""Writes deploy/kustomize/base from the chart with its default values: one file for each object, and kustomization.yaml.

Needs helm-python-sdk and PyYAML (tests/deploy/homes/requirements.txt). A test holds the base equal to what this writes.
usage: generate.py [FOLDER]
"""

import pathlib
import sys

import helm_python
import yaml

HERE = pathlib.Path(__file__).resolve().parent
CHART = HERE.parent / "helm" / "upipe"
HEADER = "# From deploy/helm/upipe by deploy/kustomize/generate.py; change the chart, or an overlay.\n"


def objects():
    """Of the defaults, without Helm's own marks and without the check, which is a hook of Helm."""
    with helm_python.Chart.load(str(CHART)) as chart:
        files = chart.render({}, name="upipe", namespace="upipe")
    for template, text in sorted(files.items()):
        if template.endswith(".txt"):
            continue
        for thing in yaml.safe_load_all(text):
            if thing is None or thing["metadata"]["labels"].get("app.kubernetes.io/component") == "check":
                continue
            without_helm(thing)
            del thing["metadata"]["namespace"]
            yield thing


def without_helm(part):
    if isinstance(part, dict):
        for label in ("helm.sh/chart", "app.kubernetes.io/managed-by"):
            part.pop(label, None)
        part = list(part.values())
    for inner in part if isinstance(part, list) else []:
        without_helm(inner)


def dump(thing):
    return HEADER + yaml.safe_dump(thing, sort_keys=False, width=120)


def files():
    """Name -> text of the whole base."""
    found = {}
    for thing in objects():
        name = thing["metadata"]["name"].removeprefix("upipe-")
        found[f"{name}-{thing['kind'].lower()}.yaml"] = dump(thing)
    found["namespace.yaml"] = dump({"apiVersion": "v1", "kind": "Namespace", "metadata": {
        "name": "upipe", "labels": {"pod-security.kubernetes.io/enforce": "restricted"}}})
    found["kustomization.yaml"] = dump({
        "apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization", "namespace": "upipe",
        "resources": sorted(found)})
    return found


def main():
    folder = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else HERE / "base")
    folder.mkdir(parents=True, exist_ok=True)
    wanted = files()
    for path in folder.glob("*.yaml"):
        if path.name not in wanted:
            path.unlink()
    for name, text in wanted.items():
        (folder / name).write_text(text)


if __name__ == "__main__":
    main()
