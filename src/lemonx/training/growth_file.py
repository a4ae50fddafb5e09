"""A growth as a file, to repeat it: the lemonx.json of an output, or YAML with the keys of a recipe's `expand`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from lemonx import architectures
from lemonx.checkpoints.folder import CERTIFICATE, parse_object
from lemonx.checkpoints.opening import MAX_JSON, read_given
from lemonx.checkpoints.plain import JsonValue
from lemonx.errors import BadCheckpoint, BadRecipe
from lemonx.guards.shown import one_line
from lemonx.specs.config import TIED
from lemonx.training.recipe import Expand, first_problem
from lemonx.training.recipe_file import load_yaml
from lemonx.verification.certificate import Said, parse_certificate

_INSTEAD = "give a lemonx.json or a YAML file"


class GrowthFile(Expand):
    """The options of `lemonx expand` that decide what is written."""

    params: int | str | None = None
    small_gains: bool = False
    ramp: bool = False
    dtype: Literal["float64", "float32", "bfloat16", "float16"] | None = None


def read_growth(path: Path) -> dict[str, Any]:
    """The keywords of `lemonx.plan` that repeat this growth; BadRecipe if the file says none."""
    if path.suffix.lower() in (".yaml", ".yml"):
        return _parsed(load_yaml(path), path)
    try:
        raw, path = read_given(path, CERTIFICATE, MAX_JSON)
        content = parse_object(raw, path)
        said = parse_certificate(content, path)
    except BadCheckpoint as error:
        raise BadRecipe(error.found, _INSTEAD, file=error.file) from None
    except (OSError, RuntimeError) as error:
        raise BadRecipe(f"cannot be read ({one_line(error)})", _INSTEAD, file=path) from None
    return {"set": _sizes(content, path), **_choices(said)}


def _parsed(content: Mapping[str, JsonValue], path: Path) -> dict[str, Any]:
    try:
        growth = GrowthFile.model_validate(dict(content))
    except ValidationError as error:
        raise BadRecipe(*first_problem(error, GrowthFile)).about(str(path)) from None
    return growth.options


def _choices(said: Said) -> dict[str, Any]:
    return {"method": said.method, "free": said.free, "seed": said.seed, "dtype": said.dtype}


def _sizes(content: Mapping[str, Any], path: Path) -> dict[str, JsonValue]:
    """The sizes that grew; what follows from them, such as the eps of norms, is found anew."""
    try:
        changed = {name: values["target"] for name, values in content["config"].items()}
        types = [content["source"]["model_type"], changed.get("model_type")]
        known = [architectures.families()[kind] for kind in types if kind is not None]
    except (KeyError, TypeError, AttributeError) as error:
        raise BadRecipe(f"does not say how the sizes grew ({error})", "give another lemonx.json", file=path) from None
    sizes = {name for family in known for names in family.sizes.values() for name in names} | {"model_type", TIED}
    return {name: value for name, value in changed.items() if name in sizes}
