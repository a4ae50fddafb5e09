"""Changes entries of every tensor of an expansion, and every field of its config.json, and counts what is noticed.

    python benchmarks/tampering.py --only gpt2-lm --entries 20

A change that moves the outputs and that verification lets pass is printed, and the command fails.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from dataclasses import astuple, dataclass
from pathlib import Path

import shown

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path[:0] = [str(shown.ROOT / "tests"), str(shown.ROOT / "src")]

import torch  # noqa: E402
from transformers.utils import logging  # noqa: E402

import tampering  # noqa: E402
from tampering import Case, Grown  # noqa: E402

# Of the changes that are caught, the effect of one in so many is measured: it takes longer than catching them.
ENTRIES, FIELDS = 10, 4
HEAD = [
    f"{'':<22} {'':>7} {'------------- entries of tensors -------------':>47}   {'--- fields of config.json ---':>29}",
    f"{'family':<22} {'tensors':>7} {'changed':>7} {'caught':>7} {'effect':>8} {'passed':>7} {'moved':>7} {'limit':>6}"
    f"   {'changed':>7} {'caught':>7} {'effect':>7} {'missed':>6}",
]


@dataclass
class Count:
    """What came of one family. `moved`: by how much all that was let pass, together, moves the outputs."""

    tensors: int = 0
    entries: int = 0
    caught: int = 0
    tried: int = 0
    effect: int = 0
    passed: int = 0
    fields: int = 0
    fields_caught: int = 0
    fields_tried: int = 0
    fields_effect: int = 0
    missed: int = 0
    moved: float = 0.0
    allowed: float = 0.0

    def line(self, name: str) -> str:
        tried, fields = f"{self.effect}/{self.tried}", f"{self.fields_effect}/{self.fields_tried}"
        return (
            f"{name:<22} {self.tensors:>7} {self.entries:>7} {self.caught:>7} {tried:>8} {self.passed:>7} "
            f"{self.moved:>7.0e} {self.allowed:>6.0e}   {self.fields:>7} {self.fields_caught:>7} {fields:>7} "
            f"{self.missed:>6}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entries", type=int, default=3, help="entries of a tensor that are changed at random")
    parser.add_argument("--only", nargs="*", help="these families")
    options = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    cases = [case for case in tampering.CASES + tampering.MORE if not options.only or str(case) in options.only]
    lines, found, failed = [*HEAD], [], False
    print("\n".join(lines))
    for case in cases:
        with tempfile.TemporaryDirectory() as folder, tampering.grown(case, Path(folder)) as made:
            count = Count()
            failed |= not entries(case, made, count, options.entries)
            failed |= not fields(case, made, count)
        found.append(count)
        lines.append(count.line(str(case)))
        print(lines[-1], flush=True)
    lines += summary(found)
    print("\n".join(lines[-2:]))
    if failed:
        sys.exit("verification lets pass what changes the function")
    shown.printed("tampering", lines)


def entries(case: Case, made: Grown, count: Count, each: int) -> bool:
    """Change entries of every tensor; whether none that changes the function was let pass."""
    assert made.algebra().passed, f"{case}: the honest target is not accepted"
    caught, free = tampering.sorted_out(made, each)
    count.tensors, count.entries = len(made.target.tensors), len(caught) + len(free)
    count.caught, count.passed, count.allowed = len(caught), len(free), made.tolerance
    for change in caught[::ENTRIES]:
        with tampering.tampered(change):
            count.tried += 1
            count.effect += made.effect() > made.tolerance
    with tampering.all_of(free):
        count.moved = made.effect()
    if count.moved <= made.tolerance:
        return True
    for change in free:
        with tampering.tampered(change):
            if (effect := made.effect()) > made.tolerance:
                print(f"  {case}: {change} is let pass, and moves the outputs by {effect:.1e}")
    return False


def fields(case: Case, made: Grown, count: Count) -> bool:
    """Change every field of config.json; whether all that changes the function is noticed."""
    assert not tampering.config_is_caught(made), f"{case}: the honest config.json is not accepted"
    for number, (path, other) in enumerate(tampering.fields(made)):
        count.fields += 1
        with tampering.other_config(made.folder, path, other):
            caught = tampering.config_is_caught(made)
            count.fields_caught += caught
            if caught and number % FIELDS:
                continue
            effect = made.effect()
        count.fields_tried += caught
        count.fields_effect += caught and effect > made.tolerance
        if not caught and effect > made.tolerance:
            count.missed += 1
            print(f"  {case}: {'.'.join(path)} = {other!r} is let pass, and moves the outputs by {effect:.1e}")
    return not count.missed


def summary(found: list[Count]) -> list[str]:
    total = Count(*(sum(values) for values in zip(*map(astuple, found), strict=True)))
    return [
        f"{len(found)} expansions, {total.tensors} tensors, {total.entries} entries: {total.caught} caught, and the "
        f"{total.passed} let pass stay within the limit",
        f"{total.fields} fields of config.json: {total.fields_caught} caught, and of the other "
        f"{total.fields - total.fields_caught} {total.missed} have an effect",
    ]


if __name__ == "__main__":
    main()
