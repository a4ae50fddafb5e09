"""Shapes for a number of parameters: wider, deeper or both, near the model's own proportions, and all lossless.

Parameters are affine in the number of layers, and in the width a quadratic through 0. Four plans give all coefficients,
so the shapes near a budget are computed. Each proposed shape is planned, and the type check then proves it lossless.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import cast

from lemonx import architectures
from lemonx.checkpoints import Checkpoint
from lemonx.checkpoints.plain import JsonValue
from lemonx.errors import BadTarget, LemonxError
from lemonx.guards.results import Result
from lemonx.options.declared import Growth
from lemonx.options.sizes import Relative, parse_count
from lemonx.planning import advice
from lemonx.planning.plan import Plan
from lemonx.planning.request import Target, asked
from lemonx.planning.summary import flops, human, parameters
from lemonx.workflows.planning import plan_growth

# How far from the budget a shape may be; how many shapes are proposed; how many widths are tried.
_NEAR, _MOST, _WIDTHS = 0.1, 6, 12
# How far from the source's proportions: twice as wide for its depth, or half as wide.
_FAR = math.log(2) + 1e-6


@dataclass(frozen=True, repr=False)
class Shape(Result, printer="plan:print_shape"):
    """A growth that a budget allows: what to ask for, and the plan.

    `proportion`: its width per layer in terms of the source's, so 1 has the source's proportions.
    """

    target: Target
    plan: Plan
    proportion: float

    @property
    def distance(self) -> float:
        """How far it is from the source's proportions, as a logarithm."""
        return abs(math.log(self.proportion))

    @property
    def parameters(self) -> int:
        return parameters(self.plan)[1]

    @property
    def flops(self) -> int:
        """Per token or image."""
        return flops(self.plan)[1]

    @property
    def options(self) -> str:
        """The sizes as options of `lemonx expand`."""
        family, config = self.plan.family, self.plan.family.config(self.plan.target_config)
        family.build(config)
        return advice.options(self.target, family, config)

    def as_dict(self) -> dict[str, JsonValue]:
        return {"options": self.options, "parameters": self.parameters, "flops": self.flops}


def parse_budget(text: int | str, before: int) -> int:
    """A number of parameters: 1500000, "350M", "1.5B", or "2x" in terms of the source's.

    Examples:
        >>> parse_budget("1.5B", 0), parse_budget("2x", 1000)
        (1500000000, 2000)
    """
    times = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,9})?) ?[xX]", str(text).strip())
    wanted = int(Fraction(times[1]) * before) if times else parse_count(str(text))
    if wanted is None:
        raise BadTarget(f"--params {str(text)[:40]} is not a number of parameters", "write it as 350M, 1.5B or 2x")
    if wanted <= before:
        raise BadTarget(
            f"--params {text} is not more than the source's {human(before)}",
            "lemonx only grows models, so ask for more",
        )
    return wanted


def shapes(checkpoint: Checkpoint, growth: Growth, budget: int | str) -> list[Shape]:
    """The shapes near a number of parameters and the source's proportions, the nearest first; a given size stays.

    BadTarget if there are none.
    """
    given = asked(growth)
    if any((given.heads, given.kv_heads, given.ffn, given.like)) or given.fields:
        raise BadTarget("--params chooses heads, ffn and other sizes itself", "give it with --width or --depth at most")
    search = _Search(checkpoint, growth, given)
    wanted = parse_budget(budget, search.before)
    found = sorted(search.around(wanted), key=lambda shape: search.off(shape, wanted))
    if not found:
        raise BadTarget(
            f"no lossless shape near {human(wanted)} parameters was found", "give --width and --depth yourself"
        )
    near = [shape for shape in found if search.is_near(shape, wanted)]
    if not near:
        best = found[0]
        where = "near the source's proportions" if given == Target() else "with the sizes given"
        raise BadTarget(
            f"no lossless shape {where} has {human(wanted)} parameters within {_NEAR:.0%}",
            f"the nearest is {best.options}, with {human(best.parameters)}",
        )
    return near[:_MOST]


@dataclass(frozen=True)
class _Line:
    """The parameters at one width: `low` for the source's layers, and `per` for every step of depth."""

    low: float
    per: float

    def steps(self, wanted: int) -> float:
        return max(0.0, (wanted - self.low) / self.per) if self.per else 0.0


