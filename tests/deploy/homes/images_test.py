"""The images without a container engine: what their Dockerfiles promise, and that the runtime packages carry the programs.
deploy/docker/try_image.sh runs the Dockerfile's own steps in a minimal Debian root."""

import os
import pathlib
import re
import subprocess
import tempfile
import unittest

import dockerfile
from chart import ROOT, pods, value_sets
from cluster import BIN

DOCKER = ROOT / "deploy" / "docker"
INSTALL = DOCKER / "install.sh"
FILES = (DOCKER / "Dockerfile", DOCKER / "Dockerfile.cuda")
# For documents, checks and tests.
NOT_SHIPPED = {"upipe-memory-figures", "upipe-metrics-doc", "upipe-sample-pages", "upipe-gpu-check", "upipe-fake-trainer",
               "upipe-fake-plan"}


def shipped():
    return subprocess.run([INSTALL, "--list"], check=True, capture_output=True, text=True).stdout.split()


def libraries(programs):
    """Real files of everything that the programs are linked with."""
    text = subprocess.run(["ldd", *[BIN / program for program in programs]], check=True, capture_output=True, text=True).stdout
    if "not found" in text:
        raise AssertionError(text)
    return {os.path.realpath(path) for path in re.findall(r"=> (/\S+)", text)}


def owners(paths):
    """Debian packages that the files belong to, architecture left off."""
    both = [*paths, *[path.removeprefix("/usr") for path in paths]]  # packages of before the merged /usr say /lib
    text = subprocess.run(["dpkg-query", "--search", *both], capture_output=True, text=True).stdout
    found = dict(reversed(line.split(": ")) for line in text.splitlines())
    missing = [path for path in paths if path not in found and path.removeprefix("/usr") not in found]
    if missing:
        raise AssertionError(f"no package has {missing}")
    return {package.split(":")[0] for package in found.values()}


def closure(packages):
    """The packages and all they depend on, as far as installed here."""
    done, left = set(), set(packages)
    while left:
        text = subprocess.run(["dpkg-query", "--show", "--showformat=${Package} ${Pre-Depends},${Depends}\\n", *sorted(left)],
                              capture_output=True, text=True).stdout
        done |= left
        left = set(re.findall(r"[a-z0-9][a-z0-9+.-]+", re.sub(r"\([^)]*\)|:any", "", text))) - done
    return done


class Dockerfiles(unittest.TestCase):
    def test_the_last_stage_is_small_and_nobody_s(self):
        for path in FILES:
            with self.subTest(file=path.name):
                build, last = dockerfile.stages(path)
                self.assertEqual(dockerfile.of_kind(last, "USER"), ["65532:65532"])
                self.assertEqual(dockerfile.of_kind(last, "COPY"), ["--from=build /opt/upipe /opt/upipe"])
                self.assertEqual([p for p in dockerfile.installed_packages(last) if p.endswith("-dev")], [])
                for command in dockerfile.of_kind(last, "RUN"):
                    self.assertIn("--no-install-recommends", command)
                    self.assertIn("rm -rf /var/lib/apt/lists/*", command)
                self.assertEqual(dockerfile.of_kind(build, "ADD") + dockerfile.of_kind(last, "ADD"), [])
                for word in ("curl", "wget", "http:", "https:", ":latest"):
                    self.assertNotIn(word, path.read_text())

    def test_both_install_the_same_packages(self):
        first, second = [dockerfile.installed_packages(dockerfile.stages(path)[-1]) for path in FILES]
        self.assertEqual(first, second)

    def test_the_packages_carry_the_programs(self):
        packages = dockerfile.installed_packages(dockerfile.stages(FILES[0])[-1])
        needed = owners(libraries(shipped()))
        self.assertGreater(len(needed), 10)
        self.assertEqual(needed - closure(packages), set())

    def test_every_package_is_needed(self):
        packages = dockerfile.installed_packages(dockerfile.stages(FILES[0])[-1])
        needed = owners(libraries(shipped()))
        for package in packages:
            self.assertTrue(closure({package}) & needed, package)
            self.assertIn(package, needed, "nothing links it")

    def test_every_program_is_shipped(self):
        lists = [path.read_text() for path in ROOT.glob("*/**/CMakeLists.txt") if "build" not in path.parts]
        built = {name for text in lists for name in re.findall(r"upipe_binary\((upipe[a-z-]*)\s", text)}
        self.assertEqual(built - NOT_SHIPPED, set(shipped()))

    def test_build_stages_call_what_is_there(self):
        for path in FILES:
            for script in re.findall(r"RUN (\./dev|deploy/\S+)", path.read_text()):
                self.assertTrue(os.access(ROOT / script, os.X_OK), script)


class Installed(unittest.TestCase):
    def test_what_pods_call_is_there(self):
        with tempfile.TemporaryDirectory() as folder:
            image = pathlib.Path(folder) / "upipe"
            subprocess.run([INSTALL, BIN, image], check=True)
            for name, values in value_sets().items():
                for _, pod in pods(values).values():
                    container, = pod["containers"]
                    words = [word.split("=")[-1] for word in container["command"] + container["args"]]
                    for path in [word for word in words if word.startswith("/opt/upipe/")]:
                        self.assertTrue((image / path.removeprefix("/opt/upipe/")).exists(), f"{name}: {path}")
            size = sum(path.stat().st_size for path in image.rglob("*") if path.is_file())
            self.assertLess(size, 100 << 20)
            text = subprocess.run([image / "bin" / "upipe", "--help"], check=True, capture_output=True, text=True).stdout
            self.assertIn("submit", text)


if __name__ == "__main__":
    unittest.main()
