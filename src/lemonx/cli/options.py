"""Options that several commands share, and functions that parse them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum, StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict, cast

import typer

from lemonx.errors import BadTarget

if TYPE_CHECKING:
    from lemonx.algebra.free_parameters import Free
    from lemonx.checkpoints.plain import JsonValue
    from lemonx.workflows.options import Dtype, FieldValue, Placement


class PlacementChoice(StrEnum):
    interleaved = "interleaved"
    before = "before"
    stacked = "stacked"
    middle = "middle"


class DtypeChoice(StrEnum):
    float64 = "float64"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


SIZES, CHOICES = "Target sizes", "Choices"
SourceArgument = Annotated[
    str,
    typer.Argument(
        metavar="SOURCE",
        help="Folder with config.json and safetensors, or a model of the hub: org/name, org/name@revision. Also a "
        "distributed checkpoint (.metadata and .distcp files), a LoRA adapter's folder, with its base here or in the "
        "hub's cache, or a .gguf file.",
        show_default=False,
    ),
]
NUMBER = "N|Nx|+N"
Width = Annotated[
    str | None,
    typer.Option(
        metavar=NUMBER,
        help="Hidden size: a number, or in terms of the source's, 1.5x or +256. Sizes you leave out scale in "
        "proportion.",
        rich_help_panel=SIZES,
    ),
]
Depth = Annotated[
    str | None,
    typer.Option(
        metavar=NUMBER, help="Number of layers: 24, 2x or +4. In an encoder-decoder, of each.", rich_help_panel=SIZES
    ),
]
Heads = Annotated[str | None, typer.Option(metavar=NUMBER, help="Number of (query) heads.", rich_help_panel=SIZES)]
KvHeads = Annotated[str | None, typer.Option(metavar=NUMBER, help="Number of key-value heads.", rich_help_panel=SIZES)]
Ffn = Annotated[str | None, typer.Option(metavar=NUMBER, help="Inner size of the MLP.", rich_help_panel=SIZES)]
WidthFactor = Annotated[
    str | None,
    typer.Option(help="The same as --width 1.5x: a ratio of widths, such as 2, 1.5 or 3/2.", rich_help_panel=SIZES),
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="FIELD=VALUE",
        help="Any size by its name in config.json, as JSON. Repeatable.",
        rich_help_panel=SIZES,
    ),
]
Like = Annotated[
    str | None,
    typer.Option(
        help="A config.json, a folder with one, or a model of the hub, to take all sizes from.", rich_help_panel=SIZES
    ),
]
Params = Annotated[
    str | None,
    typer.Option(
        metavar="N|Nx",
        help="A number of parameters instead of sizes, such as 350M, 1B or 2x. `plan` lists shapes near it, lossless, "
        "near the source's proportions, the cheapest to run first; `expand` takes the first.",
        rich_help_panel=SIZES,
    ),
]
Seed = Annotated[int, typer.Option(help="Seed of the free parameters.", rich_help_panel=CHOICES)]
FreeOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME|{LIKE: ...}",
        help="How duplicated units share a weight, and how new blocks start. own (default; trained best in our "
        "measurements): each copy of a unit reads its own copies, so that they are networks side by side. language and "
        "vision, the paper's choices: one copy keeps all the weight and new blocks start at zero; copies share it "
        "evenly and new blocks cancel. inside: the source's numbers stay as they are, for `train: new` and "
        "`lemonx shrink`. Or one of these with changes: {like: own, phi: 0.02}.",
        rich_help_panel=CHOICES,
    ),
]
DepthType = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=3,
        help="How new blocks start as the identity: 1 = zero output weights, 2 = outputs that cancel, 3 = half of the "
        "units silenced where they are written and half where they are read. Default: as --free.",
        rich_help_panel=CHOICES,
    ),
]
PlacementOption = Annotated[
    PlacementChoice | None,
    typer.Option(
        "--placement",
        help="Where new blocks stand. interleaved: spread evenly, each behind the block it copies. before: each in "
        "front of it. stacked: on top, in the source's order. middle: the blocks in the middle once more behind "
        "themselves. Post-LN: interleaved only. Default: as --free, interleaved.",
        rich_help_panel=CHOICES,
    ),
]
SmallGains = Annotated[
    bool,
    typer.Option(
        "--small-gains",
        help="Post-LN only: new blocks lose a thousandth as much to the eps of their norms. The price: their norms "
        "scale the stream down, so the first training steps change it more.",
        rich_help_panel=CHOICES,
    ),
]
RampOption = Annotated[
    bool,
    typer.Option(
        "--ramp",
        help="New blocks are full copies, but for what they write with: that goes into ramp.safetensors and comes in "
        "while you train (`ramp` in a recipe, or RampCallback for your own Trainer).",
        rich_help_panel=CHOICES,
    ),
]
DtypeOption = Annotated[
    DtypeChoice | None, typer.Option(help="Dtype to store. Default: the source's.", rich_help_panel=CHOICES)
]
MethodOption = Annotated[
    str, typer.Option(help="lemon, or a method it is compared with: see `lemonx methods`.", rich_help_panel=CHOICES)
]

AllowPickle = Annotated[
    bool,
    typer.Option(
        "--allow-pickle", help="Read pytorch_model.bin, as plain tensors only, where there are no safetensors."
    ),
]

Weights = Annotated[
    str | None,
    typer.Option(
        "--weights",
        metavar="KEY",
        help="Which weights of a pickled file to read, where it holds an average of them too, such as ema; implies "
        "--allow-pickle.",
    ),
]

AdapterOption = Annotated[
    str | None,
    typer.Option(
        "--adapter",
        metavar="DIR",
        help="A LoRA adapter of PEFT's, by its folder or its name on the hub, to merge into SOURCE first.",
    ),
]
KeepAdapter = Annotated[
    bool,
    typer.Option(
        "--keep-adapter",
        help="Do not merge the adapter: grow it along, into OUTPUT/adapter, so that both together compute what they "
        "did. PeftModel.from_pretrained loads it.",
    ),
]
ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE|DIR",
        help="For a distributed checkpoint without config.json: the model's, or a folder with it and a tokenizer.",
    ),
]
Push = Annotated[
    str | None,
    typer.Option(
        metavar="ORG/NAME", help="Upload the finished OUTPUT, with its model card, to the hub under this name."
    ),
]
Private = Annotated[bool, typer.Option("--private", help="With --push: a new repository is private.")]
TABLES = "Tables"
Infer = Annotated[
    bool,
    typer.Option(
        "--infer/--no-infer",
        help="For a model type of transformers that lemonx has no table for: infer one by running transformers' own "
        "class without its weights.",
        rich_help_panel=TABLES,
    ),
]
SpecFile = Annotated[
    Path | None,
    typer.Option(
        "--spec",
        metavar="FILE.py",
        help="A table of your own, as `lemonx infer` prints one. The file is a Python program, and it is run: give "
        "only one that you trust.",
        rich_help_panel=TABLES,
    ),
]


class Sizes(TypedDict):
    """The keywords of `lemonx.plan` that are sizes."""

    width: str | None
    depth: str | None
    heads: str | None
    kv_heads: str | None
    ffn: str | None
    width_factor: str | None
    set: Mapping[str, FieldValue]
    like: str | None
    params: str | None


From = Annotated[
    Path | None,
    typer.Option(
        "--from",
        metavar="FILE",
        help="Repeat a growth, on the same or a later SOURCE: the lemonx.json of an output, or YAML with sizes and "
        "choices as in a recipe's `expand`. In place of all target sizes and choices.",
        rich_help_panel=SIZES,
    ),
]


class Choices(TypedDict):
    """The keywords of `lemonx.plan` that are choices."""

    method: str
    seed: int
    free: Free | None
    depth_type: Literal[1, 2, 3] | None
    placement: Placement | None
    small_gains: bool
    ramp: bool
    dtype: Dtype | None
    allow_pickle: bool | str


def choices(
    method: str,
    seed: int,
    free: str | None,
    depth_type: int | None,
    placement: PlacementChoice | None,
    small_gains: bool,
    ramp: bool,
    dtype: DtypeChoice | None,
    allow_pickle: bool | str,
) -> Choices:
    return {
        "method": method,
        "seed": seed,
        "free": free_parameters(free),
        "depth_type": cast("Literal[1, 2, 3] | None", depth_type),
        "placement": value_of(placement),
        "small_gains": small_gains,
        "ramp": ramp,
        "dtype": value_of(dtype),
        "allow_pickle": allow_pickle,
    }


def sizes(
    width: str | None,
    depth: str | None,
    heads: str | None,
    kv_heads: str | None,
    ffn: str | None,
    width_factor: str | None,
    set_: list[str] | None,
    like: str | None,
    params: str | None,
) -> Sizes:
    return {
        "width": width,
        "depth": depth,
        "heads": heads,
        "kv_heads": kv_heads,
        "ffn": ffn,
        "width_factor": width_factor,
        "set": dict(_field(text) for text in set_ or ()),
        "like": like,
        "params": params,
    }


class Growth(Sizes, Choices):
    """The keywords of `lemonx.plan` that decide what is written."""


def merged(asked: Sizes, chosen: Choices, file: Path | None) -> Growth:
    """Sizes and choices, or those of a file; BadTarget if both are given."""
    if file is None:
        return {**asked, **chosen}
    from lemonx.training.growth_file import read_growth

    plain = sizes(*[None] * 9), choices("lemon", 0, None, None, None, False, False, None, chosen["allow_pickle"])
    if (asked, chosen) != plain:
        raise BadTarget(
            "--from says all sizes and choices itself", "leave the others out, or write a YAML file with them"
        )
    return cast("Growth", {**asked, **chosen, **read_growth(file)})


def _field(text: str) -> tuple[str, FieldValue]:
    from lemonx.checkpoints.plain import parse_json

    name, equals, value = text.partition("=")
    try:
        return name, parse_json(value if equals else "")
    except ValueError:
        if name == "model_type" and value:
            return name, value
        raise BadTarget(
            f"--set {text} is not FIELD=VALUE", "write it with a number or a list, such as hidden_sizes=[64,128]"
        ) from None


def in_bytes(text: str) -> int:
    units = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
    match = re.fullmatch(r"([0-9]{1,9}) ?([KMGT]B)", text.upper())
    if match is None or int(match[1]) == 0:
        raise BadTarget(f"--max-shard-size {text} is not a size", "write it as 500MB or 5GB")
    return int(match[1]) * units[match[2]]


def value_of(choice: Enum | None) -> Any:
    return choice.value if choice else None


def data_section(text: str | None) -> dict[str, JsonValue] | None:
    """Embedded data by name, or a recipe's data section in braces."""
    if text is None:
        return None
    return _section("--data", text, "{kind: text, path: corpus}") or {"kind": text}


def free_parameters(text: str | None) -> Free | None:
    """A preset of the free parameters by name, or a section in braces with changes to one."""
    if text is None:
        return None
    from lemonx.algebra.free_parameters import parse_free

    return parse_free(_section("--free", text, "{like: language, rest: own}") or text)


def _section(option: str, text: str, example: str) -> dict[str, JsonValue] | None:
    """The keys and values of a section in braces; None if the text is a name."""
    if not text.lstrip().startswith("{"):
        return None
    from lemonx.training.recipe_file import parse_yaml

    content = parse_yaml(text, option)
    if not isinstance(content, dict) or not content or not all(isinstance(key, str) for key in content):
        raise BadTarget(
            f"{option} {text} is neither a name nor a section", f"write a name, or a section such as {example}"
        )
    return content
