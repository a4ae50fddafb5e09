"""Writes the lists of faults and attacks in docs/guarantees.md from the tables that the tests read.

Each row is made by breaking a small real checkpoint (tests/faults.py), or by putting an attack beside it
(tests/attacks_of_size.py), and running the command: what is said is what it says.

    python docs/make/guarantees.py            print the lists
    python docs/make/guarantees.py --write    put them into docs/guarantees.md, between their markers
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pages

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path[:0] = [str(pages.ROOT / "tests"), str(pages.ROOT / "src")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    for name, text in (("faults", table()), ("attacks", attacks_table())):
        if options.write:
            pages.write(name, text)
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

    assert isinstance(fault, faults.Fault)
    with folder_with(fault.model) as parent:
        fault.damage(parent / "source")
        code, _, said = said_by(
            "expand", parent / "source", parent / "out", "--depth", 4, "--no-verify", *fault.options
        )
        said = said.strip().removeprefix("lemonx: ").replace(f"{parent}/", "")
    assert code
    return code, said.replace("|", "\\|").replace("__", "\\_\\_")


def attacks_table() -> str:
    """For every kind of attack a table of them: what was done, the exit code, and the line that is said."""
    import attacks
    from attacks_of_size import ATTACKS

    rows = list[str]()
    for kind in dict.fromkeys(attack.kind for attack in ATTACKS):
        rows += ["", f"{kind[0].upper()}{kind[1:]}:", "", "| attack | exit | what is said |", "|---|---|---|"]
        for attack in (attack for attack in ATTACKS if attack.kind == kind):
            with folder_with("llama-tied") as parent:
                code, out, said = said_by(*attack.prepare(parent))
                rows.append(attacks.row(attack, code, out if attack.writes else said, parent))
    return "\n".join(rows[1:])


@contextlib.contextmanager
def folder_with(model: str) -> Iterator[Path]:
    """A folder with a sound checkpoint, `source`, in it."""
    with tempfile.TemporaryDirectory() as name:
        parent = Path(name).resolve()
        shutil.copytree(good(model), parent / "source")
        yield parent


def said_by(*arguments: object) -> tuple[int, str, str]:
    """The exit code of a command, and what it prints on either stream."""
    from lemonx import cli

    os.environ["COLUMNS"] = "9999"
    sys.argv = ["lemonx", *map(str, arguments)]
    code = None
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            cli.main()
        except SystemExit as stop:
            code = stop.code or 0
    assert isinstance(code, int)
    return code, out.getvalue(), err.getvalue()


_GOOD: dict[str, Path] = {}
_FOLDER = tempfile.TemporaryDirectory()


def good(model: str) -> Path:
    import faults

    if model not in _GOOD:
        _GOOD[model] = faults.save_sharded(model, Path(_FOLDER.name) / model)
    return _GOOD[model]


if __name__ == "__main__":
    main()
