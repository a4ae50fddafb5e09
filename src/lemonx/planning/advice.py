"""Sizes next to those that were refused. The type check tries each set of options before an error names it."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction

from lemonx.checkpoints.plain import JsonValue
from lemonx.errors import LemonxError
from lemonx.options.sizes import AskedSize, Relative
from lemonx.planning.request import FOLLOWERS, Target, asked_ratio, fields_behind, numbers
from lemonx.specs.config import TIED, Config
from lemonx.specs.family import Architecture, FieldSize

# How many widths are tried on either side, how many values of another size, and how many sets of these.
_WIDTHS, _VALUES, _SETS = 25, 6, 250
# A size that is chosen is at most twice what the proportions say, or half of it.
_FAR = math.log(2) + 1e-6


def options(target: Target, family: Architecture, config: Config) -> str:
    """A target as options of the command line, with the numbers of its own config where these are one."""
    words: list[str] = []
    for option in ("width", "depth", *FOLLOWERS):
        size = target.given(option)
        if size is not None:
            values = [config[name] for name in fields_behind(family, config, option)]
            one = values[0] if len(set(map(str, values))) == 1 and isinstance(values[0], int) else None
            words.append(f"--{option.replace('_', '-')} {one or size}")
    for name, value in target.fields.items():
        words.append(f"--set {name}={value if isinstance(value, str) else json.dumps(value, separators=(',', ':'))}")
    return " ".join(words)


def tried(
    family: Architecture,
    config: Config,
    wanted: Target,
    grown: Callable[[Target], Config],
    *,
    tie: bool,
    besides: Mapping[str, JsonValue] | None = None,
) -> str | None:
    """Return options near the refused ones that work, or None.

    `grown` is the type check; `tie`: heads are tied; `besides`: fields that were asked for and are no sizes. One thing
    changes at a time: the width, with all that follows it, or the sizes that were not given, or those that were.
    """

    def first(targets: Iterator[Target]) -> str | None:
        for target in targets:
            try:
                new = grown(target)
            except LemonxError:
                continue
            if new.values_on_disk != config.values_on_disk:
                return options(replace(target, fields={**target.fields, **(besides or {})}), family, new)
        return None

    ratio = asked_ratio(family, config, wanted)
    found = [first(_widths(family, config, wanted, ratio, down)) for down in (True, False)] if ratio else []
    found += [first(_sized(family, config, wanted, ratio, given)) for given in (False, True)]
    if tie and TIED not in wanted.fields:
        found.append(first(iter([replace(wanted, fields={**wanted.fields, TIED: False})])))
    words = [words for words in found if words]
    return f"try {' or '.join(dict.fromkeys(words))}" if words else None


def _widths(family: Architecture, config: Config, wanted: Target, ratio: Fraction, down: bool) -> Iterator[Target]:
    """The widths below or above the one asked for at which all followers are whole, and then a multiple."""
    free = [option for option in FOLLOWERS if wanted.given(option) is None]
    names = [name for option in ("width", *free) for name in fields_behind(family, config, option)]
    sizes = [n for name in names if name not in wanted.fields and config[name] for n in numbers(config[name])]
    whole = math.gcd(*sizes) or 1
    at = math.ceil(ratio * whole) - 1 if down else math.floor(ratio * whole) + 1
    steps = range(at, whole, -1) if down else range(at, 4 * at)
    times = math.ceil(ratio) - 1 if down else math.floor(ratio) + 1
    for factor in (*(Fraction(j, whole) for j in steps[:_WIDTHS]), Fraction(times)):
        if factor > 1:
            yield replace(wanted, width=Relative(times=factor))


def chosen(family: Architecture, config: Config, wanted: Target) -> Iterator[Target]:
    """The wanted sizes with numbers for as few of those that were left out as will do, nearest to the proportions.

    Nothing is chosen where only the depth is given, since no other size follows from it.
    """
    ratio = asked_ratio(family, config, wanted)
    if ratio is None and not wanted.fields and all(wanted.given(option) is None for option in FOLLOWERS):
        return
    given = wanted.heads is not None or not wanted.fields.keys().isdisjoint(fields_behind(family, config, "heads"))
    for target in _sized(family, config, wanted, ratio):
        if given or _heads_divide(family, config, target, ratio or Fraction(1)):
            yield target


def _heads_divide(family: Architecture, config: Config, target: Target, ratio: Fraction) -> bool:
    """Whether heads divide the width, where the source's do: most classes cannot be built otherwise."""

    def grown(name: str, option: AskedSize | None) -> Fraction:
        given = target.fields.get(name, option)
        return Fraction(given if isinstance(given, int) else config[name] * ratio)

    widths = fields_behind(family, config, "width")
    heads = [name for name in fields_behind(family, config, "heads") if isinstance(config[name], int)]
    if len(widths) != 1 or not isinstance(config[widths[0]], int) or any(config[widths[0]] % config[n] for n in heads):
        return True
    return not any(grown(widths[0], target.width) % grown(name, target.heads) for name in heads)


