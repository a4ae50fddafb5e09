"""Growth pays: train a small language model, grow it without changing it, and train on beside the alternatives.

    python examples/demo.py [--output FOLDER]      (or: make demo)

The text is the source code of Python's standard library, so it needs no network. It ends with a figure,
FOLDER/demo.png and demo.svg, and with a sentence. Every number in both is measured in this run.
"""

from __future__ import annotations

import argparse
import csv
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Both are read when torch is imported. Some CPUs advertise AMX and refuse it; and models as small as these are
# faster on one core than on several.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
os.environ.setdefault("OMP_NUM_THREADS", "1")

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

import lemonx
from lemonx.planning.summary import flops, parameters

# 2 layers of 32 grow to 4 layers of 64; each size has the best of three learning rates from scratch.
SIZES = ("--width", "64", "--depth", "4")
BEFORE, AFTER = 1500, 600
RATES = {"small": 1e-2, "large": 5e-3}
COLOURS = {"small": "#0062a8", "scratch": "#59616e", "grown": "#b4480a"}
console = Console(highlight=False, width=None if sys.stdout.isatty() else 110)

Curve = list[dict[str, float]]


def config(width: int, layers: int) -> dict[str, Any]:
    heads = width // 16
    return {
        "model_type": "llama", "hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": heads, "intermediate_size": 4 * width, "max_position_embeddings": 64,
        "tie_word_embeddings": True,
    }  # fmt: skip


