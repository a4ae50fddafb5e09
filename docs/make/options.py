"""The options in docs/api.md: what Python, the command line, recipes and `--from` take, from their declaration.

python docs/make/options.py            print the tables
python docs/make/options.py --write    put them into docs/api.md
"""

from __future__ import annotations

import argparse

import pages

from lemonx.cli.options import flag
from lemonx.options.declared import Growth, Help, Options, Planning, Reading, Verifying, Writing, declared

# The classes of options, and the calls that take them.
CALLS: dict[type[Options], str] = {
    Growth: "`plan`, `expand`, `grow_in_place`, a recipe's `expand` and `--from`",
    Reading: "`plan`, `expand` and `verify`",
    Writing: "`expand`",
    Planning: "`plan`",
    Verifying: "`verify`",
}


def table() -> str:
    """The tables of all options, one for each class, with what no class before it has."""
    parts, seen = list[str](), set[str]()
    for options, calls in CALLS.items():
        new = {name: text for name, (_, text) in declared(options).items() if text is not None and name not in seen}
        seen |= new.keys()
        parts += [f"Of {calls}:", "", "| Python | command line | |", "|---|---|---|"]
        parts += [*(row(name, text) for name, text in new.items()), ""]
    return "\n".join(parts).rstrip()


def row(name: str, text: Help) -> str:
    """One option of a table."""
    return f"| `{name}` | `{flag(name)}` | {text.text.replace('|', ' or ')} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put them into docs/api.md")
    print(table())
    if parser.parse_args().write:
        pages.write("options", table())


if __name__ == "__main__":
    main()
