"""An inferred table as a Python file in the row language, which can be edited and given to `--spec`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields, is_dataclass, replace

from lemonx.inference.expressions import Expression
from lemonx.inference.fields import Field
from lemonx.inference.template import SpaceForm, StackForm, Template
from lemonx.specs import norms, signature, spaces, spec, weights
from lemonx.specs.rows import Row
from lemonx.specs.signature import Side
from lemonx.specs.spaces import Space

# Where the words of the row language are.
_HOMES = (norms, signature, spaces, spec, weights)
_WORDS = {name: home for home in _HOMES for name, value in vars(home).items()
          if getattr(value, "__module__", "") == home.__name__ and not name.startswith("_")}  # fmt: skip
_UNKNOWN = "  # no expression of config fields gives this size, so it cannot grow"


def as_python(table: Template) -> str:
    """The file."""
    body = "\n".join(_body(table))
    used = {word: home for word, home in _WORDS.items() if re.search(rf"\b{word}\(", body)}
    modules = {
        "lemonx.specs.config": ["Config"],
        "lemonx.specs.family": ["architecture"],
        "lemonx.specs.spec": ["Spec"],
    }
    for word, home in used.items():
        modules.setdefault(home.__name__, []).append(word)
    imports = [f"from {name} import {', '.join(sorted(set(words)))}" for name, words in sorted(modules.items())]
    return "\n".join([*_head(table), "", *imports, "", "", body, ""])


def _head(table: Template) -> Iterable[str]:
    return (
        f'"""The table of a {table.model_class or table.model_type}, inferred from runs of transformers\' own class.',
        "",
        "Spaces are named after the parameter that first touched them. `lemonx expand DIR OUTPUT --spec THIS_FILE`",
        "uses it, and docs/add-an-architecture.md explains the language.",
        '"""',
    )


def _body(table: Template) -> Iterable[str]:
    yield "@architecture("
    yield f"    {_quoted(table.model_type)},"
    yield f"    kind={_quoted(table.kind)},"
    yield f"    defaults={_quoted(table.defaults)},"
    if table.aliases:
        yield f"    aliases={_quoted(table.aliases)},"
    for option, names in table.sizes.items():
        said = _quoted(names[0] if len(names) == 1 else names)
        yield f"    {re.sub(r'[^0-9a-zA-Z_]', '_', option)}={said},"
    yield ")"
    yield "def table(c: Config) -> Spec:"
    yield f'    """{table.model_class or table.model_type}: inferred."""'
    yield "    return Spec("
    yield from _mapping("rows", {name: _row(row, table.tied) for name, row in table.rows.items()}, {})
    yield from _mapping("spaces", {name: _space(form) for name, form in table.spaces.items()}, table.unknown)
    yield from _mapping("stacks", {name: _stack(form) for name, form in table.stacks.items()}, {})
    yield from _mapping("fixed", {name: size.text for name, size in table.fixed.items()}, table.unknown)
    yield from _mapping("still", {name: _quoted(why) for name, why in table.still.items()}, {})
    if table.acts:
        yield f"        acts={_quoted(table.acts)},"
    if table.shown:
        yield f"        shown={_quoted(table.shown)},"
    if table.mixed:
        yield f"        mixed={_quoted(table.mixed)},"
    yield from _mapping("config", {one.name: _said(one) for one in table.unsaid}, {})
    yield from _mapping("follows", {name: _quoted(other) for name, other in table.follows.items()}, {})
    yield "    )"


def _mapping(name: str, entries: Mapping[str, str], unknown: Mapping[str, int]) -> Iterable[str]:
    if entries:
        yield f"        {name}={{"
        yield from (
            f"            {_quoted(key)}: {text},{_UNKNOWN if key in unknown else ''}" for key, text in entries.items()
        )
        yield "        },"
    elif name in ("rows", "spaces", "stacks"):
        yield f"        {name}={{}},"


def _said(one: Field) -> str:
    return f'c["{one.name}"] or {one.value}'


# ----------------------------------------------------------------- spaces and stacks


def _space(form: SpaceForm) -> str:
    size, scale, space = form.size.text, form.scale.text, form.space
    ways = [f"avg({size})", f"zero({size})", f"circ({size})", f"fresh({size})", f"key({size})"]
    ways += [f"query({size})", f"query({size}, scale={scale})"]
    if space.like is not None:
        ways += [f"scaled({kind}({size}), {_quoted(space.like)}, {scale})" for kind in ("avg", "zero", "circ", "fresh")]
    return next((way for way in ways if _makes(way, form)), _literal_space(form))