def reasons(family: Architecture, config: Config, wanted: Target, new: Mapping[str, JsonValue]) -> dict[str, str]:
    """Why each size that was left out is not in proportion to the width, by its field in config.json."""
    ratio, found = asked_ratio(family, config, wanted) or Fraction(1), dict[str, str]()
    for option in FOLLOWERS:
        for name in fields_behind(family, config, option) if wanted.given(option) is None else ():
            before, after = config[name], new.get(name)
            if name in wanted.fields or before is None or after is None:
                continue
            exact = [ratio * number for number in numbers(before)]
            if exact != numbers(after):
                said = ", ".join(f"{float(number):g}" for number in exact)
                whole = all(number.denominator == 1 for number in exact)
                found[name] = f"{said} would not be lossless" if whole else f"{said} is not whole"
    return found


@dataclass(frozen=True)
class _Choice:
    """A value for a size, the option or the field that sets it, and how far it is from the proportion."""

    off: float
    option: str
    value: int | list[int] | None


def _sized(
    family: Architecture, config: Config, wanted: Target, ratio: Fraction | None, given: bool = False
) -> Iterator[Target]:
    """Numbers for as few followers as will do, near the proportions; `given`: for the given sizes instead."""
    choices: dict[str, list[list[_Choice]]] = {option: [] for option in FOLLOWERS}
    for option in FOLLOWERS:
        names, size = fields_behind(family, config, option), wanted.given(option)
        if (size is not None) == given:
            names = [name for name in names if name not in wanted.fields and config[name] is not None]
            alike = len({str(config[name]) for name in names}) == 1 and isinstance(config[names[0]], int)
            for name in names[:1] if alike else names if size is None else ():
                choices[option].append(
                    _near(option if alike else name, option, config[name], size, ratio or Fraction(1))
                )
    # Heads depend on each other, and not on the MLP: so each of these is tried with the nearest of the other first.
    heads, inner = _sets([*choices["heads"], *choices["kv_heads"]]), _sets(choices["ffn"])
    sets = itertools.chain(itertools.product(heads, inner[:1]), itertools.product(heads[:1], inner[1:]))
    rest = itertools.product(heads[1:], inner[1:])
    for parts in itertools.islice(itertools.chain(sets, rest), _SETS):
        if chosen := [one for part in parts for one in part]:
            options = {one.option: one.value for one in chosen if one.option in FOLLOWERS}
            fields = {one.option: one.value for one in chosen if one.option not in FOLLOWERS}
            yield replace(wanted, **options, fields={**wanted.fields, **fields})  # pyright: ignore[reportArgumentType]


def _sets(choices: list[list[_Choice]]) -> list[list[_Choice]]:
    """One choice for each size: first those that change few sizes, and of these the nearest to the proportions."""
    sets = [[one for one in chosen if one.value is not None] for chosen in itertools.product(*choices)]
    return sorted(sets, key=lambda chosen: (len(chosen), sum(one.off for one in chosen)))


def _near(target: str, option: str, before: FieldSize, size: AskedSize | None, ratio: Fraction) -> list[_Choice]:
    """The values of a size, or of all sizes in a list, near the proportion, and first the proportion if it is whole."""
    found, counts = list[_Choice](), numbers(before)
    exact = [size if isinstance(size, int) else size.of(n) if size else n * ratio for n in counts]
    unit = math.gcd(*counts, 64) if option == "ffn" else 1
    if all(Fraction(n).denominator == 1 for n in exact):
        found.append(_Choice(0.0, target, None))  # as it is
    steps = [[(n // unit + i) * unit for n in exact] for i in range(-_VALUES, _VALUES + 1)]
    steps += [[n * times for n in counts] for times in range(1, 2 * math.ceil(exact[0] / counts[0]) + 1)]
    for values in steps:
        if all(new >= old for new, old in zip(values, counts, strict=True)):
            off = sum(abs(math.log(new / n)) for new, n in zip(values, exact, strict=True))
            if size is None and off > _FAR * len(counts):
                continue
            whole = [int(new) for new in values]
            found.append(_Choice(off, target, whole if isinstance(before, list) else whole[0]))
    return sorted(found, key=lambda one: (one.off, str(one.value)))
