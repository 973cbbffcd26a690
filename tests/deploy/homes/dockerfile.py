"""Reads a Dockerfile as far as ours go: stages, and their instructions with continued lines joined."""

import pathlib
import re
import sys


def stages(path):
    """[[(instruction, text)]] from each FROM on; ARG before the first FROM is left out."""
    text = re.sub(r"(?m)^\s*#.*\n", "", path.read_text()).replace("\\\n", " ")
    found = []
    for line in filter(None, map(str.strip, text.splitlines())):
        instruction, rest = line.split(None, 1)
        if instruction == "FROM":
            found.append([])
        if found:
            found[-1].append((instruction, " ".join(rest.split())))
    return found


def of_kind(stage, instruction):
    return [text for found, text in stage if found == instruction]


def installed_packages(stage):
    """What its `apt-get install` names."""
    found = set()
    for command in of_kind(stage, "RUN"):
        for step in command.split("&&"):
            if "apt-get install" in step:
                found |= {word for word in step.split()[2:] if not word.startswith("-")}
    return found


if __name__ == "__main__":  # FILE STAGE INSTRUCTION: its texts, a line each, for scripts
    print("\n".join(of_kind(stages(pathlib.Path(sys.argv[1]))[int(sys.argv[2])], sys.argv[3])))
