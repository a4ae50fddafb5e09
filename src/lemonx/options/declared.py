"""The options of lemonx as frozen dataclasses, with the help text beside each field.

`Growth` says what is grown, `Reading` how the source is read, `Writing` how the result is written. The other classes
combine them for one command. A field without a `Help` is for Python alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cache
from types import UnionType
from typing import Annotated, Any, Literal, Self, Union, get_args, get_origin, get_type_hints

from lemonx.algebra.free_parameters import Free
from lemonx.errors import BadTarget
from lemonx.guards.limits import LARGEST_SEED

# A path, as every function of Python's takes it.
PathLike = str | os.PathLike[str]
# A value that a field of config.json can be set to.
FieldValue = bool | int | float | str | list[int] | None
Size = int | str
Dtype = Literal["float64", "float32", "bfloat16", "float16", "fp64", "fp32", "bf16", "fp16"]
# Keys and values, as a section of a YAML file has them.
Section = Mapping[str, object]
# Values of options by their names.
Values = dict[str, Any]

# The panels of the help page.
SIZES, CHOICES, READ, WRITE = "Target sizes", "Choices", "Reading SOURCE", "Writing OUTPUT"
_NUMBER = "N|Nx|+N"
# The word of `spec` that forbids an inferred table.
NO_TABLE = "none"


@dataclass(frozen=True)
class Help:
    """The help text of an option, its panel on the help page, and the numbers that it takes."""

    text: str
    panel: str
    metavar: str | None = None
    numbers: range | None = None


class Options:
    """The base class of options. Every value has a type that its field allows."""

    def __post_init__(self) -> None:
        for name, (kinds, text) in declared(type(self)).items():
            value = getattr(self, name)
            if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
                wanted = [words for kind, words in _WORDS.items() if kind in kinds]
                raise BadTarget(f"{name} is {str(value)[:40]!r}", f"give {' or '.join(wanted)}")
            if text and text.numbers is not None and value is not None and value not in text.numbers:
                most = text.numbers.stop - 1
                raise BadTarget(f"{name} {str(value)[:40]} is out of range", f"use {text.numbers.start} to {most}")

    @classmethod
    def of(cls, other: Options, **changes: Any) -> Self:
        """Return these options with the values that `other` has for them, after changes."""
        shared = {name: getattr(other, name) for name in declared(cls) if hasattr(other, name)}
        return cls(**{**shared, **changes})

    def given(self) -> Values:
        """Return the options whose values differ from the default."""
        return {each.name: value for each in fields(self) if (value := getattr(self, each.name)) != each.default}  # pyright: ignore[reportArgumentType]


_WORDS: Mapping[type, str] = {
    bool: "true or false",
    int: "a whole number",
    str: "a text",
    os.PathLike: "a path",
    Mapping: "keys and values",
    Free: "a lemonx.Free",
    Callable: "a function",  # pyright: ignore[reportAssignmentType]
}


@cache
def declared(options: type) -> dict[str, tuple[tuple[type, ...], Help | None]]:
    """Return the fields of a class of options, in order: the types that a value may have, and the help text."""
    hints = get_type_hints(options, include_extras=True)
    found: dict[str, tuple[tuple[type, ...], Help | None]] = {}
    for each in fields(options):  # pyright: ignore[reportArgumentType]
        hint = hints[each.name]
        text = next((extra for extra in get_args(hint)[1:] if isinstance(extra, Help)), None)
        found[each.name] = (tuple(_kinds(hint)), text)
    return found


def _kinds(hint: Any) -> Iterator[type]:
    """The types of a hint, one by one."""
    origin = get_origin(hint)
    if origin is Annotated:
        yield from _kinds(get_args(hint)[0])
    elif origin is Literal:
        yield from {type(word) for word in get_args(hint)}
    elif origin in (Union, UnionType):
        for part in get_args(hint):
            yield from _kinds(part)
    else:
        yield origin or hint


@dataclass(frozen=True, kw_only=True)
class Sizes(Options):
    """The sizes to grow to. At least one must be given."""

    width: Annotated[
        Size | None,
        Help(
            "Hidden size: 768, 1.5x or +256. What you leave out follows: in proportion, or as near as is lossless.",
            SIZES,
            _NUMBER,
        ),
    ] = None
    depth: Annotated[
        Size | None, Help("Number of layers: 24, 2x or +4. In an encoder-decoder, of each side.", SIZES, _NUMBER)
    ] = None
    params: Annotated[
        Size | None,
        Help(
            "Number of parameters instead of sizes: 1B or 2x. `plan` lists lossless shapes near it, the nearest first; "
            "`expand` takes the first. A width or a depth may be given too.",
            SIZES,
            "N|Nx",
        ),
    ] = None
    like: Annotated[
        PathLike | Mapping[str, Any] | None,
        Help("Take all sizes from a config.json, a folder with one, or a model of the hub.", SIZES),
    ] = None
    heads: Annotated[Size | None, Help("Number of (query) heads.", SIZES, _NUMBER)] = None
    kv_heads: Annotated[Size | None, Help("Number of key-value heads.", SIZES, _NUMBER)] = None
    ffn: Annotated[Size | None, Help("Inner size of the MLP.", SIZES, _NUMBER)] = None
    set: Annotated[
        Mapping[str, FieldValue] | None, Help("Any size by its name in config.json. Repeatable.", SIZES, "FIELD=VALUE")
    ] = None


@dataclass(frozen=True, kw_only=True)
class Choices(Options):
    """The choices that every lossless growth leaves open."""

    free: Annotated[
        Literal["own", "language", "vision", "inside"] | Section | Free | None,
        Help(
            "How copied units share a weight, and how new layers start. own (default): each copy reads its own copies; "
            "it trained best in our measurements. language, vision: the paper's choices. inside: the source's "
            "numbers stay as they are, for `train: new` and `lemonx shrink`. Or one with changes: "
            "'{like: own, depth_type: 2, placement: stacked, ramp: true}'; docs/training.md lists the keys.",
            CHOICES,
            "NAME|{...}",
        ),
    ] = None
    seed: Annotated[int, Help("Seed of everything random.", CHOICES, "N", range(-LARGEST_SEED, LARGEST_SEED + 1))] = 0


@dataclass(frozen=True, kw_only=True)
class Growth(Choices, Sizes):
    """Everything that decides what is grown."""

    method: Annotated[
        str | Section,
        Help(
            "lemon, or a method that it is compared with: `lemonx methods` lists them. A method that learns takes a "
            "section: '{name: ligo, steps: 100, data: stdlib}'.",
            CHOICES,
            "NAME|{...}",
        ),
    ] = "lemon"
    dtype: Annotated[
        Dtype | None,
        Help("Dtype to store: float64, float32, bfloat16 or float16. Default: the source's.", CHOICES, "DTYPE"),
    ] = None


@dataclass(frozen=True, kw_only=True)
class Table(Options):
    """Where the table of a model type comes from, if lemonx has none for it."""

    spec: Annotated[
        PathLike | None,
        Help(
            "A table of your own, as `lemonx infer` prints one: a Python program, which is run. Without it, lemonx "
            "infers a table for a model type that it does not know; none forbids that.",
            READ,
            "FILE.py|none",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class Pickled(Options):
    """Whether pickled weights are read."""

    # A text was the key of the weights, before that had an option of its own.
    allow_pickle: Annotated[
        bool | str, Help("Read pytorch_model.bin, as plain tensors only, where there are no safetensors.", READ)
    ] = False
    weights: Annotated[
        str | None,
        Help(
            "The weights to read of a pickled file that holds an average too, such as ema; implies --allow-pickle.",
            READ,
            "KEY",
        ),
    ] = None

    @property
    def pickled(self) -> bool | str:
        """Whether pickled weights may be read, or the key of those that may."""
        return self.weights or self.allow_pickle


@dataclass(frozen=True, kw_only=True)
class Reading(Pickled, Table):
    """How the source is read."""

    adapter: Annotated[
        PathLike | None,
        Help(
            "A LoRA adapter of PEFT's, by its folder or its name on the hub, to merge into SOURCE first.", READ, "DIR"
        ),
    ] = None
    config: Annotated[
        PathLike | None,
        Help(
            "For a distributed checkpoint without config.json: the model's, or a folder with it and a tokenizer.",
            READ,
            "FILE|DIR",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class Work(Options):
    """How much is checked, and by how many workers."""

    verify: Annotated[
        bool, Help("Prove that the result is the same function before it appears: weights, layers, outputs.", WRITE)
    ] = True
    threads: Annotated[
        int | None, Help("Workers, side by side. Default: one per core, at most 8.", WRITE, "N", range(1, 1025))
    ] = None


@dataclass(frozen=True, kw_only=True)
class Force(Options):
    """Whether an older output is replaced."""

    force: Annotated[bool, Help("Replace OUTPUT if it is a checkpoint and holds nothing else.", WRITE)] = False


@dataclass(frozen=True, kw_only=True)
class Writing(Force, Work):
    """How a checkpoint is written."""

    shards: Annotated[
        Size,
        Help(
            "The largest file, such as 500MB; of a distributed checkpoint, the number of processes that it is cut for "
            "(default: as many as wrote SOURCE).",
            WRITE,
            "SIZE|N",
        ),
    ] = "5GB"
    with_optimizer: Annotated[
        bool,
        Help(
            "Grow the optimizer's state too, to resume a run at the new size: SOURCE is Trainer's checkpoint-N folder, "
            "or a distributed checkpoint.",
            WRITE,
        ),
    ] = False
    keep_adapter: Annotated[
        bool,
        Help(
            "Do not merge the adapter: grow it along, into OUTPUT/adapter, for PeftModel.from_pretrained.",
            WRITE,
        ),
    ] = False
    # It gets the Plan, a class that stands above this module.
    planned: Callable[[Any], None] | None = None
    progress: Callable[[int], None] | None = None
    learned: Callable[[int, float], None] | None = None


@dataclass(frozen=True, kw_only=True)
class Planning(Reading, Growth):
    """The options of `lemonx plan`."""

    solve: Annotated[
        bool,
        Help(
            "Also solve for what depends on the weights of norms (Post-LN at widths that are not multiples). Without "
            "it, only headers are read.",
            READ,
        ),
    ] = False


@dataclass(frozen=True, kw_only=True)
class Expansion(Reading, Writing, Growth):
    """The options of `lemonx expand`."""


@dataclass(frozen=True, kw_only=True)
class InPlace(Work, Table, Growth):
    """The options of `lemonx.grow_in_place`."""

    fresh_state: bool = False
    shard: Callable[[Any], object] | None = None
    folder: PathLike | None = None


@dataclass(frozen=True, kw_only=True)
class Verifying(Reading):
    """The options of `lemonx verify`."""

    layerwise: Annotated[
        bool,
        Help(
            "Compare layer by layer, with one in memory at a time: for models larger than memory. Names the first "
            "layer that differs.",
            READ,
        ),
    ] = False


@dataclass(frozen=True, kw_only=True)
class Shrinking(Force, Table):
    """The options of `lemonx shrink`."""


@dataclass(frozen=True, kw_only=True)
class Checking(Pickled):
    """The options of `lemonx fsck`."""

    quick: Annotated[
        bool, Help("Check names, shapes, dtypes and sizes, and do not read the numbers for NaN and Inf.", READ)
    ] = False
    progress: Callable[[int], None] | None = None
