"""The chart: rendered by Helm for every value set, each object held to its schema and to our rules for pods."""

import json
import re
import unittest

import helm_python
import jsonschema
import kubernetes_validate
import yaml

from chart import CHART, HERE, NAMESPACE, ROOT, pods, render, value_sets

VERSIONS = ("1.27", "1.37")  # the oldest the chart allows, the newest there is a schema of
KINDS = {  # what the chart may bring into a cluster at all
    "ServiceAccount", "Service", "StatefulSet", "DaemonSet", "Job", "NetworkPolicy", "PodDisruptionBudget",
    "ServiceMonitor", "PodMonitor", "PrometheusRule", "ConfigMap",
}
UNITS = {"": 1, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40,
         "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def amount(text):
    number, unit = re.fullmatch(r"([0-9.]+)([A-Za-z]*)", str(text)).groups()
    return float(number) * UNITS[unit]


def flags(container):
    return dict((argument + "=").split("=")[:2] for argument in container["args"] if argument.startswith("--"))


def rules(thing):
    return [rule for group in thing["spec"]["groups"] for rule in group["rules"]]


class Schemas(unittest.TestCase):
    def test_every_object_is_valid(self):
        for name, values in value_sets().items():
            objects = render(values)
            self.assertGreater(len(objects), 4, name)
            for template, thing in objects:
                with self.subTest(values=name, template=template, kind=thing["kind"]):
                    self.assertTrue(self.validated(thing), "no schema was applied")

    def validated(self, thing):
        """Raises what is wrong; False when nothing looked at it."""
        if thing["apiVersion"].startswith("monitoring.coreos.com/"):
            schema = json.loads((HERE / "schemas" / (thing["kind"] + ".json")).read_text())
            jsonschema.validate(thing, schema)
            return True
        taken = [kubernetes_validate.validate(thing, version, strict=True) for version in VERSIONS]
        return len(taken) == len(VERSIONS)

    def test_a_wrong_field_is_found(self):
        (_, worker), = [(t, o) for t, o in render({}) if o["kind"] == "DaemonSet"]
        worker["spec"]["template"]["spec"]["terminationGracePeriod"] = 5
        with self.assertRaises(kubernetes_validate.ValidationError):
            self.validated(worker)

    def test_the_values_schema_knows_every_value(self):
        schema = json.loads((CHART / "values.schema.json").read_text())
        jsonschema.validate(yaml.safe_load((CHART / "values.yaml").read_text()), schema)

        def compare(values, part, path):
            known = set(part["properties"]) - {"global"}
            self.assertEqual(set(values), known, path or "values.yaml")
            for key, value in values.items():
                if part["properties"][key].get("additionalProperties") is False:
                    compare(value, part["properties"][key], f"{path}.{key}")
        values = yaml.safe_load((CHART / "values.yaml").read_text())
        for owner in ("coordinator", "worker"):  # Kubernetes' own map, described by what it must have
            values[owner].pop("resources")
            schema["properties"][owner]["properties"].pop("resources")
        compare(values, schema, "")

    def test_every_value_is_used(self):
        templates = "".join(path.read_text() for path in sorted((CHART / "templates").iterdir()))
        text = templates.replace("$worker.", ".Values.worker.")
        text = text.replace("$prometheus", ".Values.networkPolicy.prometheusNamespace")
        for top, values in yaml.safe_load((CHART / "values.yaml").read_text()).items():
            for key in values if isinstance(values, dict) else [None]:
                path = f".Values.{top}" + (f".{key}" if key else "")
                placed = key in ("nodeSelector", "tolerations", "affinity")  # through upipe.placement
                self.assertTrue(placed or re.search(re.escape(path) + r"\b", text), path)

    def test_wrong_values_are_refused(self):
        for values in ({"worker": {"slots": 0}}, {"worker": {"slot": 2}}, {"worker": {"backend": "gpu"}},
                       {"worker": {"memoryPerRank": "4Gi"}}, {"user": 0}, {"worker": {"devices": {"gpu": 1}}},
                       {"coordinator": {"port": 80}}, {"worker": {"extraArgs": ["no-flag"]}}):
            with self.subTest(values=values), self.assertRaises(helm_python.HelmError):
                render(values)

    def test_misspelt_values_are_refused(self):
        for path in ("", "image", "coordinator", "coordinator.storage", "worker", "worker.rdma", "worker.state", "data",
                     "networkPolicy", "monitoring", "dashboards", "check"):
            values = {"misspelt": 1}
            for key in reversed(path.split(".") if path else []):
                values = {key: values}
            with self.subTest(values=values), self.assertRaisesRegex(helm_python.HelmError, "misspelt"):
                render(values)

    def test_helm_lint_has_nothing_to_say(self):
        for name, values in value_sets().items():
            report = helm_python.lint(str(CHART), values, strict=True)
            self.assertEqual(report["errors"], [], name)
            self.assertEqual([m for m in report["messages"] if m["severity"] > 1], [], name)


class Policies(unittest.TestCase):
    def each_pod(self):
        for name, values in value_sets().items():
            for component, (owner, pod) in pods(values).items():
                with self.subTest(values=name, component=component):
                    yield values, component, owner, pod

    def test_the_chart_brings_no_other_kinds(self):
        for name, values in value_sets().items():
            kinds = {thing["kind"] for _, thing in render(values)}
            self.assertEqual(kinds - KINDS, set(), name)  # Roles among them: nothing asks the cluster's API
            self.assertNotIn("*", json.dumps([o for _, o in render(values) if "rules" in o]), name)

    def test_versions_are_the_project_s(self):
        version, = re.findall(r"(?m)^project\(upipe VERSION (\S+)", (ROOT / "CMakeLists.txt").read_text())
        chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
        self.assertEqual((chart["version"], chart["appVersion"]), (version, version))

    def test_names_follow_the_release(self):
        for _, thing in render({"monitoring": {"enabled": True}, "dashboards": {"enabled": True}}, name="team-a"):
            self.assertTrue(thing["metadata"]["name"].startswith("team-a-upipe"), thing["metadata"]["name"])
            self.assertEqual(thing["metadata"]["namespace"], NAMESPACE)

    def test_no_privilege(self):
        for values, component, _, pod in self.each_pod():
            self.assertFalse(pod["automountServiceAccountToken"])
            self.assertNotIn(pod["serviceAccountName"], ("", "default"))
            self.assertTrue(pod["securityContext"]["runAsNonRoot"])
            self.assertGreater(pod["securityContext"]["runAsUser"], 0)
            self.assertEqual(pod["securityContext"]["seccompProfile"]["type"], "RuntimeDefault")
            self.assertFalse(pod.get("hostPID") or pod.get("hostIPC"))
            rdma = values.get("worker", {}).get("rdma", {}).get("resources")
            for container in pod["containers"]:
                context = container["securityContext"]
                self.assertFalse(context["allowPrivilegeEscalation"])
                self.assertTrue(context["readOnlyRootFilesystem"])
                self.assertFalse(context.get("privileged"))
                self.assertEqual(context["capabilities"]["drop"], ["ALL"])
                allowed = ["IPC_LOCK"] if component == "worker" and rdma else []
                self.assertEqual(context["capabilities"].get("add", []), allowed)

    def test_limits_and_probes(self):
        for _, component, owner, pod in self.each_pod():
            for container in pod["containers"]:
                for kind in ("requests", "limits"):
                    self.assertLessEqual({"cpu", "memory"}, set(container["resources"][kind]))
                if owner["kind"] == "Job":
                    self.assertGreater(owner["spec"]["activeDeadlineSeconds"], 0)
                    continue
                ports = {port["name"]: port["containerPort"] for port in container["ports"]}
                for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                    how = container[probe]
                    self.assertEqual(how["grpc"]["port"], ports["health"], probe)
                self.assertNotIn("service", container["livenessProbe"]["grpc"])  # it lives, whomever it waits for
                liveness = container["livenessProbe"]
                if component == "worker":  # not before its own autonomy of 300 s has ended its ranks
                    self.assertGreaterEqual(liveness["failureThreshold"] * liveness["periodSeconds"], 300)

    def test_workers_may_leave_in_peace(self):
        for _, component, owner, pod in self.each_pod():
            if component != "worker":
                continue
            grace = int(flags(pod["containers"][0])["--leave-grace"].rstrip("s"))
            self.assertGreaterEqual(pod["terminationGracePeriodSeconds"], grace + 30)
            self.assertEqual(owner["spec"]["updateStrategy"], {"type": "OnDelete"})

    def test_ranks_fit_the_memory_limit(self):
        for _, component, _, pod in self.each_pod():
            if component != "worker":
                continue
            container, = pod["containers"]
            given = flags(container)
            shm, = [v["emptyDir"]["sizeLimit"] for v in pod["volumes"] if v.get("emptyDir", {}).get("medium") == "Memory"]
            ranks = int(given["--slots"]) * amount(given["--memory-per-rank"])
            limits = container["resources"]["limits"]
            self.assertLess(ranks + amount(shm), amount(limits["memory"]))
            self.assertEqual(limits, container["resources"]["requests"])
            self.assertIn("/dev/shm", [mount["mountPath"] for mount in container["volumeMounts"]])

    def test_mounts_have_volumes_with_a_size(self):
        for _, _, owner, pod in self.each_pod():
            claims = {claim["metadata"]["name"] for claim in owner["spec"].get("volumeClaimTemplates", [])}
            volumes = {volume["name"]: volume for volume in pod["volumes"]}
            for container in pod["containers"]:
                used = {mount["name"] for mount in container["volumeMounts"]}
                self.assertEqual(used, claims | set(volumes))
            for name, volume in volumes.items():
                if "emptyDir" in volume:
                    self.assertIn("sizeLimit", volume["emptyDir"], name)

    def test_ports_stay_inside_the_namespace(self):
        for name, values in value_sets().items():
            if not values.get("networkPolicy", {}).get("enabled", True):
                continue
            policies = [thing["spec"] for _, thing in render(values) if thing["kind"] == "NetworkPolicy"]
            for component, (owner, pod) in pods(values).items():
                with self.subTest(values=name, component=component):
                    self.check_ports(values, policies, owner["spec"]["template"]["metadata"]["labels"], pod)

    def check_ports(self, values, policies, labels, pod):
        mine, = [p for p in policies if p["podSelector"]["matchLabels"].items() <= labels.items()]
        self.assertEqual(mine["policyTypes"], ["Ingress", "Egress"])
        metrics = {p["containerPort"] for c in pod["containers"] for p in c.get("ports", []) if p["name"] == "metrics"}
        inside = set()
        for rule in mine["ingress"]:
            ports = {port["port"] for port in rule.get("ports", [])}
            for peer in rule["from"]:  # no `from` would be everybody
                if "namespaceSelector" in peer:
                    wanted = values["networkPolicy"]["prometheusNamespace"]
                    self.assertEqual(peer, {"namespaceSelector": {"matchLabels": {
                        "kubernetes.io/metadata.name": wanted}}})
                    self.assertEqual(ports, metrics)
                else:
                    self.assertEqual(set(peer), {"podSelector"})
                    inside |= ports
        for port in [p for c in pod["containers"] for p in c.get("ports", [])]:
            if port["name"] == "health":  # the kubelet of its own node, which no policy keeps out
                self.assertNotIn(port["containerPort"], inside)
            else:
                self.assertIn(port["containerPort"], inside, "its own namespace cannot reach it")

    def test_services_and_monitors_find_their_pods(self):
        for name, values in value_sets().items():
            objects = [thing for _, thing in render(values)]
            labelled = {c: o["spec"]["template"]["metadata"]["labels"] for c, (o, _) in pods(values).items()}
            services = [thing for thing in objects if thing["kind"] == "Service"]
            for thing in services:
                self.assertEqual(thing["spec"]["type"], "ClusterIP")
                self.assertLessEqual(thing["spec"]["selector"].items(), labelled["coordinator"].items(), name)
            for thing in objects:
                selector = thing["spec"].get("selector", {}).get("matchLabels", {}) if "spec" in thing else {}
                if thing["kind"] == "PodMonitor":
                    self.assertLessEqual(selector.items(), labelled["worker"].items())
                if thing["kind"] == "ServiceMonitor":
                    found = [s for s in services if selector.items() <= s["metadata"]["labels"].items()]
                    self.assertEqual(len(found), 1)
                    self.assertIn(thing["spec"]["endpoints"][0]["port"], [p["name"] for p in found[0]["spec"]["ports"]])


class Monitoring(unittest.TestCase):
    def objects(self, kind, **monitoring):
        values = {"monitoring": {"enabled": True, **monitoring}, "dashboards": {"enabled": True}}
        return [o for _, o in render(values) if o["kind"] == kind]

    def test_rules_are_those_of_deploy_prometheus(self):
        thing, = self.objects("PrometheusRule")
        wanted = []
        for path in sorted((ROOT / "deploy" / "prometheus" / "rules").glob("*.yaml")):
            wanted += yaml.safe_load(path.read_text())["groups"]
        self.assertEqual(thing["spec"]["groups"], wanted)

    def test_runbooks_get_their_address(self):
        thing, = self.objects("PrometheusRule", runbooks="https://git.example/upipe/")
        urls = [rule["annotations"]["runbook_url"] for rule in rules(thing) if "alert" in rule]
        self.assertEqual([url for url in urls if not url.startswith("https://git.example/upipe/docs/operations.md#")], [])

    def test_dashboards_are_those_of_deploy_grafana(self):
        found = {}
        for thing in self.objects("ConfigMap"):
            self.assertEqual(thing["metadata"]["labels"]["grafana_dashboard"], "1")
            found |= thing["data"]
        wanted = {path.name: path.read_text().rstrip("\n") for path in (ROOT / "deploy" / "grafana" / "dashboards").iterdir()}
        self.assertEqual(found, wanted)

    def test_our_labels_win(self):
        """`job` of a target would hide ours."""
        endpoints = self.objects("ServiceMonitor")[0]["spec"]["endpoints"] + \
            self.objects("PodMonitor")[0]["spec"]["podMetricsEndpoints"]
        self.assertEqual([endpoint["honorLabels"] for endpoint in endpoints], [True, True])


if __name__ == "__main__":
    unittest.main()
