"""The example in the README: commands on a real model (tests/data/stories260K), and what they print.

python docs/make/readme.py            print it
python docs/make/readme.py --write    put it into README.md
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pages

MODEL = pages.ROOT / "tests" / "data" / "stories260K"
COMMANDS = ("plan stories260K --width 96 --depth 8", "expand stories260K large --width 96 --depth 8")
# As wide as a page of code on the web shows without a scroll bar.
COLUMNS = "100"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put it into README.md")
    lines = example()
    print("\n".join(lines))
    if parser.parse_args().write:
        pages.write("example", "\n".join(["```", *lines, "```"]))


def example() -> list[str]:
    """The commands, each behind a `$`, and their output; run in a folder of its own."""
    lines = list[str]()
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(MODEL, Path(folder, "stories260K"))
        for command in COMMANDS:
            done = subprocess.run(
                [sys.executable, "-m", "lemonx", *shlex.split(command)],
                cwd=folder,
                env=os.environ | {"COLUMNS": COLUMNS, "HF_HUB_OFFLINE": "1"},
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            )
            shown = done.stdout.replace(f"{Path(folder).resolve()}/", "")
            lines += [f"$ lemonx {command}", *(line.rstrip() for line in shown.splitlines()), ""]
    return lines[:-1]


if __name__ == "__main__":
    main()
