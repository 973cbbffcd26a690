#!/usr/bin/env python3
"""Writes benchmarks/cuda/resources.json: registers, shared memory, stack and spills of every CUDA kernel, as ptxas says.

Compiles each .cu of kernels/ and engine/ for one architecture with nvcc (PATH, --nvcc or /usr/local/cuda/bin), keeping no
object. Ends with 1 and the names when a kernel has a stack frame or spills: hot kernels must not. Static shared memory
only; what is given at launch stands in the source.
"""

import argparse
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
ENTRY = re.compile(r"Compiling entry function '(\w+)' for")
FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
USED = re.compile(r"Used (\d+) registers")
SHARED = re.compile(r"(\d+) bytes smem")


def find_nvcc(given):
    nvcc = given or shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    if not os.access(nvcc, os.X_OK):
        sys.exit(f"cuda_resources: no nvcc at {nvcc}; install the CUDA toolkit or name it with --nvcc")
    return nvcc


def demangled(name):
    text = subprocess.run(["c++filt", name], capture_output=True, text=True, check=True).stdout.strip()
    text = re.sub(r"^void ", "", text)
    text = text.replace("(anonymous namespace)::", "").replace("upipe::kernels::cuda::", "")
    return re.sub(r"\([^()]*\)$", "", text)  # parameters say nothing the template arguments do not


def kernels_of(log, source):
    """One entry for each kernel that ptxas reports on, in its order."""
    kernels = []
    for line in log.splitlines():
        if match := ENTRY.search(line):
            kernels.append({"file": source, "kernel": demangled(match[1])})
        elif not kernels or "registers" in kernels[-1]:
            continue
        elif match := FRAME.search(line):
            kernels[-1].update(zip(("stack_bytes", "spill_store_bytes", "spill_load_bytes"), map(int, match.groups())))
        elif match := USED.search(line):
            shared = SHARED.search(line)
            kernels[-1].update(registers=int(match[1]), shared_bytes=int(shared[1]) if shared else 0)
    return kernels


def compile_one(nvcc, arch, source):
    command = [nvcc, "-std=c++20", f"-arch={arch}", f"-I{ROOT}", "-Xptxas", "-v", "-c", str(source), "-o", os.devnull]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"cuda_resources: {' '.join(command)}\n{done.stderr}")
    return kernels_of(done.stdout + done.stderr, str(source.relative_to(ROOT)))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", default="sm_90a", help="what to compile for (default: %(default)s)")
    parser.add_argument("--nvcc", help="the compiler")
    parser.add_argument("--output", type=pathlib.Path, default=ROOT / "benchmarks/cuda/resources.json")
    arguments = parser.parse_args()
    nvcc = find_nvcc(arguments.nvcc)
    version = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    kernels = []
    for source in sorted([*(ROOT / "kernels").rglob("*.cu"), *(ROOT / "engine").rglob("*.cu")]):
        print(f"{source.name} ...", file=sys.stderr, flush=True)
        kernels += compile_one(nvcc, arguments.arch, source)
    kernels.sort(key=lambda kernel: (kernel["file"], kernel["kernel"]))
    rows = ",\n".join("    " + json.dumps(kernel) for kernel in kernels)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(
        f'{{\n  "compiler": "nvcc {re.search(r"V([0-9.]+)", version)[1]}",\n  "arch": "{arguments.arch}",\n'
        f'  "kernels": [\n{rows}\n  ]\n}}\n')
    hot = [k for k in kernels if k["stack_bytes"] or k["spill_store_bytes"] or k["spill_load_bytes"]]
    for kernel in hot:
        print(f"{kernel['file']}: {kernel['kernel']}: stack {kernel['stack_bytes']} bytes, spills "
              f"{kernel['spill_store_bytes']} stored and {kernel['spill_load_bytes']} loaded", file=sys.stderr)
    return 1 if hot else 0


if __name__ == "__main__":
    sys.exit(main())
