"""What does verification cost? Time and memory of `expand` with it and without it, and of `verify` alone.

    python benchmarks/verification.py                a real model of 1 MB, a synthetic Llama grown to 0.5B parameters

Each command is a process of its own, imports and all; figures are medians of --rounds, with their range. Then `verify`
runs beside two busy processes, as on a shared machine, with the threads that it chooses and with one thread. Below: the
algebra (every entry of every tensor against its rule) beside safetensors' own load_file and save_file of the same
target, with one thread each, in turn; the ratio is that of the algebra's speed to theirs.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import expand as bench
import shown
from processes import STORIES, Cost, command

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=1.0, help="the synthetic Llama's expansion, in bf16")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dir", help="where to put the files: several times --gb, removed at the end")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="lemonx-bench-", dir=options.dir) as folder:
        large = Path(folder, "llama")
        bench.build(large, "bfloat16", "both", options.gb)
        lines = [f"{'':<46} {'CPU s':>20} {'wall s':>20} {'anon GB':>20}"]
        lines.append(line("imports of torch and transformers", imports(options.rounds)))
        lines += costs(
            "1 MB (stories260K)", STORIES, Path(folder, "a"), ["--width", "96", "--depth", "8"], options.rounds
        )
        name = f"{options.gb:g} GB in bf16"
        lines += costs(name, large, Path(folder, "b"), ["--width", "2x"], options.rounds)
        lines += costs(f"{name}, rounded", large, Path(folder, "c"), ["--width", "1.5x"], options.rounds)
        lines += shared(large, Path(folder, "b"), options.rounds)
        lines += ["", algebra(large, Path(folder, "b"), options.rounds)]
    print("\n".join(lines))
    shown.printed("cost", lines)


def costs(name: str, source: Path, output: Path, sizes: list[str], rounds: int) -> list[str]:
    """A line for each command; the fourth is what verification adds."""
    expand = ["expand", str(source), str(output), *sizes, "--force"]
    commands = {
        "expand --no-verify": (*expand, "--no-verify"),
        "expand": tuple(expand),
        "verify": ("verify", str(source), str(output)),
    }
    found: dict[str, list[Cost]] = {what: [] for what in commands}
    for _ in range(rounds):  # in turn, so that a busy machine slows down all alike
        for what, words in commands.items():
            found[what].append(command("-m", "lemonx", *words))
    added = [
        (after[0] - before[0], after[1] - before[1], after[2])
        for before, after in zip(found["expand --no-verify"], found["expand"], strict=True)
    ]
    return [line(f"{name}: {what}", rows) for what, rows in {**found, "verification adds": added}.items()]


def shared(source: Path, output: Path, rounds: int) -> list[str]:
    """`verify` beside two busy processes, with lemonx's choice of threads and with one."""
    found: dict[str, list[Cost]] = {"verify": [], "verify, one thread": []}
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        for _ in range(rounds):
            for what, threads in zip(found, ({}, {"OMP_NUM_THREADS": "1"}), strict=True):
                found[what].append(command("-m", "lemonx", "verify", str(source), str(output), **threads))
    finally:
        for process in busy:
            process.kill()
    return [line(f"beside 2 busy processes: {what}", rows) for what, rows in found.items()]


def line(name: str, rows: list[Cost]) -> str:
    """The median of every figure, and how far it ranges."""
    told = [
        f"{statistics.median(column):.{digits}f} ({min(column):.{digits}f} to {max(column):.{digits}f})"
        for column, digits in zip(zip(*rows, strict=True), (1, 1, 2), strict=True)
    ]
    return f"{name:<46} " + " ".join(f"{text:>20}" for text in told)


def imports(rounds: int) -> list[Cost]:
    """What any program that loads a model pays before it begins."""
    return [
        command("-c", "import torch, transformers; transformers.AutoModel, transformers.LlamaModel")
        for _ in range(rounds)
    ]


def algebra(source: Path, target: Path, rounds: int) -> str:
    """The speed of the algebra over that of load and save."""
    import torch
    from safetensors.torch import load_file, save_file

    from lemonx.checkpoints import Checkpoint
    from lemonx.verification.algebra import check_algebra
    from lemonx.verification.certificate import read_certificate
    from lemonx.workflows.planning import plan_again

    torch.set_num_threads(1)
    ratios = list[float]()
    with Checkpoint.open(source) as small, Checkpoint.open(target) as large:
        said = read_certificate(large)
        assert said is not None
        plan = plan_again(small, large, said)
        for _ in range(rounds):
            began = time.perf_counter()
            for file in sorted(target.glob("*.safetensors")):
                save_file(load_file(file), target.parent / "copy.safetensors")
            copied, began = time.perf_counter() - began, time.perf_counter()
            assert check_algebra(plan, small, large, threads=1).passed
            ratios.append(copied / (time.perf_counter() - began))
    return f"algebra over load+save: median {statistics.median(ratios):.0%}, best {max(ratios):.0%} of {rounds} rounds"


if __name__ == "__main__":
    main()
