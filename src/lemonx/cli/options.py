"""Turns the declared options into those of the command line, and parses what only a command line writes."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lemonx.errors import BadTarget
from lemonx.options.declared import SIZES, Growth, Help, Options, declared
from lemonx.options.former import FORMER, present

if TYPE_CHECKING:
    from lemonx.checkpoints.plain import JsonValue

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
_From = Annotated[
    Path | None,
    typer.Option(
        "--from",
        metavar="FILE",
        help="Repeat a growth, on the same or a later SOURCE: the lemonx.json of an output, or a YAML file with sizes "
        "and choices. In place of all target sizes and choices.",
        rich_help_panel=SIZES,
    ),
]
_FROM = "from_"


def parameters(options: type[Options]) -> Iterator[inspect.Parameter]:
    """The parameters of a command, as typer reads them, for the fields of a class of options."""
    kinds = declared(options)
    for each in fields(options):  # pyright: ignore[reportArgumentType]
        allowed, text = kinds[each.name]
        if text is not None:
            yield _parameter(each.name, _hint(allowed), each.default, _option(each.name, text, each.default))
        if each.name == "like":
            yield _parameter(_FROM, _From, None)
    for name, former in FORMER.items():
        if former.now in kinds and name not in kinds and former.on_command_line != "never":
            hint, default = (bool, False) if former.on_command_line == "flag" else (str | None, None)
            yield _parameter(name, hint, default, typer.Option(flag(name), hidden=True))


def _parameter(name: str, hint: Any, default: Any, option: Any = None) -> inspect.Parameter:
    assert default is not MISSING
    hint = hint if option is None else Annotated[hint, option]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint)


def _hint(kinds: tuple[type, ...]) -> Any:
    """The type that typer parses a text into."""
    if bool in kinds:
        return bool
    if Mapping in kinds and str not in kinds:
        return list[str] | None
    plain = int if int in kinds and str not in kinds else str
    return plain | None if type(None) in kinds else plain


def _option(name: str, text: Help, default: object) -> Any:
    names = (f"{flag(name)}/--no-{name.replace('_', '-')}",) if default is True else (flag(name),)
    return typer.Option(*names, help=text.text, metavar=text.metavar, rich_help_panel=text.panel)


def flag(name: str) -> str:
    """An option as it is written on the command line."""
    return f"--{name.replace('_', '-')}"


def parsed(options: type[Options], given: Mapping[str, Any]) -> Options:
    """Return the options from the values that the command line parsed."""
    kinds = declared(options)
    # A flag that is off says nothing where it is a former one; 0 is a value.
    left_out = {
        name for name, value in given.items() if value is None or value == [] or (value is False and name not in kinds)
    }
    values = present({name: given[name] for name in given if name not in (_FROM, *left_out)}, kinds, shown=flag)
    chosen = options(**{name: _value(name, value, kinds[name][0]) for name, value in values.items()})
    return chosen if given.get(_FROM) is None else _repeated(chosen, given[_FROM])


def _value(name: str, value: Any, kinds: tuple[type, ...]) -> Any:
    if isinstance(value, list):
        from lemonx.planning.request import agreed

        return agreed((f"{flag(name)} {text[:60]}", *_field(text)) for text in value)
    if Mapping in kinds and isinstance(value, str) and value.lstrip().startswith("{"):
        return _section(flag(name), value)
    return value


def _repeated(chosen: Options, file: Path) -> Options:
    """Return the options with the growth that a file says."""
    from lemonx.training.growth_file import read_growth

    if declared(Growth).keys() & chosen.given().keys():
        raise BadTarget(
            "--from says all sizes and choices itself", "leave the others out, or write a YAML file with them"
        )
    return type(chosen).of(chosen, **read_growth(file))


def _field(text: str) -> tuple[str, JsonValue]:
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


def _section(option: str, text: str) -> dict[str, JsonValue]:
    """The keys and values of a section in braces."""
    from lemonx.training.recipe_file import parse_yaml

    content = parse_yaml(text, option)
    if not isinstance(content, dict) or not content or not all(isinstance(key, str) for key in content):
        raise BadTarget(
            f"{option} {text} is neither a name nor a section",
            "write a name, or a section such as {like: own, phi: 0.02}",
        )
    return content