def _makes(way: str, form: SpaceForm) -> bool:
    """Whether a call gives this space, at the sizes of the first run and at others."""
    for times in (1, 4):
        numbers = {leaf: str(one.value * times) for expression in (form.size, form.scale)
                   for leaf, one in _leaves(expression)}  # fmt: skip
        text = way
        for leaf, number in numbers.items():
            text = text.replace(leaf, number)
        wanted = replace(form.space, size=int(_at(form.size, times)), scale=_at(form.scale, times))
        made = _evaluated(text)
        if not isinstance(made, Space) or replace(made, scale=1.0) != replace(wanted, scale=1.0):
            return False
        if abs(made.scale - wanted.scale) > 1e-12 * abs(wanted.scale):
            return False
    return True


def _leaves(expression: Expression) -> Iterable[tuple[str, Field]]:
    for one in expression.fields:
        for text in (f'(c["{one.name}"] or {one.value})', f'c["{one.name}"][{one.index}]', f'c["{one.name}"]'):
            if text in expression.text:
                yield text, one
                break


def _at(expression: Expression, times: int) -> float:
    return expression.compute(*(one.value * times for one in expression.fields))


def _literal_space(form: SpaceForm) -> str:
    return _literal(form.space, {"size": form.size.text, "scale": form.scale.text})


def _stack(form: StackForm) -> str:
    return _literal(form.stack, {"size": form.size.text})


# ----------------------------------------------------------------- rows


def _row(row: Row, tied: str) -> str:
    """A row as a call of the row language."""
    text = next((way for way in _ways(row) if _evaluated(way) == row), _literal(row, {}))
    if tied and (table := getattr(row, "tied", None)):
        text = text.replace(
            f"tied={_quoted(table)}", f"optional=True, tied={_quoted(table)} if c[{_quoted(tied)}] else None"
        )
    return text


def _ways(row: Row) -> Iterable[str]:
    signed = _quoted(f"{row.reads} -> {row.writes}")
    plain = {"eps": None, "offset": 0.0, "affine": True, "transposed": False, "kernel": 0, "groups": -1, "tied": None}
    said = [f"{name}={_quoted(getattr(row, name))}" for name, usual in plain.items()
            if getattr(row, name, usual) != usual]  # fmt: skip
    for word in ("linear", "conv", "embedding", "depthwise", "layer_norm", "rms_norm", "batch_norm", "group_norm"):
        yield f"{word}({', '.join([signed, *said])})"
    axes = getattr(row, "axes", ())
    yield f"parameter({_quoted(' '.join(str(axis) for axis in axes))})"
    yield "dropped()"


def _evaluated(text: str) -> object:
    """What a call of the row language gives; None if it is none."""
    try:
        return eval(text, {"__builtins__": {}}, {word: getattr(home, word) for word, home in _WORDS.items()})
    except (TypeError, ValueError, SyntaxError, NameError, ZeroDivisionError):
        return None


def _quoted(value: object) -> str:
    """Plain data as Python, with double quotes.

    >>> _quoted({"a": ("b", 1, None)})
    '{"a": ("b", 1, None)}'
    """
    if isinstance(value, str):
        return json.dumps(value)
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_quoted(name)}: {_quoted(one)}' for name, one in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_quoted, value))}]"
    if isinstance(value, tuple):
        return f"({', '.join(map(_quoted, value))}{',' if len(value) == 1 else ''})"
    return repr(value)


def _literal(value: object, instead: Mapping[str, str]) -> str:
    """A dataclass as Python, without what is by default; `instead`: texts for some of its fields."""
    if isinstance(value, Side):
        return f"side({_quoted(str(value))})"
    if isinstance(value, tuple):
        return f"({', '.join(_literal(one, {}) for one in value)}{',' if len(value) == 1 else ''})"
    if not is_dataclass(value):
        return _quoted(value)
    said = []
    for one in fields(value):
        found = getattr(value, one.name)
        default = one.default_factory() if one.default_factory is not MISSING else one.default
        if one.name in instead and not (one.name == "scale" and instead["scale"] == "1.0"):
            said.append(f"{one.name}={instead[one.name]}")
        elif one.name not in instead and found != default:
            said.append(f"{one.name}={_literal(found, {})}")
    return f"{type(value).__name__}({', '.join(said)})"
