"""Where the CPU time of an expansion goes: reading, random numbers, other arithmetic, writing; and that of load+save.

    python benchmarks/expand_parts.py --gb 1

The model is that of benchmarks/expand.py, in bfloat16, made wider, on one thread. Each part is done alone, by the code
that an expansion runs: `read` reads the source's tensors, `draw` draws as many random numbers as the expansion does,
`make` is the expansion into memory that is used again, and `write` writes as many bytes as the output has, from a block
that is in the cache of the processor. The figures are CPU seconds per gigabyte of the output: the median of the rounds,
their least, and how much of the median the kernel takes.
"""

from __future__ import annotations

import argparse
import math
import shutil
import tempfile
from pathlib import Path
from statistics import median

import numpy as np
import torch
from expand import WIDER, build, run_lemonx, run_load_save, size_of, timed

from lemonx.checkpoints import Checkpoint, CheckpointWriter
from lemonx.execution import noise, row_readers
from lemonx.execution.runner import run_plan
from lemonx.options.declared import Growth
from lemonx.planning.plan import Plan, make_plan
from lemonx.planning.request import asked


class Nowhere:
    """A sink that keeps nothing."""

    def write(self, name: str, start: int, values: torch.Tensor, column: int = 0, /) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=2.0, help="size of the output")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dir", help="where to put the files: several times --gb, removed at the end")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="lemonx-bench-", dir=options.dir) as place:
        folder = Path(place)
        build(folder / "source", "bfloat16", "width", options.gb)
        (folder / "expanded").mkdir()
        run_lemonx(place, "width", 1)  # everything is imported, and every table is made
        (folder / "expanded").rmdir()
        (folder / "out").rename(folder / "expanded")
        with Checkpoint.open(folder / "source") as checkpoint:
            plan = make_plan(checkpoint, asked(Growth(width=WIDER)))
            gigabytes, drawn = size_of(folder / "expanded") / 1e9, draws(plan, checkpoint)
            rounds = [measure(place, plan, checkpoint, drawn) for _ in range(options.rounds)]
    print(f"bfloat16, width: {gigabytes:.2f} GB written, {drawn / 1e9:.2f} G random numbers, {options.rounds} rounds")
    print("CPU seconds per GB    median   least   kernel")
    for name in rounds[0]:
        spent, kernel = ([found[name][key] / gigabytes for found in rounds] for key in ("cpu", "kernel"))
        print(f"{name:<20} {median(spent):>7.2f} {min(spent):>7.2f} {median(kernel):>8.2f}")


def measure(place: str, plan: Plan, checkpoint: Checkpoint, drawn: int) -> dict[str, dict[str, float]]:
    """One round: everything once."""
    folder = Path(place)
    found = {
        "read": timed(place, lambda: read(checkpoint)),
        "draw": timed(place, lambda: draw(drawn)),
        "make": timed(place, lambda: run_plan(plan, checkpoint, Nowhere(), threads=1)),
    }
    entries = [(step.name, step.dtype, step.shape) for step in plan.steps]
    with CheckpointWriter(folder / "out", entries, max_shard_size=10**9, kept=False) as writer:
        found["write"] = timed(place, lambda: write(plan, writer))
    shutil.rmtree(folder / "out")
    for name, whole in (("expansion", run_lemonx), ("load+save", run_load_save)):
        found[name] = whole(place, "width", 1)
        shutil.rmtree(folder / "out")
    return found


def draws(plan: Plan, checkpoint: Checkpoint) -> int:
    """How many random numbers the expansion draws."""
    count, draw_into = 0, noise.draw_into

    def counted(rows: np.ndarray, dtype: torch.dtype, std: float, rng: np.random.Generator) -> None:
        nonlocal count
        count += rows.size if std else 0
        draw_into(rows, dtype, std, rng)

    noise.draw_into = counted
    try:
        run_plan(plan, checkpoint, Nowhere(), threads=1)
    finally:
        noise.draw_into = draw_into
    return count


def read(checkpoint: Checkpoint) -> None:
    for name in checkpoint.tensors:
        for _ in checkpoint.blocks(name):
            pass


def draw(count: int) -> None:
    block = torch.empty(row_readers.BLOCK // 2, dtype=torch.bfloat16)
    for part in range(-(-count // len(block))):
        noise.normal(block[: count - part * len(block)], 0.02, noise.generator(0, "draw", part))


def write(plan: Plan, writer: CheckpointWriter) -> None:
    for step in plan.steps:
        width = math.prod(step.shape[1:])
        rows = min(step.shape[0], max(1, row_readers.BLOCK // 2 // width))
        block = torch.zeros((rows, *step.shape[1:]), dtype=torch.bfloat16)
        for start in range(0, step.shape[0], rows):
            writer.write(step.name, start, block[: step.shape[0] - start])


if __name__ == "__main__":
    main()
