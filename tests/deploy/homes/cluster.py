"""Pods of the chart without a cluster: their commands, arguments, environment, users, mounts and ports as rendered, in
one network of their own on this machine; probes as the kubelet would make them."""

import ctypes
import fcntl
import os
import pathlib
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request

import grpc

from chart import HERE, NAMESPACE, ROOT

BIN = pathlib.Path(os.environ["UPIPE_BIN_DIR"])
CLONE_NEWNET, CLONE_NEWNS = 0x40000000, 0x00020000
SKIPPED = 77  # SKIP_RETURN_CODE of the ctest


def own_network():
    """This process and its children see only a loopback of their own, so that no port of a manifest is taken, and what they
    mount is theirs alone."""
    if os.geteuid() != 0:
        print("skipped: pods run in namespaces of their own, which only root makes")
        sys.exit(SKIPPED)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNET | CLONE_NEWNS) != 0:
        sys.exit("no namespace of our own: " + os.strerror(ctypes.get_errno()))
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        request = struct.pack("16sh14x", b"lo", 0x1 | 0x40)  # IFF_UP, IFF_RUNNING
        fcntl.ioctl(sock, 0x8914, request)                   # SIOCSIFFLAGS


def mount_as(folder, path):
    """Shows a folder under a path that this machine may not have, to this process and its children."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=755", "over", os.path.dirname(path)], check=True)
    os.mkdir(path)
    subprocess.run(["mount", "--bind", folder, path], check=True)


class Cluster:
    """One folder of state, one network, any number of pods."""

    def __init__(self, addresses):
        """addresses: component -> address of its pod, all on the loopback."""
        self.addresses = addresses
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="upipe-pods-"))
        os.chmod(self.folder, 0o755)
        self.pods = []
        name = f"upipe-coordinator.{NAMESPACE}.svc"
        (self.folder / "hosts").write_text(f"127.0.0.1 localhost\n{addresses['coordinator']} {name}\n")
        self.fill_image()

    def fill_image(self):
        """/opt/upipe, as the Dockerfiles fill it."""
        subprocess.run([ROOT / "deploy" / "docker" / "install.sh", BIN, self.folder / "image"], check=True)

    def start(self, component, owner, pod):
        started = Pod(self, component, owner, pod)
        self.pods.append(started)
        return started

    def close(self):
        for pod in self.pods:
            pod.kill()
        shutil.rmtree(self.folder)


class Pod:
    def __init__(self, cluster, component, owner, pod):
        self.cluster, self.component, self.spec = cluster, component, pod
        self.container, = pod["containers"]
        self.address = cluster.addresses[component]
        user = pod["securityContext"]["runAsUser"]
        root = pathlib.Path(tempfile.mkdtemp(dir=cluster.folder))
        self.log_path = cluster.folder / f"{component}-{len(cluster.pods)}.log"
        environment = self.environment()
        command = [self.expand(word, environment) for word in self.container["command"] + self.container["args"]]
        # `unshare` is the pod's pause process: what is left of the pod goes with it.
        with open(self.log_path, "wb") as log:
            self.process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", "unshare", "--mount", "--pid", "--ipc", "--fork", "--kill-child=SIGKILL",
                 HERE / "pod_root.sh", root, str(user), cluster.folder, *self.mounts(owner, user), "--",
                 "env", "-i", *[f"{k}={v}" for k, v in environment.items()], *command],
                stdout=log, stderr=subprocess.STDOUT, start_new_session=True)

    def environment(self):
        fields = {"status.podIP": self.address, "spec.nodeName": "node-1"}
        found = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOSTNAME": f"upipe-{self.component}", "HOME": "/"}
        for entry in self.container.get("env", []):
            found[entry["name"]] = entry.get("value") or fields[entry["valueFrom"]["fieldRef"]["fieldPath"]]
        return found

    @staticmethod
    def expand(word, environment):
        """$(NAME), as the kubelet does it: of the container's own entries only."""
        return re.sub(r"\$\((\w+)\)", lambda name: environment[name.group(1)], word)

    def mounts(self, owner, user):
        claims = {claim["metadata"]["name"] for claim in owner["spec"].get("volumeClaimTemplates", [])}
        volumes = {volume["name"]: volume for volume in self.spec["volumes"]}
        found = []
        for mount in self.container["volumeMounts"]:
            volume = volumes.get(mount["name"], {})
            if volume.get("emptyDir", {}).get("medium") == "Memory":
                size = volume["emptyDir"]["sizeLimit"].rstrip("i")  # tmpfs counts in powers of two
                found.append(f"{size}:{mount['mountPath']}")
                continue
            kept = mount["name"] in claims or "persistentVolumeClaim" in volume
            name = f"claim-{mount['name']}" if kept else f"{self.component}-{len(self.cluster.pods)}-{mount['name']}"
            folder = self.cluster.folder / name
            folder.mkdir(exist_ok=True)
            os.chown(folder, 0, user)  # as fsGroup does
            os.chmod(folder, 0o2775)
            found.append(f"{folder}:{mount['mountPath']}")
        return found

    def log(self):
        return self.log_path.read_text(errors="replace")

    def main_process(self):
        """The container's pid 1, seen from here; None before it is there or after."""
        children = pathlib.Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        try:
            return int(children.read_text().split()[0])
        except (OSError, IndexError):
            return None

    def terminate(self):
        """What the kubelet does first when a pod is deleted; the exit code, or an error after its grace."""
        os.kill(self.main_process(), signal.SIGTERM)
        return self.process.wait(self.spec["terminationGracePeriodSeconds"])

    def kill(self):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def probe(self, name):
        """Whether one look of the kubelet succeeds."""
        how = self.container[name]
        if "grpc" in how:
            return serves(f"{self.address}:{how['grpc']['port']}", how["grpc"].get("service", ""))
        ports = {port["name"]: port["containerPort"] for port in self.container["ports"]}
        url = f"http://{self.address}:{ports[how['httpGet']['port']]}{how['httpGet']['path']}"
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                return 200 <= answer.status < 400
        except (urllib.error.URLError, ConnectionError):
            return False

    def await_probe(self, name, seconds=30):
        until = time.monotonic() + seconds
        while not self.probe(name):
            if self.process.poll() is not None or time.monotonic() > until:
                raise AssertionError(f"{self.component}: {name} does not succeed; it says:\n{self.log()}")
            time.sleep(0.05)

    def metrics(self):
        port, = [p["containerPort"] for p in self.container["ports"] if p["name"] == "metrics"]
        with urllib.request.urlopen(f"http://{self.address}:{port}/metrics", timeout=5) as answer:
            return answer.read().decode()


def serves(target, service=""):
    """grpc.health.v1.Health/Check in bytes: field 1 names the service, "" is the whole server; answered by status 1."""
    request = b"\x0a" + bytes([len(service)]) + service.encode() if service else b""
    with grpc.insecure_channel(target) as channel:
        check = channel.unary_unary("/grpc.health.v1.Health/Check")
        try:
            return check(request, timeout=5) == b"\x08\x01"
        except grpc.RpcError:
            return False
