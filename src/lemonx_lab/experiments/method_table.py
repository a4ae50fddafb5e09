"""The paper's table 1, measured: which method is lossless where, on a small Pre-LN model with random parameters."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lemonx import api, methods
from lemonx.checkpoints import Checkpoint
from lemonx.checkpoints.temporary import Temporary
from lemonx.errors import Refused
from lemonx.methods import Method
from lemonx.models.foreign import quiet
from lemonx.verification.outputs import compare
from lemonx.verification.rounding import EXACT_TOLERANCE

if TYPE_CHECKING:
    from transformers import GPT2LMHeadModel

# Column -> the sizes asked for; the source has width 48 and 2 blocks.
CASES: dict[str, dict[str, Any]] = {
    "depth": {"depth": 4},
    "width (divisible)": {"width": 96},
    "width (indivisible)": {"width": 72},
}
LOSSLESS, UNDEFINED = "lossless", "-"
# Steps for a method that learns how to grow, or while it trains: enough to leave its starting point.
LESSONS = 3


def overview() -> dict[str, dict[str, str]]:
    """Method -> column -> `lossless`, the relative difference of outputs, or `-` where it is not defined."""
    with Temporary() as folder:
        for seed in (0, 1):
            with quiet():
                _small_model(seed).save_pretrained(folder / f"source{seed}")
        return {name: _row(method, folder) for name, method in sorted(methods.methods().items())}


def _row(method: Method, folder: Path) -> dict[str, str]:
    cells, last = dict.fromkeys(CASES, UNDEFINED), None
    for case, sizes in CASES.items():
        try:
            target = _grow(method, folder, sizes)
        except Refused:
            continue
        last = sizes, _digest(target)
        cells[case] = _measure(method, folder, target)
    # Free parameters choose among targets of one source: the seed matters, and so does the source.
    free = last is not None and all(
        _digest(_grow(method, folder, last[0], number, seed)) != last[1] for number, seed in ((0, 1), (1, 0))
    )
    return {**cells, "free parameters": _word(free), "data-free": _word(method.data_free)}


def _word(yes: bool) -> str:
    return "yes" if yes else "no"


def _grow(method: Method, folder: Path, sizes: Mapping[str, Any], number: int = 0, seed: int = 0) -> Path:
    """A target by this method, on the embedded data if it learns."""
    target = folder / "target"
    called = {"name": method.name, "steps": LESSONS} if method.learns else method.name
    api.expand(folder / f"source{number}", target, **sizes, method=called, seed=seed, verify=False, force=True)
    return target


def _inherited(kind: str, source: Path, target: Path) -> Path:
    """The target after its first steps with a loss towards the source."""
    from lemonx_lab.data.tasks import default, task_of
    from lemonx_lab.training.recipe import parse_recipe
    from lemonx_lab.training.run import run

    with Checkpoint.open(target) as checkpoint:
        config = checkpoint.config
    recipe = {
        "task": task_of(config),
        "data": {**default(config), "validation_examples": 4},  # nobody looks at its loss
        "source": str(target),
        "steps": LESSONS,
        "batch_size": 4,
        "learning_rate": 1e-3,
        "inheritance": {"kind": kind, "teacher": str(source)},
        "save_every": 0,
    }
    return run(parse_recipe(recipe), target.parent / "trained", force=True).output


def _measure(method: Method, folder: Path, target: Path) -> str:
    if method.inherits:
        target = _inherited(method.inherits, folder / "source0", target)
    with Checkpoint.open(folder / "source0") as small, Checkpoint.open(target) as large:
        difference = compare(small, large, rounding=None)[0].difference
    return LOSSLESS if difference <= EXACT_TOLERANCE else f"{difference:.0e}"


def _digest(target: Path) -> str:
    with Checkpoint.open(target) as written:
        return written.content_digest()


def _small_model(seed: int) -> GPT2LMHeadModel:
    from transformers import GPT2Config, GPT2LMHeadModel

    from lemonx_lab.data.vocabulary import BYTES

    config = GPT2Config(
        n_embd=48, n_head=4, n_layer=2, vocab_size=BYTES.size, n_positions=64, bos_token_id=1, eos_token_id=2
    )
    model = GPT2LMHeadModel(config).double().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Fresh norms and zero biases would hide what a method does to them.
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(0.2 * noise + (1.0 if ".ln_" in name and name.endswith("weight") else 0.0))
    return model
