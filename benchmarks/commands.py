"""How long does a command take, from the moment that it is typed? Each is a process of its own, imports and all.

    python benchmarks/commands.py                    every command, three times in turn
    python benchmarks/commands.py --setup            `make setup` in a copy of this tree, too: it downloads torch

The model is tests/data/stories260K (1 MB); `org/small` is the same in a cache of the hub. A median beside the best of
all rounds shows how busy the machine was. CPU seconds hold on a busy machine too, or nearly. What loads a model cannot
be faster than the import of torch and transformers' class, which is on a line of its own.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import shown
from processes import STORIES, Cost, command

COMMIT = "0" * 40
IMPORT = "import torch, transformers; transformers.LlamaForCausalLM"


def commands(folder: Path) -> dict[str, tuple[tuple[str, ...], float | None]]:
    """What is typed, by the words of the table, and how many seconds it may take, if that is said anywhere."""
    small, large = str(STORIES), str(folder / "large")
    grow = ("--width", "96", "--depth", "8")
    return {
        "--help": (("--help",), 0.3),
        "plan org/small, from the cache": (("plan", "org/small", *grow), 1.0),
        "plan ./small": (("plan", small, *grow), 1.0),
        "architectures": (("architectures",), 1.0),
        "methods": (("methods",), None),
        "fsck ./small": (("fsck", small), None),
        "expand ./small ./large, verified": (("expand", small, large, *grow, "--force"), 6.0),
        "expand --no-verify": (("expand", small, f"{large}-2", *grow, "--force", "--no-verify"), None),
        "verify ./small ./large": (("verify", small, large), None),
        "recipe ./small ./large": (("recipe", small, large), None),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--setup", action="store_true", help="measure `make setup` in a copy of this tree")
    options = parser.parse_args()
    # As at a user's: Python keeps what it has compiled.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ["HF_HUB_OFFLINE"] = "1"
    with tempfile.TemporaryDirectory(prefix="lemonx-bench-") as folder:
        os.environ["HF_HOME"] = str(cache(Path(folder, "hub-cache")))
        lines = measured(Path(folder), options.rounds)
        lines.append(f"{os.cpu_count()} cores, load average {os.getloadavg()[2]:.1f} at the end")
        if options.setup:
            lines.append(set_up(Path(folder, "tree")))
    print("\n".join(lines))
    shown.printed("commands", lines)


def cache(home: Path) -> Path:
    """A cache of the hub, as its library writes it, that holds the model as org/small."""
    model = home / "hub" / "models--org--small"
    shutil.copytree(STORIES, model / "snapshots" / COMMIT)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(COMMIT)
    return home


def measured(folder: Path, rounds: int) -> list[str]:
    """A line for each command: best and median, wall and CPU seconds, and what it may take."""
    typed = commands(folder)
    found: dict[str, list[Cost]] = {what: [] for what in ("import of torch and a model class", *typed)}
    for number in range(rounds + 1):  # in turn, so that a busy machine slows down all alike
        for what, rows in found.items():
            words = ("-m", "lemonx", *typed[what][0]) if what in typed else ("-c", IMPORT)
            cost = command(*words)
            if number:  # the first round compiles and fills the caches of the disk
                rows.append(cost)
    head = f"{'seconds':<34} {'wall: best':>10} {'median':>6} {'CPU: best':>9} {'median':>6} {'at most':>7}"
    return [head, *(line(what, rows, typed.get(what, ((), None))[1]) for what, rows in found.items())]


def line(what: str, rows: list[Cost], most: float | None) -> str:
    cpu, wall = [row[0] for row in rows], [row[1] for row in rows]
    figures = f"{min(wall):>10.2f} {statistics.median(wall):>6.2f} {min(cpu):>9.2f} {statistics.median(cpu):>6.2f}"
    return f"{what:<34} {figures} {'' if most is None else f'{most:g}':>7}".rstrip()


def set_up(tree: Path) -> str:
    """`make setup` where nothing is installed; packages may come from pip's cache."""
    archived = subprocess.run(["git", "archive", "HEAD"], cwd=shown.ROOT, check=True, stdout=subprocess.PIPE).stdout
    tree.mkdir()
    subprocess.run(["tar", "-x"], cwd=tree, input=archived, check=True)
    began = time.perf_counter()
    subprocess.run(["make", "setup"], cwd=tree, check=True, stdout=subprocess.DEVNULL)
    return f"{'make setup':<34} {time.perf_counter() - began:>10.0f}"


if __name__ == "__main__":
    main()
