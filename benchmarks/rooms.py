"""Lines and files of every room of lemonx and its laboratory, now and at an earlier commit.

python benchmarks/rooms.py           now
python benchmarks/rooms.py REV       at that commit, and now

Below the table stands how many parameters the functions have that an expansion passes on its way to the plan.
"""

from __future__ import annotations

import argparse
import inspect
import subprocess
from collections import Counter
from collections.abc import Callable

import shown

SOURCES = ("src/lemonx", "src/lemonx_lab")
Count = tuple[int, int]


def rooms(revision: str) -> dict[str, Count]:
    """Lines and files by room, at a commit; a module at the top of a package is its own room."""
    lines, files = Counter[str](), Counter[str]()
    for path in _git("ls-tree", "-r", "--name-only", revision, *SOURCES).split():
        if path.endswith(".py"):
            room = "/".join(path.split("/")[1:3])
            lines[room] += _git("show", f"{revision}:{path}").count("\n")
            files[room] += 1
    return {room: (lines[room], files[room]) for room in sorted(lines)}


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=shown.ROOT, capture_output=True, text=True, check=True).stdout


def total(counts: dict[str, Count], package: str) -> Count:
    """The lines and files of a package."""
    inside = [count for room, count in counts.items() if room.startswith(f"{package}/")]
    return sum(lines for lines, _ in inside), sum(files for _, files in inside)


def parameters() -> dict[str, int]:
    """The number of parameters of each function from the command line to the plan."""
    from lemonx import api
    from lemonx.cli.expansion import expand_command
    from lemonx.planning.plan import make_plan
    from lemonx.workflows.expanding import expand_folder
    from lemonx.workflows.planning import plan_growth

    way: tuple[Callable[..., object], ...] = (expand_command, api.expand, expand_folder, plan_growth, make_plan)
    return {one.__name__: len(inspect.signature(one).parameters) for one in map(unwrapped, way)}


def unwrapped(function: Callable[..., object]) -> Callable[..., object]:
    """The function as it is written, before a decorator turns its options into keywords."""
    return getattr(function, "__wrapped__", function)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revision", nargs="?", help="a commit to compare with")
    given = parser.parse_args().revision
    columns = [rooms(revision) for revision in ([given] if given else []) + ["HEAD"]]
    for counts in columns:
        counts |= {package: total(counts, package) for package in ("lemonx", "lemonx_lab")}
    print(f"{'room':<32}" + "".join(f"{'lines':>10}{'files':>7}" for _ in columns))
    for room in sorted({room for counts in columns for room in counts}):
        cells = [counts.get(room, (0, 0)) for counts in columns]
        print(f"{room:<32}" + "".join(f"{lines:>10,}{files:>7}" for lines, files in cells))
    print("parameters: " + ", ".join(f"{name} {count}" for name, count in parameters().items()))


if __name__ == "__main__":
    main()
