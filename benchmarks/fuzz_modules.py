"""Modules composed at random, grown by `lemonx.grow`: exact, or refused; a false claim makes this command fail.

    python benchmarks/fuzz_modules.py                       10000 cases
    python benchmarks/fuzz_modules.py --runs 500 --first 20000
    python benchmarks/fuzz_modules.py --case 1234           one case again, and what it is made of
    python benchmarks/fuzz_modules.py --write               put the counts into docs/any-model.md

A case is a module of random operations at two sizes (tests/random_modules.py), some of which cannot be grown. What is
claimed is judged by other inputs, of other lengths, in float64.
"""

from __future__ import annotations

import argparse
import collections
import os
import sys
import time
import warnings

import pages

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path[:0] = [str(pages.ROOT / "tests"), str(pages.ROOT / "src")]


KINDS = {
    "exact": "grown, and the same function on other inputs",
    "refused": "refused, with the reason",
    "false": "claimed, and not the same",
    "broken": "an error that is no refusal",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, help="the number of the first case")
    parser.add_argument("--case", type=int, help="repeat this case")
    parser.add_argument("--write", action="store_true", help="put the counts into docs/any-model.md")
    options = parser.parse_args()
    warnings.simplefilter("ignore")

    import torch

    import lemonx
    from random_modules import run_case

    torch.set_num_threads(1)
    first, runs = (options.first, options.runs) if options.case is None else (options.case, 1)
    kinds, refusals = collections.Counter[str](), collections.Counter[str]()
    began = time.monotonic()
    for number in range(first, first + runs):
        outcome = run_case(number, lemonx.grow)
        kinds[outcome.kind] += 1
        if outcome.kind == "refused":
            refusals["".join("#" if c.isdigit() else c for c in outcome.why)[:90]] += 1
        if outcome.kind in ("false", "broken") or options.case is not None:
            print(f"case {number}: {outcome.kind} {outcome.why}\n  {outcome.case}")
    print(f"{runs} cases in {time.monotonic() - began:.0f} s")
    counts = [f"{runs:6} cases", *(f"{kinds[kind]:6} {said}" for kind, said in KINDS.items())]
    print("\n".join(counts))
    if options.write:
        pages.write_printed("docs/any-model.md", "modules", counts)
    for why, count in refusals.most_common(12):
        print(f"{count:6} {why}")
    sys.exit(1 if kinds["false"] or kinds["broken"] else 0)


if __name__ == "__main__":
    main()
