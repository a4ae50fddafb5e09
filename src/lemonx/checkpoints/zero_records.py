"""What the files of a ZeRO checkpoint are called, and what their pickles may name beside tensors."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from lemonx.checkpoints.archives import Placed, Records
from lemonx.checkpoints.envelopes import record_class
from lemonx.checkpoints.folder import has
from lemonx.checkpoints.opening import file_inside

LATEST, LATEST_UNIVERSAL = "latest", "latest_universal"
# In a universal checkpoint: the folder of all parameters, and in it what is the optimizer's as a whole.
PARAMETERS, OPTIMIZER_STATE = "zero", "optimizer_state.pt"
FRAGMENT = ("deepspeed.utils.tensor_fragment", "fragment_address")
OPTIMIZER = re.compile(r"(?P<kind>(?:bf16_)?)zero_pp_rank_(?P<process>\d{1,6})_mp_rank_(?P<slice>\d+)_optim_states\.pt")


def latest_tag(folder: Path, latest: str = LATEST) -> str | None:
    """The folder that `latest` names; None if there is no such file, or it names none."""
    if not has(folder, latest) or not (folder / latest).is_file():
        return None
    with file_inside(folder, latest) as file:
        tag = file.read(4096).decode("utf-8", "replace").strip()
    plain = tag and tag.isprintable() and Path(tag).name == tag and "\\" not in tag
    return tag if plain and (folder / tag).is_dir() else None


def find_zero(folder: Path) -> str | None:
    """The folder in `folder` that holds a ZeRO checkpoint: "." for itself; None if there is none."""
    for below in (latest_tag(folder), "."):
        if below and any(OPTIMIZER.fullmatch(entry.name) for entry in os.scandir(folder / below)):
            return below
    return None


def find_universal(folder: Path) -> str | None:
    """The same for a universal checkpoint, which DeepSpeed's ds_to_universal.py writes."""
    for below in (latest_tag(folder, LATEST_UNIVERSAL), "."):
        if below and (folder / below / PARAMETERS / OPTIMIZER_STATE).is_file():
            return below
    return None


def records() -> Records:
    """What the files name beside tensors; classes are new for each reading, so that a pickle changes nothing."""
    own = {
        "deepspeed.runtime.fp16.loss_scaler": ("LossScaler", "DynamicLossScaler", "LossScaleConfig"),
        "deepspeed.runtime.zero.config": ("ZeroStageEnum",),
        "deepspeed.checkpoint.universal_checkpoint": ("SubparamShape",),
        FRAGMENT[0]: (FRAGMENT[1],),
    }
    made: dict[tuple[str, str], Any] = {
        (module, name): record_class(module, name) for module, names in own.items() for name in names
    }
    made["torch", "Size"] = _size
    made["torch", "Tensor"] = made["torch.nn.parameter", "Parameter"] = _nothing
    made["torch._tensor", "_rebuild_from_type_v2"] = _typed
    made["torch._utils", "_rebuild_parameter"] = _parameter
    made["builtins", "set"] = made["__builtin__", "set"] = _small_set
    return made


def _size(sizes: Any = ()) -> tuple[int, ...]:
    if len(sizes) > 64 or not all(type(size) is int and 0 <= size < 2**40 for size in sizes):
        raise ValueError("a size is not a list of natural numbers")
    return tuple(sizes)


def _nothing(*_: Any) -> None:
    return None


def _typed(make: Any, _kind: Any, given: Any, _state: Any) -> Any:
    """A tensor with attributes, which do not count."""
    return _tensor(make(*given))


def _parameter(data: Any, *_: Any) -> Any:
    return _tensor(data)


def _tensor(made: Any) -> Placed:
    if not isinstance(made, Placed):
        raise ValueError("a parameter holds no tensor")
    return made


def _small_set(given: Any = ()) -> set[Any]:
    if len(given) > 1000:
        raise ValueError("a set is too large")
    return set(given)
