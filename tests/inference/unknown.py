"""Tiny checkpoints of model types that lemonx has no table for, as transformers saves them, all parameters random."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from lemonx.inference.tiny_sizes import BASES
from lemonx.models.foreign import foreign
from lemonx.verification.float64 import Float64
from lemonx.verification.media import find_inputs, outputs
from lemonx_lab.survey import classes
from lemonx_lab.survey.measuring import judged, same_size
from lemonx_lab.survey.randomise import randomise

TWICE, HALF_MORE = ("--width", "2x"), ("--width", "1.5x")
DEPTH, BOTH = ("--depth", "+1"), ("--width", "2x", "--depth", "+1")
ALL = {"twice": TWICE, "half more": HALF_MORE, "depth": DEPTH, "both": BOTH}
WIDTHS = {"twice": TWICE, "half more": HALF_MORE}
# Model type -> the growths that are exact; what else it refuses is below.
EXACT = {
    "arcee": ALL,
    "biogpt": {"half more": HALF_MORE, "both": BOTH},
    "ernie4_5": {"half more": HALF_MORE, "both": BOTH},
    "exaone4": {"half more": HALF_MORE, "both": BOTH},
    "glm4": {"half more": HALF_MORE, "both": BOTH},
    "gpt_bigcode": {"half more": HALF_MORE, "both": BOTH},
    "gpt_neo": WIDTHS,
    "helium": {"half more": HALF_MORE, "both": BOTH},
    "deberta-v2": {"twice": TWICE},
    "vit_msn": {"half more": HALF_MORE, "both": BOTH},
    "ijepa": {"half more": HALF_MORE, "both": BOTH},
    "lfm2": {"twice": TWICE},
    # What these take is found by trying: no size of a vocabulary, several pictures a text.
    "canine": {"twice": TWICE},
    "idefics3": {"twice": TWICE},
}


def model_class(model_type: str) -> Any:
    return classes.class_for(model_type, classes.tasks(model_type)[0])


def save(model_type: str, folder: Path, dtype: torch.dtype = torch.float64, kind: Any = None) -> Path:
    """A checkpoint of a tiny model; `kind`: of another class than the first."""
    with foreign("make a checkpoint", "mend the test"):
        model = classes.build(kind or model_class(model_type), model_type, BASES[0])
        randomise(model, 0)
        model.to(dtype).save_pretrained(folder)
    return folder


def difference(model_type: str, small: Path, large: Path) -> float:
    """By how much outputs of two folders differ, of the largest, on inputs that nothing else has used."""
    kind = model_class(model_type)
    with foreign("load a checkpoint", "mend the test"), Float64():
        one, other = (
            kind.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager").eval()
            for folder in (small, large)
        )
        batch = find_inputs(one, seed=5)[0]
        found = judged(one, other, batch, same_size(outputs(one, batch), outputs(other, batch)))
    assert found.difference is not None
    return found.difference
