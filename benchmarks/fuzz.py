"""Fuzzes the readers of headers, indices and configs for a given number of runs, and prints what came of it.

    python benchmarks/fuzz.py                 100000 runs, shared by the readers
    python benchmarks/fuzz.py --runs 1000000 --seed 7
    python benchmarks/fuzz.py --folders 20000     whole folders through the command line: see fuzz_folders.py
    python benchmarks/fuzz.py --case FILE         what a run of --folders wrote down, again

Each reader runs in a process of its own that may take no more than --memory megabytes above what it starts with, so a
blow-up is a failure and not a guess. A run that raises anything but a LemonxError in one line, or takes more than
fuzzing.SECONDS of CPU time, ends with the input that did it, reduced by hypothesis.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import fuzz_folders
import shown

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path[:0] = [str(shown.ROOT / "tests"), str(shown.ROOT / "src")]
BATCH = 2000  # hypothesis remembers what it has tried: a fresh start now and then keeps it small


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--memory", type=int, default=300, help="megabytes that a reader's process may take")
    parser.add_argument("--folders", type=int, metavar="RUNS", help="damage whole folders instead")
    parser.add_argument("--failed", type=Path, default=Path("failed.jsonl"), help="where --folders writes bad cases")
    parser.add_argument("--case", type=Path, metavar="FILE", help="run these cases of --folders again")
    parser.add_argument("--target", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.target:
        print(json.dumps(fuzz(options.target, options.runs, options.seed, options.memory)))
        return
    if options.case:
        return fuzz_folders.again(options.case)
    if options.folders:
        lines = fuzz_folders.fuzz(options.folders, options.seed, options.failed)
        print(*lines, sep="\n")
        return shown.printed("folders", lines)
    readers(options)


def readers(options: argparse.Namespace) -> None:
    """The readers, each in a process of its own."""
    names = ("header", "index", "config")
    lines = [f"{'reader':<8} {'runs':>8} {'read':>8} {'refused':>8} {'messages':>9} {'runs/s':>7} {'anon MB':>8}"]
    print(lines[0])
    total = 0
    for name in names:
        share = str(-(-options.runs // len(names)))
        command = [sys.executable, __file__, "--target", name, "--runs", share, "--seed", str(options.seed)]
        child = subprocess.run([*command, "--memory", str(options.memory)], stdout=subprocess.PIPE, text=True)
        if child.returncode:
            sys.exit(f"{name}: failed")
        row = json.loads(child.stdout)
        total += row["runs"]
        lines.append(
            f"{name:<8} {row['runs']:>8} {row['read']:>8} {row['runs'] - row['read']:>8} {row['messages']:>9} "
            f"{row['runs'] / row['seconds']:>7.0f} {row['grown'] / 1e6:>8.1f}"
        )
        print(lines[-1], flush=True)
    lines.append(f"{total} runs: no exception but LemonxError, no run over {seconds():.0f} s, memory within the limit")
    print(lines[-1])
    shown.printed("fuzz", lines)


def seconds() -> float:
    import fuzzing

    return fuzzing.SECONDS


def fuzz(name: str, runs: int, seed: int, memory: int) -> dict[str, float]:
    """Run one reader and count."""
    import hypothesis

    import fuzzing

    target, seen, read = fuzzing.TARGETS[name], collections.Counter[str](), 0
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "model"
        good = target.prepare(folder)
        assert fuzzing.run(target, folder, good) == "read"
        before = status("RssAnon")
        allowed = status("VmSize") + memory * 10**6
        resource.setrlimit(resource.RLIMIT_AS, (allowed, allowed))
        began, grown, done = time.perf_counter(), 0, 0

        def one(raw: bytes) -> None:
            nonlocal read, done
            said = fuzzing.run(target, folder, raw)
            done += 1
            read += said == "read"
            # A message without the parts that differ from run to run: names, numbers.
            seen[re.sub(r"'[^']*'|\"[^\"]*\"|\d+|\(.*\)|\[.*\]", "_", said)] += 1

        for batch in range(-(-runs // BATCH)):
            count = min(BATCH, runs - done)
            if count <= 0:
                break
            once = hypothesis.given(raw=fuzzing.damaged(target, good))(one)
            once = hypothesis.settings(
                max_examples=count,
                deadline=None,
                database=None,
                phases=[hypothesis.Phase.generate, hypothesis.Phase.shrink],
                suppress_health_check=list(hypothesis.HealthCheck),  # pyright: ignore[reportArgumentType]
            )(once)
            hypothesis.seed(seed * 10**6 + batch)(once)()
            grown = max(grown, status("RssAnon") - before)
    took = time.perf_counter() - began
    return {"runs": done, "read": read, "messages": len(seen), "seconds": took, "grown": grown}


def status(field: str) -> int:
    """A size in bytes from /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


if __name__ == "__main__":
    main()
