"""Lines and files of every room of lemonx and its laboratory, now and at an earlier commit.

python benchmarks/rooms.py           now
python benchmarks/rooms.py REV       at that commit, now, and the difference
"""

from __future__ import annotations

import argparse
import subprocess
from collections import Counter

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


if __name__ == "__main__":
    main()
