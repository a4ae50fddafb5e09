"""Random configs of every family and class, with flags that are not at their default: exact, or refused by the check.

    python benchmarks/configs.py                        3500 cases
    python benchmarks/configs.py --runs 300 --first 5000 --jobs 2
    python benchmarks/configs.py --case 1234            one case again, with all that it takes to repeat it
    python benchmarks/configs.py --record runs.jsonl    keep a line for every case, and go on from there next time

A case is a model of a random class with a random config (tests/random_configs.py), expanded to random sizes with
verification on, and then compared with its source by inputs and a comparison of their own (tests/random_outputs.py). It
ends exact, or refused before anything ran, with advice that holds when it is followed; everything else is a fault, and
makes this command fail. Cases that transformers itself cannot build or run are not counted.
"""

from __future__ import annotations

import argparse
import collections
import gc
import json
import os
import re
import resource
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import records
import shown

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path[:0] = [str(shown.ROOT / "tests"), str(shown.ROOT / "src")]
# Bytes of address space for one process: a config that asks for far too much is one failed case.
MEMORY = 12 * 10**9
# What the messages of refusals are about, by words in them: the first that fits.
REASONS = {
    "parts of a model that no table has yet": r"lemonx does not (know|support)|"
    r"square images|sinusoidal|without experts",
    "a config.json that does not say all, or contradicts itself": r"has no field|does not name the class|save the "
    r"(whole )?model|BadCheckpoint|partial_rotary_factor",
    "a module that would come or go": r"would (gain|lose) (?!layers)",
    "blocks that cannot be added": r"share their weights|changes the shape|normalises its input|"
    r"small-gains|small gains|"
    r"divides what|takes? turns|depends on a layer|cannot grow deeper|sets of weights",
    "a size that this class does not have": r"is not a size of this model|has no size that|cannot grow",
    "sizes that do not fit together, or are not larger": r"not a whole number|shrink|has several sizes|lose layers|"
    r"router cannot pick|cannot build a model of these sizes|nothing would change|"
    r"smaller than the source|must be num_heads|"
    r"transformers refuses|use a whole number|heads do not fit",
    "heads that cannot take this width": r"turn|rotary|ALiBi|clipped|query|key",
    "experts that cannot be chosen alike": r"router picks",
    "no exact growth at this width": r"qk_layernorm has heads|depthwise|"
    r"passes a nonlinearity|passes through|is not a multiple|choose a multiple|"
    r"the model outputs|change of basis|new entries must be|grow differently|two different bases|"
    r"LayerNorm without|new MLP neurons|zero to zero|in pairs|cannot widen|sits between|tied to the embedding",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3500)
    parser.add_argument("--first", type=int, default=0, help="the number of the first case")
    parser.add_argument("--family", help="cases of this model type only")
    parser.add_argument("--dtype", action="append", help="cases that are stored in this dtype only; may be repeated")
    parser.add_argument("--jobs", type=int, default=1, help="processes at once")
    parser.add_argument("--case", type=int, help="repeat this case")
    parser.add_argument("--record", type=Path, help="a file of what every case came to; only faults in it run again")
    parser.add_argument("--until", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case is not None:
        sys.exit(repeat(options.case, options.family))
    if options.until is not None:
        done = {row["case"] for row in records.read(options.record, ("fault",))}
        seeds = [n for n in range(options.first, options.until, options.jobs) if n not in done]
        work(seeds, options.family, options.dtype)
        return
    rows = [*records.read(options.record, ("fault",)), *collected(options)]
    lines = table(rows)
    print("\n".join(lines))
    faults = [row for row in rows if row["kind"] == "fault"]
    shown.printed("configs", lines)
    sys.exit(1 if faults else 0)


def repeat(case: int, family: str | None) -> int:
    from random_runs import run_case, told

    _quiet()
    outcome = run_case(case, family)
    print(told(outcome))
    print(f"    {outcome.views} views, off by {outcome.difference:.1e}")
    return 0 if outcome.good else 1


def collected(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """What every case came to; each of several processes takes every so manieth. Faults are told as they are found."""
    until = str(options.first + options.runs)
    command = [sys.executable, __file__, "--until", until, "--jobs", str(options.jobs)]
    command += ["--family", options.family] if options.family else []
    command += [f"--dtype={dtype}" for dtype in options.dtype or ()]
    command += ["--record", str(options.record)] if options.record else []
    children = [
        subprocess.Popen([*command, "--first", str(options.first + job)], stdout=subprocess.PIPE, text=True)
        for job in range(options.jobs)
    ]
    for child in children:
        assert child.stdout is not None
        for line in child.stdout:
            row = json.loads(line)
            if options.record:
                records.add(options.record, row)
            if row["kind"] == "fault":
                print(row["told"], flush=True)
            yield row
        if child.wait():
            sys.exit(f"a process ended with {child.returncode}")


def work(seeds: list[int], family: str | None, dtypes: list[str] | None) -> None:
    """Run cases in this process, and print a line of JSON for each."""
    from random_configs import draw
    from random_runs import run_case, settings, told

    _quiet()
    code = records.code()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    gc.collect()
    gc.freeze()  # what is imported stays: looking at it again takes longer than a case
    for seed in seeds:
        if dtypes and draw(seed, family).stored["dtype"] not in dtypes:
            continue
        before = time.process_time()
        outcome = run_case(seed, family)
        row = {
            "case": seed,
            "code": code,
            "kind": outcome.kind,
            "family": outcome.case.model_type,
            "class": outcome.case.class_name,
            "said": outcome.said,
            "told": told(outcome) if outcome.kind == "fault" else "",
            "views": outcome.views,
            "settings": settings(outcome.case),
            "seconds": time.process_time() - before,
        }
        print(json.dumps(row), flush=True)


def _quiet() -> None:
    import torch
    from transformers.utils import logging

    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    warnings.filterwarnings("ignore")


def table(rows: list[dict[str, Any]]) -> list[str]:
    """How many cases ended how."""
    counted = [row for row in rows if row["kind"] != "unusable"]
    kinds = collections.Counter(row["kind"] for row in counted)
    refused = collections.Counter(reason(row["said"]) for row in counted if row["kind"] == "refused")
    numbers = [row["case"] for row in rows] or [0]
    families, classes = ({row[name] for row in counted} for name in ("family", "class"))
    lines = [f"{len(counted):>6}  cases of {len(families)} families and {len(classes)} classes, with numbers from "
             f"{min(numbers)} to {max(numbers)}", *_varied(counted)]  # fmt: skip
    lines += [f"{kinds[kind]:>6}  {text}" for kind, text in KEPT.items()]
    lines.append(f"{kinds['refused']:>6}  refused by the check, before anything ran")
    lines += [f"{count:>12}  {why}" for why, count in refused.most_common()]
    lines.append(f"{kinds['rounded away']:>6}  not written: roundings in bf16 or fp16 leave nothing of the outputs; "
                 "right in float32, as advised")  # fmt: skip
    lines.append(f"{kinds['fault']:>6}  faults")
    seconds = sum(row["seconds"] for row in rows) / max(1, len(rows))
    lines.append(f"{len(rows) - len(counted)} more that transformers itself cannot build or run; {seconds:.2f} CPU "
                 "seconds a case")  # fmt: skip
    return lines + records.earlier(rows)


KEPT = {
    "exact": "exact: off by at most 1e-10 in float64",
    "rounded": "exact but for roundings of the stored dtype",
    "amplified": "exact but for roundings, which the model amplifies more than one of the source's own weights",
    "up to eps": "exact up to eps, as stated: Post-LN depth",
}


def _varied(counted: list[dict[str, Any]]) -> Iterator[str]:
    """What the cases vary, and how evenly the families are kept."""
    fields = {(row["family"], name) for row in counted for name in row["settings"]}
    each = sum(len(row["settings"]) for row in counted) / max(1, len(counted))
    yield f"{len(fields):>6}  fields of their configs, sizes apart, not at their default: {each:.1f} at once on average"
    kept = collections.Counter(row["family"] for row in counted if row["kind"] in KEPT)
    least, family = min(((kept[row["family"]], row["family"]) for row in counted), default=(0, ""))
    views = sum(row["views"] for row in counted)
    yield f"{views:>6}  inputs compared"
    share = f"{sum(kept.values()) / max(1, len(counted)):.0%}"
    yield f"{share:>6}  of the cases grew; of every family at least {least} ({family})"


def reason(said: str) -> str:
    return next((kind for kind, pattern in REASONS.items() if re.search(pattern, said)), f"other: {said[:60]}")


if __name__ == "__main__":
    main()
