"""A growth as a file, to repeat it: the lemonx.json of an output, or YAML with the keys of a recipe's `expand`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, Union

from pydantic import ValidationError, create_model, model_validator

from lemonx import architectures
from lemonx.algebra.free_parameters import as_section, parse_free
from lemonx.checkpoints.folder import CERTIFICATE, parse_object
from lemonx.checkpoints.opening import MAX_JSON, read_given
from lemonx.checkpoints.plain import JsonValue
from lemonx.errors import BadCheckpoint, BadRecipe, LemonxError
from lemonx.guards.shown import one_line
from lemonx.options.declared import Growth, Options, Values, Work, declared
from lemonx.options.former import present
from lemonx.options.sizes import parse_size
from lemonx.specs.config import TIED
from lemonx.training.recipe_file import load_yaml
from lemonx.training.strict import Strict, first_problem
from lemonx.verification.certificate import Said, parse_certificate

_INSTEAD = "give a lemonx.json or a YAML file"
# Of the types that an option may have, those that a YAML file can hold.
_PLAIN: Mapping[type, Any] = {t: t for t in (bool, int, str, type(None))} | {Mapping: dict[str, JsonValue]}


class GrowthKeys(Strict):
    """The base class of a growth in a file. Its values make sense, as far as no checkpoint is needed to know."""

    @model_validator(mode="before")
    @classmethod
    def _present(cls, given: Any) -> Any:
        return present(given, cls.model_fields) if isinstance(given, Mapping) else given

    @model_validator(mode="after")
    def _sensible(self) -> Self:
        try:
            growth = self.growth
            for name in ("width", "depth", "heads", "kv_heads", "ffn"):
                parse_size(name, getattr(growth, name))
            parse_free(as_section(growth.free))
        except LemonxError as error:
            raise ValueError(f"{error.found}; {error.remedy}") from None
        return self

    @property
    def options(self) -> Values:
        """The options that the file gives, as keywords of `lemonx.expand`."""
        return {name: value for name in type(self).model_fields if (value := getattr(self, name)) is not None}

    @property
    def growth(self) -> Growth:
        return Growth(**{name: value for name, value in self.options.items() if name in declared(Growth)})


def _keys(name: str, *kinds: type[Options]) -> type[GrowthKeys]:
    """A growth in a file, with these options as keys."""
    found: dict[str, Any] = {
        each.name: (Union[tuple(_PLAIN[t] for t in declared(kind)[each.name][0] if t in _PLAIN)], each.default)  # noqa: UP007
        for kind in kinds
        for each in fields(kind)  # pyright: ignore[reportArgumentType]
    }
    return create_model(name, __base__=GrowthKeys, **found)


if TYPE_CHECKING:
    GrowthFile = Expand = GrowthKeys
else:
    GrowthFile = _keys("GrowthFile", Growth)
    # The section `expand` of a recipe.
    Expand = _keys("Expand", Growth, Work)


def read_growth(path: Path) -> Values:
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


def _parsed(content: Mapping[str, JsonValue], path: Path) -> Values:
    try:
        growth = GrowthFile.model_validate(dict(content))
    except ValidationError as error:
        raise BadRecipe(*first_problem(error, GrowthFile)).about(str(path)) from None
    return growth.options


def _choices(said: Said) -> Values:
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
