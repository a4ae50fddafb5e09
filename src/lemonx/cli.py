"""The command line. Only what `--help` needs is imported here; the rest when a command runs."""

from __future__ import annotations

import json
import re
import sys
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from lemonx.errors import BadTarget, LemonxError

app = typer.Typer(
    name="lemonx",
    help="Lossless model expansion: a trained checkpoint in, a larger one that computes exactly the same function out.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)


class FreeChoice(str, Enum):
    vision = "vision"
    language = "language"


class DtypeChoice(str, Enum):
    float64 = "float64"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


_SIZES, _CHOICES = "Target sizes", "Choices"
Source = Annotated[Path, typer.Argument(help="Folder with config.json and safetensors.", show_default=False)]
Width = Annotated[
    int | None, typer.Option(help="Hidden size. Heads and FFN follow in proportion.", rich_help_panel=_SIZES)
]
Depth = Annotated[int | None, typer.Option(help="Number of layers.", rich_help_panel=_SIZES)]
Heads = Annotated[int | None, typer.Option(help="Number of (query) heads.", rich_help_panel=_SIZES)]
KvHeads = Annotated[int | None, typer.Option(help="Number of key-value heads.", rich_help_panel=_SIZES)]
Ffn = Annotated[int | None, typer.Option(help="Inner size of the MLP.", rich_help_panel=_SIZES)]
WidthFactor = Annotated[
    str | None,
    typer.Option(help="Ratio for all widths, such as 2, 1.5 or 3/2: for models with stages.", rich_help_panel=_SIZES),
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="FIELD=VALUE",
        help="Any size by its name in config.json, as JSON. Repeatable.",
        rich_help_panel=_SIZES,
    ),
]
Like = Annotated[
    Path | None,
    typer.Option(help="A config.json, or a folder with one, to take all sizes from.", rich_help_panel=_SIZES),
]
Seed = Annotated[int, typer.Option(help="Seed of the free parameters.", rich_help_panel=_CHOICES)]
Free = Annotated[
    FreeChoice | None,
    typer.Option(
        help="The paper's free parameters for vision or for language. Default: what fits the model.",
        rich_help_panel=_CHOICES,
    ),
]
DepthType = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=2,
        help="Added blocks write 1: zeros, or 2: copies that cancel. Default: as --free.",
        rich_help_panel=_CHOICES,
    ),
]
Dtype = Annotated[
    DtypeChoice | None, typer.Option(help="Dtype to store. Default: the source's.", rich_help_panel=_CHOICES)
]
Method = Annotated[
    str, typer.Option(help="lemon, or a method it is compared with: see `lemonx methods`.", rich_help_panel=_CHOICES)
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


@app.command("plan", rich_help_panel="Commands")
def plan_command(
    source: Source,
    width: Width = None,
    depth: Depth = None,
    heads: Heads = None,
    kv_heads: KvHeads = None,
    ffn: Ffn = None,
    width_factor: WidthFactor = None,
    set_: Set = None,
    like: Like = None,
    method: Method = "lemon",
    seed: Seed = 0,
    free: Free = None,
    depth_type: DepthType = None,
    dtype: Dtype = None,
    as_json: Json = False,
) -> None:
    """Show what `expand` with the same options would write: sizes, rules, exactness. Reads headers only.

    `lemonx plan ./small --width 768 --depth 12`
    """
    from lemonx import api, show

    made = api.plan(
        source,
        **_sizes(width, depth, heads, kv_heads, ffn, width_factor, set_, like),
        method=method,
        seed=seed,
        free=_value(free),
        depth_type=depth_type,
        dtype=_value(dtype),
    )
    if as_json:
        _print_json(show.plan_json(made))
    else:
        show.print_plan(made)


@app.command("expand", rich_help_panel="Commands")
def expand_command(
    source: Source,
    output: Annotated[Path, typer.Argument(help="Folder to create.", show_default=False)],
    width: Width = None,
    depth: Depth = None,
    heads: Heads = None,
    kv_heads: KvHeads = None,
    ffn: Ffn = None,
    width_factor: WidthFactor = None,
    set_: Set = None,
    like: Like = None,
    method: Method = "lemon",
    seed: Seed = 0,
    free: Free = None,
    depth_type: DepthType = None,
    dtype: Dtype = None,
    max_shard_size: Annotated[
        str, typer.Option(help="Largest file, such as 500MB or 5GB.", rich_help_panel=_CHOICES)
    ] = "5GB",
    threads: Annotated[
        int | None,
        typer.Option(min=1, help="Worker threads. Default: one a core, at most 8.", rich_help_panel=_CHOICES),
    ] = None,
    verify: Annotated[
        bool, typer.Option(help="Load the result from disk and compare outputs before it appears.")
    ] = True,
    force: Annotated[bool, typer.Option(help="Replace OUTPUT if it is a checkpoint.")] = False,
    as_json: Json = False,
) -> None:
    """Write a larger checkpoint that computes the same function, and verify it.

    `lemonx expand ./small ./large --width 768 --depth 12`
    """
    from lemonx import api, show

    sizes = _sizes(width, depth, heads, kv_heads, ffn, width_factor, set_, like)
    options: dict[str, Any] = {
        "method": method,
        "seed": seed,
        "free": _value(free),
        "depth_type": depth_type,
        "dtype": _value(dtype),
    }
    made = api.plan(source, **sizes, **options)
    with show.progress(made, quiet=as_json, verify=verify) as tell:
        api.expand(
            source,
            output,
            **sizes,
            **options,
            max_shard_size=_bytes(max_shard_size),
            threads=threads,
            verify=verify,
            force=force,
            progress=tell,
        )
    if as_json:
        _print_json(json.loads((output / "lemonx.json").read_text()))
    else:
        show.print_expanded(made, output)


@app.command("verify", rich_help_panel="Commands")
def verify_command(
    source: Source,
    output: Annotated[Path, typer.Argument(help="Folder with the expanded checkpoint.", show_default=False)],
    as_json: Json = False,
) -> None:
    """Load both checkpoints, run them on the same inputs in float64, and compare. Exit code 1 if they differ."""
    from lemonx import api, show

    with show.waiting("running both models in float64", quiet=as_json):
        measured = api.verify(source, output)
    if as_json:
        _print_json(show.verified_json(measured))
    else:
        show.print_verified(measured)
    raise typer.Exit(0 if measured.passed else 1)


@app.command("architectures", rich_help_panel="Commands")
def architectures_command(as_json: Json = False) -> None:
    """List the supported families: what grows, and how exactly."""
    from lemonx import show

    with show.waiting("asking the type check", quiet=as_json):
        content = show.architectures_json()
    if as_json:
        _print_json(content)
    else:
        show.print_architectures(content)


@app.command("methods", rich_help_panel="Commands")
def methods_command(
    check: Annotated[bool, typer.Option("--check", help="Measure each on a small model: the paper's table 1.")] = False,
    as_json: Json = False,
) -> None:
    """List LEMON and the methods it is compared with: what each grows, and what it keeps."""
    from lemonx import show

    with show.waiting("growing a small model by every method", quiet=as_json or not check):
        content = show.methods_json(check)
    if as_json:
        _print_json(content)
    else:
        show.print_methods(content)


def _sizes(
    width: int | None,
    depth: int | None,
    heads: int | None,
    kv_heads: int | None,
    ffn: int | None,
    width_factor: str | None,
    set_: list[str] | None,
    like: Path | None,
) -> dict[str, Any]:
    return {
        "width": width,
        "depth": depth,
        "heads": heads,
        "kv_heads": kv_heads,
        "ffn": ffn,
        "width_factor": width_factor,
        "fields": dict(_field(text) for text in set_ or ()),
        "like": like,
    }


def _field(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    try:
        return name, json.loads(value if equals else "")
    except ValueError:
        raise BadTarget(
            f"--set {text}: want FIELD=VALUE with a number or a list, such as hidden_sizes=[64,128]"
        ) from None


def _bytes(text: str) -> int:
    units = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
    match = re.fullmatch(r"([0-9]+) ?([KMGT]B)", text.upper())
    if match is None or int(match[1]) == 0:
        raise BadTarget(f"--max-shard-size {text}: want a size such as 500MB or 5GB")
    return int(match[1]) * units[match[2]]


def _value(choice: Enum | None) -> Any:
    return choice.value if choice else None


def _print_json(content: Any) -> None:
    print(json.dumps(content, indent=2))


def main() -> None:
    """Run the command line: an error is one line and an exit code, never a traceback."""
    try:
        sys.exit(app(standalone_mode=False) or 0)
    except LemonxError as error:
        print(f"lemonx: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print("lemonx: stopped; nothing was written", file=sys.stderr)
        sys.exit(130)
    except typer.Abort:
        sys.exit(130)
    except typer.Exit as exit_:
        sys.exit(exit_.exit_code)
    except Exception as error:
        # A wrong option or argument, as the parser words it.
        worded = getattr(error, "format_message", None)
        if worded is None:
            raise
        print(f"lemonx: {worded().rstrip('.')}: see `lemonx --help`", file=sys.stderr)
        sys.exit(2)
