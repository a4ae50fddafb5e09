"""Writes the list of faults in docs/guarantees.md from the table that the tests read (tests/faults.py).

Each row is made by breaking a small real checkpoint and running `lemonx plan` or `lemonx expand` on it: what is said is
what it says.

    python benchmarks/guarantees.py            print the list
    python benchmarks/guarantees.py --write    put it into docs/guarantees.md, between its markers
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import shutil
import sys
import tempfile
from pathlib import Path

import pages

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path[:0] = [str(pages.ROOT / "tests"), str(pages.ROOT / "src")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    text = table()
    if options.write:
        pages.write("docs/guarantees.md", "faults", text)
    else:
        print(text)


def table() -> str:
    """A row for every fault: its number, what is broken, the exit code, and the line that is said."""
    import faults

    rows = ["| | broken | exit | what is said |", "|---|---|---|---|"]
    for number, title in faults.TITLES.items():
        found = [fault for fault in faults.FAULTS if fault.number == number]
        for fault in found:
            code, said = ask(fault)
            rows.append(f"| {number} | {title}: *{fault.name}* | {code} | {said} |")
        if number in faults.OWN:
            rows.append(f"| {number} | {title} | | {', '.join(f'`{place}`' for place in faults.OWN[number])} |")
    return "\n".join(rows)


def ask(fault: object) -> tuple[int, str]:
    """The exit code and the line that `lemonx expand` ends with on a folder that is broken so; paths left out."""
    import faults
    from lemonx import cli

    assert isinstance(fault, faults.Fault)
    with tempfile.TemporaryDirectory() as name:
        parent = Path(name).resolve()
        with contextlib.redirect_stderr(io.StringIO()) as printed, contextlib.redirect_stdout(io.StringIO()):
            shutil.copytree(good(fault.model), parent / "source")
            fault.damage(parent / "source")
            printed.truncate(0)
            sys.argv = ["lemonx", "expand", str(parent / "source"), str(parent / "out"), "--depth", "4", "--no-verify"]
            sys.argv += fault.options
            code = None
            try:
                cli.main()
            except SystemExit as stop:
                code = stop.code
        said = printed.getvalue().strip("\0\n").removeprefix("lemonx: ").replace(f"{parent}/", "")
    assert isinstance(code, int) and code
    return code, said.replace("|", "\\|").replace("__", "\\_\\_")


_GOOD: dict[str, Path] = {}
_FOLDER = tempfile.TemporaryDirectory()


def good(model: str) -> Path:
    import faults

    if model not in _GOOD:
        _GOOD[model] = faults.save_sharded(model, Path(_FOLDER.name) / model)
    return _GOOD[model]


if __name__ == "__main__":
    main()
