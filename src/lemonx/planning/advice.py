"""Sizes next to those that were refused. The type check tries each set of options before an error names it."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from fractions import Fraction

from lemonx.checkpoints.plain import JsonValue
from lemonx.errors import LemonxError
from lemonx.options.sizes import Relative
from lemonx.planning.request import FOLLOWERS, Target, asked_ratio, fields_behind, numbers
from lemonx.specs.config import TIED, Config
from lemonx.specs.family import Architecture

# How many widths are tried on either side, how many values of another size, and how many sets of these.
_WIDTHS, _VALUES, _SETS = 25, 6, 100


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


def _sized(
    family: Architecture, config: Config, wanted: Target, ratio: Fraction | None, given: bool = False
) -> Iterator[Target]:
    """Numbers for as few followers as will do, near the proportions; `given`: for the given sizes instead."""
    choices: list[list[tuple[float, str, int | None]]] = []
    for option in FOLLOWERS:
        names, size = fields_behind(family, config, option), wanted.given(option)
        before = config[names[0]] if len(names) == 1 and names[0] not in wanted.fields else None
        if isinstance(before, int) and (size is not None) == given:
            near = size if isinstance(size, int) else size.of(before) if size else before * (ratio or Fraction(1))
            unit = math.gcd(before, 64) if option == "ffn" else 1
            about = {(near // unit + i) * unit for i in range(-_VALUES, _VALUES + 1)}
            about |= {before * n for n in range(1, 2 * math.ceil(near / before) + 1)}
            choices.append(sorted((abs(math.log(n / near)), option, int(n)) for n in about if n >= before))
            if Fraction(near).denominator == 1:
                choices[-1].insert(0, (0.0, option, None))  # as it is
    sets = [[one for one in chosen if one[2] is not None] for chosen in itertools.product(*choices)]
    for chosen in sorted(sets, key=lambda chosen: (len(chosen), sum(off for off, _, _ in chosen)))[:_SETS]:
        if chosen:
            yield replace(wanted, **{option: n for _, option, n in chosen})
