#!/usr/bin/env python3
"""Writes deploy/grafana/dashboards: one JSON file for each dashboard, in Grafana's classic format. Python alone; a test
holds the files equal to what this writes.

usage: generate.py [FOLDER]
"""

import json
import pathlib
import sys

import cluster
import training

HERE = pathlib.Path(__file__).resolve().parent


def files():
    """Name -> text."""
    made = (training.memory(), training.throughput(), training.job(), cluster.cluster(), cluster.coordinator())
    return {found["uid"].removeprefix("upipe-") + ".json": json.dumps(found, indent=1) + "\n" for found in made}


def main():
    folder = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else HERE / "dashboards")
    folder.mkdir(parents=True, exist_ok=True)
    wanted = files()
    for path in folder.glob("*.json"):
        if path.name not in wanted:
            path.unlink()
    for name, text in wanted.items():
        (folder / name).write_text(text)


if __name__ == "__main__":
    main()
