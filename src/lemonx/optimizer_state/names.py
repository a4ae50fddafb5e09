"""A parameter's two names: its module's, which an optimizer knows, and the one on disk, which a spec knows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lemonx.errors import BadCheckpoint, Refused

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def skeleton(config: Mapping[str, Any]) -> PreTrainedModel:
    """The model of a config.json without weights: its parameters have names, shapes and an order, and no memory."""
    import torch
    from transformers import CONFIG_MAPPING

    from lemonx import models
    from lemonx.verification.loading import model_class

    models.register()
    values = {name: value for name, value in config.items() if name != "model_type"}
    try:
        made = CONFIG_MAPPING[config["model_type"]].from_dict(values)
        build = model_class(made)
        with torch.device("meta"):
            return build.from_config(made) if build.__name__.startswith("Auto") else build(made)
    except (KeyError, ValueError, TypeError, RuntimeError, OSError) as error:
        reason = " ".join(str(error).split())[:300]
        raise BadCheckpoint(f"transformers cannot build the model of config.json ({reason}): save it again") from error


def disk_names(model: PreTrainedModel) -> dict[str, str]:
    """Module name -> name on disk of every parameter, in the model's order; tied parameters stand once.

    transformers renames as it saves; it is asked with a marker in each parameter's place.
    """
    import torch
    from transformers.core_model_loading import revert_weight_conversion

    names = [name for name, _ in model.named_parameters()]
    try:
        marked = revert_weight_conversion(model, {name: torch.tensor(i) for i, name in enumerate(names)})
        found = {names[int(marker)]: name for name, marker in marked.items()}
    except (RuntimeError, ValueError, IndexError, TypeError, KeyError):
        found = {}
    if sorted(found) != sorted(names):
        raise Refused(
            f"{type(model).__name__} keeps parameters on disk in other shapes than in memory, and optimizer state "
            "follows names only: expand without --with-optimizer"
        )
    return {name: found[name] for name in names}
