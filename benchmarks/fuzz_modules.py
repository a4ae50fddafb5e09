"""Modules composed at random, grown by `lemonx.grow`: exact, or refused; a false claim makes this command fail.

    python benchmarks/fuzz_modules.py                       10000 cases
    python benchmarks/fuzz_modules.py --runs 500 --first 20000
    python benchmarks/fuzz_modules.py --case 1234           one case again, and what it is made of
    python benchmarks/fuzz_modules.py --record runs.jsonl   keep a line for every case, and go on from there next time

A case is a module of random operations at two sizes (tests/random_modules.py), some of which cannot be grown. What is
claimed is judged by other inputs, of other lengths, in float64.
"""

from __future__ import annotations

import argparse
import collections
import gc
import os
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import records
import shown

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path[:0] = [str(shown.ROOT / "tests"), str(shown.ROOT / "src")]


KINDS = {
    "exact": "grown, and the same function on other inputs",
    "refused": "refused, with the reason",
    "rejected": "let pass by the check, and rejected by the rehearsal",
    "false": "claimed, and not the same",
    "broken": "an error that is no refusal",
}
FAULTS = ("rejected", "false", "broken")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, help="the number of the first case")
    parser.add_argument("--case", type=int, help="repeat this case")
    parser.add_argument("--record", type=Path, help="a file of what every case came to; only faults in it run again")
    options = parser.parse_args()
    wanted = range(options.first, options.first + options.runs)
    if options.case is not None:
        wanted = range(options.case, options.case + 1)
    known = [row for row in records.read(options.record, FAULTS) if row["case"] in wanted]
    done = {row["case"] for row in known}
    rows = [*known, *collected([number for number in wanted if number not in done], options)]
    kinds = collections.Counter(row["kind"] for row in rows)
    counts = [f"{len(rows):6} cases", *(f"{kinds[kind]:6} {said}" for kind, said in KINDS.items())]
    counts += records.earlier(rows)
    print("\n".join(counts))
    print(f"{sum(row['seconds'] for row in rows) / max(1, len(rows)):.3f} CPU seconds a case")
    shown.printed("modules", counts)
    reasons = ("".join("#" if c.isdigit() else c for c in row["why"])[:90] for row in rows if row["kind"] == "refused")
    for why, count in collections.Counter(reasons).most_common(12):
        print(f"{count:6} {why}")
    sys.exit(1 if any(kinds[kind] for kind in FAULTS) else 0)


def collected(numbers: list[int], options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """What every case came to, written down before the next begins. Faults are told as they are found."""
    import torch

    import lemonx
    from random_modules import run_case

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    code = records.code()
    gc.collect()
    gc.freeze()  # what is imported stays: looking at it again takes longer than a case
    for number in numbers:
        before = time.process_time()
        outcome = run_case(number, lemonx.grow)
        row = {
            "case": number,
            "code": code,
            "kind": outcome.kind,
            "why": outcome.why,
            "seconds": time.process_time() - before,
        }
        if options.record:
            records.add(options.record, row)
        if outcome.kind in FAULTS or options.case is not None:
            print(f"case {number}: {outcome.kind} {outcome.why}\n  {outcome.case}", flush=True)
        yield row


if __name__ == "__main__":
    main()
