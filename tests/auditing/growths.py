"""What a table can grow, and what inference reaches for the same model: column by column of `lemonx architectures`."""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import lemonx
import pico
from lemonx import architectures
from lemonx.checkpoints import Checkpoint
from lemonx.checkpoints.plain import JsonValue
from lemonx.diagnostics.capabilities import COLUMNS, Verdict, cell
from lemonx.errors import LemonxError
from lemonx.models import door
from lemonx.models.building import config_fields
from lemonx.planning.plan import make_plan
from lemonx.verification.float64 import Float64


@dataclass(frozen=True)
class Growth:
    """One growth of a pico model: whether its table allows it, and whether a run of it does, or why not."""

    model_type: str
    column: str
    table: bool
    inferred: bool
    why: str = ""


def typical() -> dict[str, str]:
    """The first pico model of every family."""
    found: dict[str, str] = {}
    for name, builder in pico.PICO.items():
        config_class = getattr(builder, "args", (None, None))[1]
        if config_class is not None:
            found.setdefault(config_class.model_type, name)
    return found


def growths(name: str) -> Iterator[Growth]:
    """Every column in which the table of a pico model has a size."""
    with Float64():
        small = pico.PICO[name]()
    with tempfile.TemporaryDirectory() as folder:
        pico.save(small, folder)
        with Checkpoint.open(Path(folder)) as checkpoint:
            family, config = architectures.find(checkpoint.config), dict(checkpoint.config)
            for column in COLUMNS:
                known = cell(family, config, column)
                if known.verdict is Verdict.NONE or known.target is None:
                    continue
                try:
                    plan = make_plan(checkpoint, known.target, as_read=config_fields)
                except LemonxError as refusal:  # the table says no: so far, no sizes that inference could be asked for
                    yield Growth(str(config["model_type"]), column, False, False, str(refusal))
                    continue
                # A user's larger model has the eps that every other has.
                sizes = {**plan.target_config, **{field: config[field] for field in plan.types.eps if field in config}}
                why = _refusal(small, sizes)
                yield Growth(str(config["model_type"]), column, True, not why, why)


def _refusal(small: Any, sizes: dict[str, JsonValue]) -> str:
    """Why inference does not fill a model of these sizes; empty if it does."""
    taken = inspect.signature(small.forward).parameters
    inputs = {**pico.inputs(small, seed=1), **({"use_cache": False} if "use_cache" in taken else {})}
    with Float64(), torch.random.fork_rng(devices=[]):
        made = door.config_object(sizes)
        large: Any = door.build(door.model_class(made), made).double().eval()
        pico.randomise(large, seed=5)
        try:
            lemonx.grow(small, large, inputs)
        except LemonxError as refusal:
            return str(refusal)
        except Exception as error:  # of code that is not ours, or a fault of inference
            return f"{type(error).__name__}: {error}"
    return ""
