"""The whole job on a laptop: train a small ViT on handwritten digits, expand it, check it, train on.

    python examples/digits.py [--output FOLDER]      (or: make demo)

It needs no network: the digits come with scikit-learn. The steps in the middle are the real command line.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Both are read when torch is imported. Some CPUs advertise AMX and refuse it; and models as small as these are
# faster on one core than on several.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from transformers import ViTConfig, ViTForImageClassification
from transformers.utils import logging

import lemonx
from lemonx.verification.float64 import Float64

SIZES = ("--width", "72", "--depth", "6")
# The paper's ViTs: this maximum learning rate, and 130 epochs after the expansion where 300 are usual.
RATE, EPOCHS, MORE = 1e-3, 20, 9
WARMUP, BATCH = 0.1, 64
# A pipe has no width of its own, and the tables want about this much.
if not sys.stdout.isatty():
    os.environ.setdefault("COLUMNS", "130")
console = Console(highlight=False)


class Data(NamedTuple):
    images: torch.Tensor
    labels: torch.Tensor


class Score(NamedTuple):
    """A model on some images."""

    accuracy: float
    loss: float


def digits() -> tuple[Data, Data]:
    """1797 images of 8 x 8 pixels, scaled to -1..1: three fifths to train on, two fifths to validate."""
    bunch: Any = load_digits()
    images = torch.tensor(bunch.images, dtype=torch.float32)[:, None] / 8 - 1
    labels = torch.tensor(bunch.target)
    train, valid = train_test_split(range(len(labels)), test_size=0.4, random_state=0, stratify=bunch.target)
    return Data(images[train], labels[train]), Data(images[valid], labels[valid])


def small_vit() -> ViTForImageClassification:
    torch.manual_seed(0)
    return ViTForImageClassification(
        ViTConfig(
            image_size=8, patch_size=2, num_channels=1, num_labels=10, hidden_size=48, num_hidden_layers=3,
            num_attention_heads=4, intermediate_size=96, layer_norm_eps=1e-6,
            id2label={i: str(i) for i in range(10)}, label2id={str(i): i for i in range(10)},
        )
    )  # fmt: skip


def train(model: ViTForImageClassification, data: Data, epochs: int) -> None:
    """AdamW; the learning rate warms up to RATE and then follows a cosine to 1 % of it."""
    order = torch.Generator().manual_seed(0)
    optimiser = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.05)
    steps = epochs * math.ceil(len(data.labels) / BATCH)

    def rate(step: int) -> float:
        warm = max(1, int(WARMUP * steps))
        done = (step - warm) / max(1, steps - warm)
        return (step + 1) / warm if step < warm else 0.01 + 0.495 * (1 + math.cos(math.pi * done))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, rate)
    model.train()
    for _ in range(epochs):
        for batch in torch.randperm(len(data.labels), generator=order).split(BATCH):
            optimiser.zero_grad()
            loss = model(pixel_values=data.images[batch], labels=data.labels[batch]).loss
            loss.backward()
            optimiser.step()
            schedule.step()
    model.eval()


@torch.no_grad()
def logits(model: ViTForImageClassification, data: Data) -> torch.Tensor:
    return model(pixel_values=data.images.to(model.dtype)).logits


def score(model: ViTForImageClassification, data: Data) -> Score:
    out = logits(model, data)
    right = (out.argmax(1) == data.labels).double().mean()
    return Score(float(right), float(torch.nn.functional.cross_entropy(out, data.labels)))


def difference(first: ViTForImageClassification, second: ViTForImageClassification, data: Data) -> float:
    """The largest difference between the logits of two models."""
    return float((logits(first, data) - logits(second, data)).abs().max())


def loaded(folder: Path, dtype: torch.dtype = torch.float32) -> ViTForImageClassification:
    return ViTForImageClassification.from_pretrained(folder, dtype=dtype).eval()


def apart(folder: Path) -> float:
    """How much the fan-in of copied FFN neurons differs from that of the neurons they were copied from."""
    # In the first block, neurons 96 to 143 began as copies of neurons 0 to 47; the old coordinates are the first 48.
    weight = load_file(folder / "model.safetensors")["vit.encoder.layer.0.intermediate.dense.weight"][:, :48]
    return float((weight[96:] - weight[:48]).norm() / weight[:48].norm())


def section(number: int, title: str, *lines: str) -> None:
    console.print(f"\n[bold]{number}. {title}[/bold]")
    for line in lines:
        console.print(f"   {line}")


def run(*arguments: str | Path) -> None:
    """A step of the command line, as one would type it."""
    console.print(f"\n[bold cyan]$ lemonx {' '.join(map(str, arguments))}[/bold cyan]")
    sys.stdout.flush()
    command = shutil.which("lemonx", path=str(Path(sys.executable).parent))
    if command is None:
        raise SystemExit(f"no lemonx beside {sys.executable}: install it with `{sys.executable} -m pip install -e .`")
    subprocess.run([command, *map(str, arguments)], check=True)


def compared(rows: list[tuple[str, ...]], *heads: str) -> None:
    table = Table("", *heads, box=None, padding=(0, 3, 0, 3))
    for row in rows:
        table.add_row(*row)
    console.print(table)


def main(folder: Path, epochs: int = EPOCHS, more: int = MORE) -> dict[str, float]:
    """Runs all six steps below `folder`; `epochs` and `more` are the epochs before and after the expansion."""
    started = time.monotonic()
    logging.disable_progress_bar()
    small, large, trained = folder / "small", folder / "large", folder / "trained"
    for path in (small, large, trained):
        shutil.rmtree(path, ignore_errors=True)
    training, valid = digits()

    section(
        1, "Train a small model",
        "a Vision Transformer (transformers' ViTForImageClassification): 48 wide, 3 blocks, 4 heads",
        f"{len(training.labels)} images of digits to train on, {len(valid.labels)} to validate; {epochs} epochs",
    )  # fmt: skip
    source = small_vit()
    train(source, training, epochs)
    source.save_pretrained(small)
    fitted, before = score(source, training), score(source, valid)
    console.print(f"   validation accuracy {before.accuracy:.2%}, loss {before.loss:.4f}; saved in {small}")

    section(
        2, "Plan",
        "72 is not a multiple of 48, and there are to be twice as many blocks. Heads and FFN follow the width.",
        "the plan says what becomes of every tensor; nothing but the headers of the file is read",
    )  # fmt: skip
    run("plan", small, *SIZES)

    section(3, "Expand", "writes the larger checkpoint; before it appears, it is loaded from disk and compared")
    run("expand", small, large, *SIZES)

    section(
        4, "Verify again, by hand",
        "twins are copies that no weight tells apart: they would stay copies for ever. There must be none.",
    )  # fmt: skip
    run("verify", small, large)

    section(5, "See for yourself", "both folders through from_pretrained, on the validation images")
    target = loaded(large)
    after = score(target, valid)
    single = difference(loaded(small), target, valid)
    with Float64():
        exact = loaded(small, torch.float64)
        double = difference(exact, loaded(large, torch.float64), valid)
        in_memory = difference(exact, lemonx.expand(exact, width=72, depth=6, verify=False), valid)
    parameters = [sum(p.numel() for p in model.parameters()) for model in (source, target)]
    compared(
        [
            ("parameters", f"{parameters[0]:,}", f"{parameters[1]:,}"),
            ("validation accuracy", f"{before.accuracy:.2%}", f"{after.accuracy:.2%}"),
            ("validation loss", f"{before.loss:.6f}", f"{after.loss:.6f}"),
        ],
        "small", "large",
    )  # fmt: skip
    console.print("   largest difference of any logit:")
    console.print(f"   {single:.1e} if both models run in float32, whose sums round differently in a larger model")
    console.print(f"   {double:.1e} if both run in float64: what remains is that the weights on disk are float32")
    console.print(
        f"   {in_memory:.1e} if the weights are float64 too: lemonx.expand(model, width=72, depth=6) in Python"
    )

    section(
        6, "Train on",
        f"the paper's recipe: the maximum learning rate of training from scratch, decayed faster ({more} epochs, "
        f"not {epochs});",
        "beside it, for as many epochs: the small model trained on, and a model of the large size from scratch",
    )  # fmt: skip
    torch.manual_seed(0)
    scratch = ViTForImageClassification(target.config)
    for model in (target, source, scratch):
        train(model, training, more)
    target.save_pretrained(trained)
    rows = {
        "small, as in step 1": (fitted, before),
        "small, trained on": (score(source, training), score(source, valid)),
        "large, from scratch": (score(scratch, training), score(scratch, valid)),
        "large, expanded and trained on": (score(target, training), score(target, valid)),
    }
    compared(
        [(name, f"{t.loss:.4f}", f"{v.loss:.4f}", f"{v.accuracy:.2%}") for name, (t, v) in rows.items()],
        "training loss", "validation loss", "validation accuracy",
    )  # fmt: skip
    console.print(
        f"   one image more or less is {1 / len(valid.labels):.2%}, so small differences are chance, and a task"
    )
    console.print("   this small has little use for more parameters. To see here: training goes on from where it was.")
    larger = rows["large, expanded and trained on"][1]
    copied, separated = apart(large), apart(trained)
    console.print(
        f"   copied neurons: their fan-in differed by {copied:.0%} from the original's before training, "
        f"by {separated:.0%} after it"
    )
    console.print(f"\nAll of it is in {folder.resolve()}; {time.monotonic() - started:.0f} s.")
    return {
        "before": before.accuracy, "after": after.accuracy, "trained": larger.accuracy,
        "loss_before": before.loss, "loss_after": after.loss, "loss_trained": larger.loss,
        "float32": single, "float64": double, "in_memory": in_memory, "copied": copied, "separated": separated,
        "parameters_before": parameters[0], "parameters_after": parameters[1],
    }  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--output", type=Path, default=Path("lemonx-demo"), help="where to write (default: lemonx-demo)"
    )
    main(parser.parse_args().output)
