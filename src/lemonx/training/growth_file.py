"""A growth as a file, to repeat it: the lemonx.json of an output, or YAML with the keys of a recipe's `expand`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, field_validator

from lemonx import architectures
from lemonx.algebra.free_parameters import parse_free
from lemonx.checkpoints.folder import CERTIFICATE, parse_object
from lemonx.checkpoints.opening import MAX_JSON, read_given
from lemonx.checkpoints.plain import JsonValue
from lemonx.errors import BadCheckpoint, BadRecipe, LemonxError
from lemonx.guards.limits import LARGEST, LARGEST_SEED
from lemonx.guards.shown import one_line
from lemonx.specs.config import TIED
from lemonx.training.recipe_file import load_yaml
from lemonx.training.strict import Strict, first_problem
from lemonx.verification.certificate import Said, parse_certificate
from lemonx.workflows.options import Dtype

_INSTEAD = "give a lemonx.json or a YAML file"


# A number, or in terms of the source's: 1.5x, +4.
GrownSize = Annotated[int, Field(gt=0, le=LARGEST)] | str


class Expand(Strict):
    """The options of `lemonx expand`; `options` has them as keywords of `lemonx.plan`."""

    width: GrownSize | None = None
    depth: GrownSize | None = None
    heads: GrownSize | None = None
    kv_heads: GrownSize | None = None
    ffn: GrownSize | None = None
    width_factor: float | str | None = None
    sizes: dict[str, JsonValue] = Field(default_factory=dict, alias="set")
    like: str | None = None
    method: str = "lemon"
    free: str | dict[str, JsonValue] | None = None
    depth_type: Literal[1, 2, 3] | None = None
    placement: Literal["interleaved", "before", "stacked", "middle"] | None = None
    seed: int = Field(0, ge=-LARGEST_SEED, le=LARGEST_SEED)
    verify: bool = True

    @field_validator("free")
    @classmethod
    def _known_parameters(cls, given: str | dict[str, JsonValue] | None) -> str | dict[str, JsonValue] | None:
        try:
            return given if given is None or parse_free(given) else None
        except LemonxError as error:
            raise ValueError(f"{error.found}; {error.remedy}") from None

    @property
    def options(self) -> dict[str, Any]:
        given = self.model_dump(exclude_none=True, exclude={"verify"})
        free = {} if self.free is None else {"free": parse_free(self.free)}
        return {"set": given.pop("sizes"), **given, **free}


class GrowthFile(Expand):
    """The options of `lemonx expand` that decide what is written."""

    params: int | str | None = None
    small_gains: bool = False
    ramp: bool = False
    dtype: Dtype | None = None


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