class _Search:
    """Computes which widths and depths meet a budget, and plans them."""

    def __init__(self, checkpoint: Checkpoint, growth: Growth, asked: Target) -> None:
        self.checkpoint, self.growth, self.asked = checkpoint, growth, asked
        self.family = architectures.find(checkpoint.config)
        self.config = self.family.config(checkpoint.config)
        self.spec = self.family.build(self.config)  # from here on the config knows which fields this model has
        self.before = sum(info.numel for info in checkpoint.tensors.values())
        depths = [self.config[name] for name in self.family.sizes.get("depth", ()) if name in self.config.asked]
        self.listed = any(isinstance(depth, list) for depth in depths)
        self.period = math.lcm(1, *(stack.period for stack in self.spec.stacks.values()))
        # How much one step of depth adds, in terms of the source's layers.
        self.deepens = 1.0 if self.listed else self.period * len(depths) / (sum(self.sizes("depth")) or 1)

    def sizes(self, *options: str) -> list[int]:
        """The source's sizes behind these options, lists flattened."""
        names = [name for option in options for name in self.family.sizes.get(option, ()) if name in self.config.asked]
        return [int(number) for name in names for number in _numbers(self.config[name])]

    def around(self, wanted: int) -> Iterator[Shape]:
        """The shape nearest to the budget at each width that is tried."""
        asked = self.asked
        one = self.line(asked)
        if asked.width:
            if one is None:  # why it cannot be, in the words of the plan
                plan_growth(self.checkpoint, self.growth, asked, solve=False)
            yield from self.nearest(asked, one, wanted)
            return
        two = self.line(self.wider(asked, Fraction(2)))
        if one is None or two is None:
            yield from self.nearest(asked, one, wanted)
            return
        units = self.sizes("heads", "kv_heads") or [math.gcd(*self.sizes("width"), 8)]
        whole = math.gcd(*units)  # heads stay whole at multiples of 1/whole

        def at(j: int) -> _Line:
            factor = j / whole
            return _Line(_quadratic(one.low, two.low, factor), _quadratic(one.per, two.per, factor))

        def wide(j: int) -> float:
            """Grows with the width: the proportion where the depth is free, else the part of the budget."""
            line = at(j)
            return j / whole / (1 + self.deepens * line.steps(wanted)) if line.per else line.low / wanted

        least, most = (math.exp(-_FAR), math.exp(_FAR)) if one.per else (1 - _NEAR, 1 + _NEAR)
        every = range(whole, 2 + 2 * whole * max(1, math.ceil(wanted / one.low)))
        fits = every[bisect_left(every, least, key=wide) : bisect_right(every, most, key=wide)]
        near = bisect_left(every, 1.0, key=wide)
        step = 1 << max(0, math.ceil(math.log2(max(1, len(fits)) / _WIDTHS)))
        tried = range(-(-fits.start // step) * step, fits.stop, step)  # round widths
        outward = [every[near + i] for n in range(_WIDTHS) for i in (n, -n) if 0 <= near + i < len(every)]
        found = False
        for j in dict.fromkeys((*tried, *outward)):
            # Beyond the widths that should do, only if none of them does.
            if j in tried or not found:
                for shape in self.nearest(self.wider(asked, Fraction(j, whole)), at(j), wanted):
                    found = found or self.is_near(shape, wanted)
                    yield shape

    def off(self, shape: Shape, wanted: int) -> float:
        """Return the distance from the budget, and from the source's proportions unless sizes were given."""
        bent = 0.0 if self.asked != Target() else shape.distance / _FAR
        return abs(math.log(shape.parameters / wanted)) / math.log(1 + _NEAR) + bent

    def is_near(self, shape: Shape, wanted: int) -> bool:
        kept = self.asked != Target() or shape.distance <= _FAR
        return kept and abs(shape.parameters - wanted) <= _NEAR * wanted

    def wider(self, asked: Target, factor: Fraction) -> Target:
        """The source times a factor; an inner size of the MLP that is then no whole number is rounded to a near one."""
        if factor == 1:
            return asked
        inner = self.sizes("ffn")
        ffn = None
        if any((size * factor).denominator != 1 for size in inner) and len(set(inner)) == 1:
            unit = math.gcd(inner[0], 64)
            ffn = max(inner[0], round(inner[0] * factor / unit) * unit)
        return replace(asked, width=Relative(times=factor), ffn=ffn)

    def deeper(self, target: Target, steps: int) -> Target:
        more = Relative(times=Fraction(1 + steps)) if self.listed else Relative(plus=steps * self.period)
        return replace(target, depth=more) if steps else target

    def line(self, target: Target) -> _Line | None:
        """Return the parameters of a width by its depth, from plans; None without a lossless plan."""
        if target.depth is None:
            first, second = (self.planned(self.deeper(target, steps)) for steps in (1, 2))
            if first and second:
                return _Line(2 * first.parameters - second.parameters, second.parameters - first.parameters)
        shape = self.planned(target)
        if shape is None:
            return _Line(self.before, 0) if target == Target() else None
        return _Line(shape.parameters, 0)

    def nearest(self, target: Target, line: _Line | None, wanted: int) -> Iterator[Shape]:
        """A width with as many layers as come nearest to the budget."""
        steps = line.steps(wanted) if line else 0
        found = [self.planned(self.deeper(target, count)) for count in sorted({math.floor(steps), math.ceil(steps)})]
        lossless = [shape for shape in found if shape]
        if lossless:
            yield min(lossless, key=lambda shape: abs(math.log(shape.parameters / wanted)))

    def planned(self, target: Target) -> Shape | None:
        """The shape, if it is lossless; other methods than LEMON may have shapes that are not."""
        try:
            plan = plan_growth(self.checkpoint, self.growth, target, solve=False)
        except LemonxError:
            return None
        if plan.chosen:  # not in the source's proportions
            return None
        if plan.policy.lossless or plan.policy.method != "lemon":
            return Shape(target, plan, self.proportion(plan))
        return None

    def proportion(self, plan: Plan) -> float:
        new = plan.family.config(plan.target_config)
        grown: list[float] = []
        for option in ("width", "depth"):
            names = [name for name in self.family.sizes.get(option, ()) if name in self.config.asked]
            pairs = [(sum(_numbers(self.config[name])), sum(_numbers(new[name]))) for name in names]
            before, after = sum(a for a, _ in pairs) or 1, sum(b for _, b in pairs) or 1
            grown.append(after / before)
        return grown[0] / grown[1]


def _numbers(value: object) -> list[float]:
    """The numbers of a field: one, or those of a list."""
    listed = cast("list[object]", value) if isinstance(value, list) else [value]
    return [float(number) for number in listed if isinstance(number, int | float)]


def _quadratic(one: float, two: float, factor: float) -> float:
    """Return a x + b x^2 at a factor, given its values at 1 and 2."""
    square = (two - 2 * one) / 2
    return (one - square) * factor + square * factor**2
