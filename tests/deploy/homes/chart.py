"""The chart as Helm itself renders it, for the value sets that every deploy test goes through."""

import pathlib

import helm_python
import yaml

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[2]
CHART = ROOT / "deploy" / "helm" / "upipe"
NAMESPACE = "upipe"
POD_OWNERS = ("StatefulSet", "DaemonSet", "Job")


def value_sets():
    """Name -> values over the defaults."""
    sets = {"default": {}}
    for path in sorted((HERE / "values").glob("*.yaml")):
        sets[path.stem] = yaml.safe_load(path.read_text())
    return sets


def render(values, name="upipe"):
    """[(template, object)], NOTES.txt left out; raises what Helm says against the chart or the values."""
    with helm_python.Chart.load(str(CHART)) as chart:
        files = chart.render(values, name=name, namespace=NAMESPACE)
    found = []
    for template, text in sorted(files.items()):
        if template.endswith(".txt"):
            continue
        found += [(template, thing) for thing in yaml.safe_load_all(text) if thing is not None]
    return found


def pods(values):
    """component -> (object, pod spec)."""
    found = {}
    for _, thing in render(values):
        if thing["kind"] in POD_OWNERS:
            found[thing["metadata"]["labels"]["app.kubernetes.io/component"]] = (thing, thing["spec"]["template"]["spec"])
    return found
