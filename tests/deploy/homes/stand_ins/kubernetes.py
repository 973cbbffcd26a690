"""Stands in for docker, helm and kubectl: what they would be told is held to the chart, the base and the Dockerfiles."""

import argparse
import os
import pathlib
import re
import subprocess
import sys

sys.path.insert(0, os.environ["UPIPE_SOURCE_DIR"] + "/tests/deploy/homes")

import helm_python
import yaml

import chart


def parser(*options):
    found = argparse.ArgumentParser(allow_abbrev=False)
    for option in options:
        found.add_argument(option)
    found.add_argument("--namespace", default=chart.NAMESPACE)
    return found


def helm(words):
    verb = words.pop(0)
    taken = parser("name")
    if verb == "test":
        taken.add_argument("--logs", action="store_true")
        name = taken.parse_args(words).name
        hooks = [o for _, o in chart.render({}, name) if "helm.sh/hook" in o["metadata"].get("annotations", {})]
        return None if hooks else "no test hook"
    if verb not in ("install", "upgrade"):
        return f"helm stand-in: unknown verb {verb}"
    taken.add_argument("chart")
    taken.add_argument("--create-namespace", action="store_true")
    taken.add_argument("--reuse-values", action="store_true")
    taken.add_argument("--set", action="append", default=[])
    taken.add_argument("--values", type=pathlib.Path)
    given = taken.parse_args(words)
    values = yaml.safe_load(given.values.read_text()) if given.values else {}
    for setting in given.set:
        values |= helm_python.parse_set_string(setting)
    with helm_python.Chart.load(given.chart) as loaded:
        notes = loaded.render(values, name=given.name, namespace=given.namespace)["upipe/templates/NOTES.txt"]
    print(notes)
    return None


def kubectl(words):
    start = words.index("exec") if "exec" in words else len(words)
    if start < len(words):
        end = words.index("--")
        pod, = words[start + 1:end]
        names = [o["metadata"]["name"] + "-0" for o, _ in chart.pods({}).values() if o["kind"] == "StatefulSet"]
        return subprocess.run(words[end + 1:]).returncode if pod in names else f"no pod {pod}"
    taken = parser("verb")
    taken.add_argument("what", nargs="*")
    taken.add_argument("-k", type=pathlib.Path)
    taken.add_argument("--selector")
    taken.add_argument("--field-selector")
    given = taken.parse_args(words)
    if given.verb == "apply":
        listed = yaml.safe_load((given.k / "kustomization.yaml").read_text())["resources"]
        return None if all((given.k / name).exists() for name in listed) else "a resource is missing"
    if given.verb == "port-forward":
        name, ports = given.what
        services = [o for _, o in chart.render({}) if o["kind"] == "Service" and "service/" + o["metadata"]["name"] == name]
        found = [port["port"] for service in services for port in service["spec"]["ports"]]
        return None if int(ports.split(":")[1]) in found else f"{name} has no port {ports}"
    if given.verb == "delete":
        label, value = given.selector.split("=")
        owners = [o for o, _ in chart.pods({}).values() if o["spec"]["template"]["metadata"]["labels"].get(label) == value]
        return None if len(owners) == 1 and given.what == ["pod"] else "the selector finds other pods"
    return f"kubectl stand-in: unknown verb {given.verb}"


def docker(words):
    if words[0] == "push":
        return None
    taken = argparse.ArgumentParser(allow_abbrev=False)
    taken.add_argument("verb", choices=["build"])
    taken.add_argument("-f", type=pathlib.Path, required=True)
    taken.add_argument("-t", required=True)
    taken.add_argument("--build-arg", action="append", default=[])
    taken.add_argument("folder", choices=["."])
    given = taken.parse_args(words)
    wanted = set(re.findall(r"(?m)^ARG (\w+)$", given.f.read_text()))
    said = {argument.split("=")[0] for argument in given.build_arg}
    return None if wanted == said else f"{given.f} takes {wanted}, not {said}"


if __name__ == "__main__":
    sys.exit({"helm": helm, "kubectl": kubectl, "docker": docker}[sys.argv[1]](sys.argv[2:]))
