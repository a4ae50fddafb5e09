"""The model for a task: newly initialised from a config, or loaded from a checkpoint."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lemonx.checkpoints import Checkpoint
from lemonx.checkpoints.config import odd_counts
from lemonx.checkpoints.folder import CONFIG
from lemonx.checkpoints.plain import JsonValue
from lemonx.errors import BadCheckpoint, BadRecipe
from lemonx.models import door
from lemonx.models.foreign import foreign
from lemonx.verification.fitting import require_fitting, size
from lemonx.verification.running import short_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# A new task brings a head of its own; everywhere else a missing weight is a broken checkpoint.
_NEW_HEAD = ("sequence-classification", "image-classification")


def _auto(task: str) -> Any:
    import transformers

    from lemonx import models

    models.register()
    return {
        "causal-lm": transformers.AutoModelForCausalLM,
        "masked-lm": transformers.AutoModelForMaskedLM,
        "image-classification": transformers.AutoModelForImageClassification,
        "sequence-classification": transformers.AutoModelForSequenceClassification,
    }[task]


def fresh(task: str, config: Mapping[str, JsonValue], decided: Mapping[str, JsonValue], seed: int) -> PreTrainedModel:
    """A newly initialised model, drawn with `seed`; `decided` are the config fields that the data decides."""
    from transformers import AutoConfig

    auto = _auto(task)
    kind = str(config["model_type"])
    try:
        known = AutoConfig.for_model(kind)
    except ValueError:
        raise BadRecipe(
            f"config.model_type is {kind!r}, which transformers does not know", "try llama, gpt2, pre-ln-bert or vit"
        ) from None
    _check_fields(config, known)
    _check_decided(config, decided)
    _check_size(task, {**decided, **config})
    torch.manual_seed(seed)
    with foreign(f"build the {kind} of `config` for {task}", "choose other sizes", BadRecipe):
        return door.build(auto, door.config_object({**decided, **config}), dtype=torch.float32)


def _check_fields(config: Mapping[str, JsonValue], known: Any) -> None:
    """Check field names: transformers silently accepts any, so a misspelt size would become the default."""
    names = {*known.to_dict(), *known.attribute_map, "model_type", "num_labels", "torch_dtype"}
    for name in config:
        if name not in names:
            near = difflib.get_close_matches(name[:80], names, n=1)
            advice = f"did you mean {near[0]!r}?" if near else "leave it out"
            raise BadRecipe(f"config.{name} is not a field of a {config['model_type']}", advice)


def _check_size(task: str, config: Mapping[str, JsonValue]) -> None:
    """BadRecipe if the model is absurdly large, or would not fit into memory with its gradients and moments."""
    for problem in odd_counts(config, Path(CONFIG)):
        raise BadRecipe.of(problem.about("config"))
    try:
        numbers = size(empty(task, config, {}))
    except BadCheckpoint as error:
        raise BadRecipe.of(error.about("config")) from None
    if (short := short_of(4 * 4 * numbers, "training")) is not None:
        raise BadRecipe(f"config: {short}", "choose smaller sizes")


def _check_decided(config: Mapping[str, JsonValue], decided: Mapping[str, JsonValue]) -> None:
    """A config may repeat what the data decides, but not contradict it; a vocabulary may have spare entries."""
    for name, value in decided.items():
        given = config.get(name, value)
        spare = name == "vocab_size" and type(given) is int and isinstance(value, int) and given > value
        if given != value and not spare:
            raise BadRecipe(f"config.{name} is {given!r}, but the data has {value!r}", "leave it out")


def loaded(task: str, folder: Path, decided: Mapping[str, JsonValue], seed: int = 0) -> PreTrainedModel:
    """The model of a checkpoint, in float32; a head that it lacks is initialised with `seed`."""
    with Checkpoint.open(folder) as checkpoint:
        require_fitting(checkpoint)
        generation = door.generation_config(checkpoint, strict=True)
        torch.manual_seed(seed)
        with foreign(f"load {str(folder)!r} for {task}", "give a checkpoint of that task"):
            config = door.read_config(checkpoint, **_new_head(task, decided))
            model, info = door.load(checkpoint, _auto(task), config, dtype=torch.float32, generation=generation)
    missing = sorted(info["missing_keys"])
    if missing and task not in _NEW_HEAD:
        raise BadCheckpoint(f"lacks {missing[0]}, which {task} needs", "give a checkpoint of that task", file=folder)
    return model


def empty(task: str, source: Path | Mapping[str, JsonValue], decided: Mapping[str, JsonValue]) -> PreTrainedModel:
    """The model of a checkpoint folder or a config, in float32 on the meta device: shapes without memory."""
    if isinstance(source, Path):
        with Checkpoint.open(source) as checkpoint:
            source = checkpoint.config
    with foreign(f"build a model for {task}", "give a checkpoint of that task"):
        config = door.config_object(source, **_new_head(task, decided))
        return door.build(_auto(task), config, "meta", dtype=torch.float32)


def _new_head(task: str, decided: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    """The config fields that a new head needs; the rest of the model stays as it was trained."""
    if task not in _NEW_HEAD:
        return {}
    return {name: value for name, value in decided.items() if name in ("num_labels", "problem_type", "id2label")}
