"""Sizes and factors as expressions of config fields, found by trying what fits all samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from lemonx.checkpoints.plain import JsonValue
from lemonx.inference.fields import Field

# How a field is read: by its name, from config.json or from the config of a sample.
Read = Callable[[str], object]
Sampled = Sequence[tuple[Mapping[str, JsonValue], float]]
_EXACT = 1e-9


@dataclass(frozen=True)
class Expression:
    """Python in terms of the config `c`; `fields`: those that it reads, and what each is where config.json says null.

    `compute` is the same as a function of the numbers of these fields.
    """

    text: str
    fields: tuple[Field, ...]
    compute: Callable[..., float]

    def value(self, read: Read) -> float:
        """Its number for a config."""
        return self.compute(*(_number(field, read(field.name)) for field in self.fields))


def _number(field: Field, value: object) -> float:
    """The number of a field; None stands for what the source has."""
    if field.index is not None and isinstance(value, list):
        value = value[field.index]
    value = field.value if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{field.name} = {value!r}")
    return value


def leaf(field: Field, nullable: frozenset[str]) -> str:
    """A field as Python reads it."""
    where = f'c["{field.name}"]'
    if field.index is not None:
        return f"{where}[{field.index}]"
    return f"({where} or {field.value})" if field.name in nullable else where


def constant(value: float) -> Expression:
    return Expression(repr(value), (), lambda: value)


def size_expression(
    sampled: Sampled, fields: Sequence[Field], nullable: frozenset[str] = frozenset()
) -> Expression | None:
    """The simplest expression that gives the size in every sample; None if none of those that are tried does."""
    return next((found for found in _sizes(sampled, fields, nullable) if _fits(found, sampled)), None)


def factor_expression(
    sampled: Sampled, fields: Sequence[Field], nullable: frozenset[str] = frozenset()
) -> Expression | None:
    """The simplest expression that gives a factor in every sample: a size, or its root, or one over these."""
    if len({value for _, value in sampled}) == 1:
        return constant(sampled[0][1])
    for power, text in ((0.5, "** 0.5"), (-0.5, "** -0.5"), (1, ""), (-1, "** -1")):
        raised = [(flat, abs(value) ** (1 / power)) for flat, value in sampled]
        whole = [(flat, round(value)) for flat, value in raised]
        near = all(math.isclose(a, b, rel_tol=_EXACT) for (_, a), (_, b) in zip(raised, whole, strict=True))
        found = size_expression(whole, fields, nullable) if near and min(v for _, v in sampled) > 0 else None
        if found is not None:
            inner = found.text if found.text.isidentifier() or found.text.startswith("(") else f"({found.text})"
            return Expression(
                f"{inner} {text}".strip(), found.fields, lambda *n, of=found.compute, to=power: of(*n) ** to
            )
    return None


def _fits(found: Expression, sampled: Sampled) -> bool:
    try:
        return all(math.isclose(found.value(flat.__getitem__), value, rel_tol=_EXACT) for flat, value in sampled)
    except (ArithmeticError, KeyError, TypeError):
        return False


def _sizes(sampled: Sampled, fields: Sequence[Field], nullable: frozenset[str]) -> Iterator[Expression]:
    """Expressions that might give a size, simple ones first."""
    size = int(sampled[0][1])
    yield constant(size)
    named = [(field, leaf(field, nullable)) for field in fields]
    for field, text in named:
        yield Expression(text, (field,), lambda n: n)
    pairs = [(a, b) for a, b in product(named, repeat=2) if a != b]
    for (a, one), (b, two) in pairs:
        yield Expression(f"{one} // {two}", (a, b), _whole_part)
        yield Expression(f"{one} * {two}", (a, b), lambda n, m: n * m)
    for field, text in named:
        yield from _with_number(field, text, size)
    for (a, one), (b, two) in pairs:
        yield Expression(f"{one} + {two}", (a, b), lambda n, m: n + m)
        yield Expression(f"{one} - {two}", (a, b), lambda n, m: n - m)
        if a.value % (b.value * size) == 0 and (k := a.value // (b.value * size)) > 1:
            yield Expression(f"{one} // ({k} * {two})", (a, b), lambda n, m, k=k: _whole_part(n, k * m))
        if (whole := a.value // b.value) and size % whole == 0 and (k := size // whole) > 1:
            yield Expression(f"{k} * ({one} // {two})", (a, b), lambda n, m, k=k: k * _whole_part(n, m))
    for (a, one), (b, two), (d, three) in product(named, repeat=3):
        if len({a, b, d}) == 3:
            yield Expression(f"{one} * {two} // {three}", (a, b, d), lambda n, m, k: _whole_part(n * m, k))


def _with_number(field: Field, text: str, size: int) -> Iterator[Expression]:
    """A field and a number that is in the code."""
    if size % field.value == 0:
        yield Expression(f"{size // field.value} * {text}", (field,), lambda n, k=size // field.value: n * k)
    if field.value % size == 0:
        yield Expression(
            f"{text} // {field.value // size}", (field,), lambda n, k=field.value // size: _whole_part(n, k)
        )
    if 0 < abs(size - field.value) <= 8:
        sign = "+" if size > field.value else "-"
        yield Expression(f"{text} {sign} {abs(size - field.value)}", (field,), lambda n, k=size - field.value: n + k)


def _whole_part(n: float, m: float) -> float:
    """Whole division, where nothing is left over: a size that is rounded is another expression."""
    if n % m:
        raise ArithmeticError(f"{n} / {m} is not whole")
    return n // m
