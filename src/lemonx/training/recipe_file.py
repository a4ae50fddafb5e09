"""Recipes as files: safe YAML, the recipes that ship, and changes from the command line."""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any

import yaml

from lemonx.checkpoints.opening import MAX_TEXT, read_file
from lemonx.checkpoints.plain import JsonValue, require_plain
from lemonx.errors import BadRecipe
from lemonx.guards.shown import one_line

SHIPPED = Path(__file__).resolve().parents[1] / "recipes"


# A long recipe has two kilobytes; YAML is read at some hundred kilobytes a second.
_MAX_BYTES = 200_000


class _Loader(yaml.SafeLoader):
    """Plain YAML, without duplicate keys and aliases; 1e-3 is a number, as everywhere but in YAML 1.1."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            # A few lines of aliases of aliases are gigabytes, and one of its own anchor has no end.
            where = self.peek_event().start_mark
            raise yaml.MarkedYAMLError(None, None, "an alias: write out what it stands for", where)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key, _ in node.value:
            name = self.construct_object(key, deep=True)
            if name in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{name!r} is given twice", key.start_mark)
            seen.add(name)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)
# A depth of +2 is two more, as for `lemonx expand`, and not 2.
_Loader.yaml_implicit_resolvers["+"].insert(0, ("tag:yaml.org,2002:str", re.compile(r"\+[0-9]+$")))


def parse_yaml(text: str, name: str) -> JsonValue:
    """The content of a YAML text; `name` is for messages."""
    try:
        if len(text) > _MAX_BYTES:
            raise ValueError(f"it has more than {_MAX_BYTES} letters")
        content = yaml.load(text, _Loader)
        require_plain(content)
    except RecursionError:
        raise BadRecipe(f"{name} is not a recipe in YAML (it is nested too deeply)", "correct it") from None
    except Exception as error:  # the constructors of numbers and dates raise anything
        raise BadRecipe(f"{name} is not a recipe in YAML ({one_line(error)})", "correct it") from None
    return content


def load_yaml(path: Path) -> dict[str, JsonValue]:
    """The keys and values of a recipe, given its file or the name of one that ships."""
    path = found(path)
    try:
        content = parse_yaml(read_file(path, MAX_TEXT).decode(), str(path))
    except (OSError, RuntimeError, UnicodeDecodeError) as error:  # RuntimeError: a loop of links
        why = getattr(error, "strerror", None) or one_line(error)
        raise BadRecipe(f"cannot be read ({why})", "give a YAML file", file=path) from None
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise BadRecipe("is not a recipe", "write keys and values, such as `task: causal-lm`", file=path)
    return content


def found(path: Path) -> Path:
    """The file itself, or the recipe of this name that ships."""
    shipped = SHIPPED / f"{path}.yaml"
    if path.is_file() or path.suffix or len(path.parts) > 1:
        return path
    if not shipped.is_file():
        raise BadRecipe(
            "is neither a file nor the name of a recipe",
            "`lemonx train --list` names the recipes that come with lemonx",
            file=path,
        )
    return shipped


def shipped() -> dict[str, str]:
    """Every recipe that ships: its name and a one-line description."""
    return {
        path.stem: _first_comment(path.read_text(encoding="utf-8"))
        for path in sorted(SHIPPED.glob("*.yaml"), key=lambda p: p.stem)
    }


def _first_comment(text: str) -> str:
    return next((line.lstrip("# ") for line in text.splitlines() if line.startswith("#")), "")


def with_changes(content: Mapping[str, JsonValue], changes: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    """The content with `a.b` set to a value, for every dotted key in `changes`; None removes a key.

    >>> with_changes({"steps": 5, "data": {"name": "stdlib"}}, {"data.length": 64, "steps": None, "epochs": 2})
    {'data': {'name': 'stdlib', 'length': 64}, 'epochs': 2}
    """
    result: dict[str, JsonValue] = {**content}
    for dotted, value in changes.items():
        first, _, rest = dotted.partition(".")
        if rest:
            inner = result.get(first)
            result[first] = with_changes(inner if isinstance(inner, Mapping) else {}, {rest: value})
        elif value is None:
            result.pop(first, None)
        else:
            result[first] = value
    return result


def parse_changes(texts: list[str]) -> dict[str, JsonValue]:
    """KEY=VALUE texts, the values as YAML.

    >>> parse_changes(["learning_rate=1e-3", "data.path=./text", "expand.depth=+2"])
    {'learning_rate': 0.001, 'data.path': './text', 'expand.depth': '+2'}
    """
    changes = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not re.fullmatch(r"\w+(\.\w+)*", key):
            raise BadRecipe(f"--set {text} is not KEY=VALUE", "write it as learning_rate=1e-3 or data.path=./text")
        changes[key] = parse_yaml(value, f"--set {text}")
    return changes