def recipe(rate: float, steps: int, **more: Any) -> dict[str, Any]:
    """What all runs share: the text, the order of its windows, AdamW, a warm-up and half a cosine to a tenth.

    But for the grown model, which starts without a warm-up, as `lemonx recipe` advises.
    """
    return {
        "task": "causal-lm", "data": {"kind": "stdlib", "length": 64}, "batch_size": 16, "eval_batch_size": 128,
        "warmup": 50, "learning_rate": rate, "min_learning_rate": rate / 10, "steps": steps,
        "eval_every": max(4, steps // 30), "save_every": 0, "optimizer": {"betas": [0.9, 0.98], "weight_decay": 0.05},
        **more,
    }  # fmt: skip


def train(asked: dict[str, Any], output: str) -> Curve:
    """One run of `lemonx train`, in a process of its own; its curve."""
    from lemonx.guards.others import silenced

    with silenced():
        from lemonx_lab.training.recipe import parse_recipe
        from lemonx_lab.training.run import run

        return [row for row in run(parse_recipe(asked), output, force=True).curve if "validation_loss" in row]


def train_all(folder: Path, runs: dict[str, dict[str, Any]]) -> dict[str, Curve]:
    """Run these side by side on two cores, and show how far they are."""
    name, loss = TextColumn("   {task.description:20}"), TextColumn("{task.fields[loss]}")
    columns = (name, BarColumn(), MofNCompleteColumn(), loss)
    with (
        ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool,
        Progress(*columns, console=console, disable=not sys.stdout.isatty()) as bars,
    ):
        jobs: dict[str, Future[Curve]] = {
            name: pool.submit(train, asked, str(folder / name)) for name, asked in runs.items()
        }
        tasks = {name: bars.add_task(name, total=asked["steps"], loss="") for name, asked in runs.items()}
        while not all(job.done() for job in jobs.values()):
            for name, task in tasks.items():
                if rows := last_rows(folder / name / "curve.csv"):
                    bars.update(task, completed=int(rows["step"]), loss=f"loss {float(rows['validation_loss']):.3f}")
            time.sleep(0.3)
        return {name: job.result() for name, job in jobs.items()}


def last_rows(path: Path) -> dict[str, str]:
    """The last row of a curve that is being written, if there is one."""
    rows = list(csv.DictReader(path.read_text().splitlines())) if path.is_file() else []
    return next((row for row in reversed(rows) if row["validation_loss"]), {})


def command(*arguments: str | Path) -> None:
    """A step of the command line, as one would type it."""
    console.print(f"\n[bold cyan]$ lemonx {' '.join(map(str, arguments))}[/bold cyan]")
    sys.stdout.flush()
    subprocess.run([sys.executable, "-m", "lemonx", *map(str, arguments)], check=True)


def step_flops(curve: Curve) -> float:
    return curve[-1]["flops"] / curve[-1]["step"]


def draw(curves: dict[str, Curve], path: Path, *, cost: float, sizes: tuple[int, int]) -> None:
    """Validation loss by steps: the small model up to 0, and what can be done from there."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 5.2), layout="constrained")
    past = [(row["step"] - curves["small"][-1]["step"], row["validation_loss"]) for row in curves["small"]]
    axes.plot(*zip(*past, strict=True), color=COLOURS["small"], alpha=0.45, linewidth=2)
    names = {
        "from scratch": ("scratch", f"large, from scratch\n{sizes[1]:,} parameters"),
        "small, trained on": ("small", f"small, trained on\n{sizes[0]:,} parameters"),
        "grown": ("grown", f"grown by lemonx\n{sizes[1]:,} parameters"),
    }
    end = curves["from scratch"][-1]["step"]
    for place, (key, (colour, name)) in enumerate(names.items()):
        points = [(row["step"], row["validation_loss"]) for row in curves[key]]
        strong = key == "grown"
        axes.plot(*zip(*points, strict=True), color=COLOURS[colour], linewidth=3 if strong else 2)
        axes.plot(*points[-1], "o", color=COLOURS[colour], markersize=5)
        # The names stand below each other behind the last curve.
        axes.text(
            1.05 * end, 0.38 - 0.15 * place, f"{points[-1][1]:.3f}  {name}", transform=axes.get_xaxis_transform(),
            color=COLOURS[colour], va="center", fontsize=10, fontweight="bold" if strong else "normal",
        )  # fmt: skip
    start = curves["small"][-1]["validation_loss"]
    axes.axvline(0, color="#b9bab5", linewidth=1)
    axes.plot(0, start, "o", color=COLOURS["grown"], markersize=8, zorder=5)
    axes.annotate(
        f"expanded here: same function,\nsame loss {start:.3f}", (0, start), (-14, -34), textcoords="offset points",
        ha="right", fontsize=10, color=COLOURS["grown"],
    )  # fmt: skip
    lowest = min(curve[-1]["validation_loss"] for curve in curves.values())
    axes.set_ylim(lowest - 0.06, lowest + 0.7)
    axes.set_xlim(-0.8 * end, 1.6 * end)
    more = end - curves["grown"][-1]["step"]
    axes.set_xlabel(
        "training steps after the small model's training (16 windows of 64 bytes each)\n"
        f"(a step of the large model costs {cost:.1f} times the FLOPs; from scratch it gets {more:.0f} steps more, "
        "the cost of the small model)"
    )
    axes.set_ylabel("validation loss (nats per byte)")
    axes.set_title("A byte-level language model on Python's standard library", loc="left", fontsize=12)
    axes.spines[["top", "right"]].set_visible(False)
    for ending in (".png", ".svg"):
        figure.savefig(path.with_suffix(ending), dpi=130)
    pyplot.close(figure)


def summary(curves: dict[str, Curve], cost: float) -> str:
    """What came out, in one sentence."""
    end = {name: curve[-1]["validation_loss"] for name, curve in curves.items()}
    steps, scratch = curves["grown"][-1]["step"], curves["from scratch"][-1]["step"]
    return (
        f"After {steps:.0f} more steps the grown model is at a loss of {end['grown']:.3f}, the small one at "
        f"{end['small, trained on']:.3f}, and a model of the large size from scratch at {end['from scratch']:.3f} "
        f"after {scratch:.0f} steps, in which it spends about the FLOPs of the small and the grown model together "
        f"(a step of the large model costs {cost:.1f} times one of the small)."
    )


def main(folder: Path, before: int = BEFORE, after: int = AFTER) -> dict[str, Any]:
    """The whole demo below `folder`; `before` and `after` are the steps of the small and of the grown model."""
    started = time.monotonic()
    for name in ("small", "large", "grown", "small, trained on", "from scratch"):
        shutil.rmtree(folder / name, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    small, large = folder / "small", folder / "large"
    console.print(f"[bold]1. Train a small Llama[/bold] on the standard library's source code: {before} steps")
    curves = train_all(folder, {"small": recipe(RATES["small"], before, config=config(32, 2))})
    console.print(f"   validation loss {curves['small'][-1]['validation_loss']:.4f}")
    console.print(
        "\n[bold]2. Grow it[/bold] to twice the width and twice the depth; lemonx proves that nothing changed"
    )
    command("expand", small, large, *SIZES)

    grown = lemonx.plan(small, like=large)
    before_growth, after_growth = flops(grown)
    longer = after + round(before * before_growth / after_growth)
    console.print(f"\n[bold]3. Train on[/bold] for {after} steps, beside the small model and one from scratch")
    curves |= train_all(
        folder,
        {
            "from scratch": recipe(RATES["large"], longer, config=config(64, 4)),
            "grown": recipe(RATES["large"], after, source=str(large), warmup=0),
            "small, trained on": recipe(RATES["small"], after, source=str(small)),
        },
    )
    cost = step_flops(curves["grown"]) / step_flops(curves["small"])
    draw(curves, folder / "demo.png", cost=cost, sizes=parameters(grown))
    said = summary(curves, cost)
    console.print(f"\n{said}", soft_wrap=True)
    console.print(f"The curves are in {folder / 'demo.png'} (and .svg); {time.monotonic() - started:.0f} s.")
    return {"curves": curves, "cost": cost, "said": said}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", type=Path, default=Path("lemonx-demo"), help="where to write (lemonx-demo)")
    main(parser.parse_args().output)
