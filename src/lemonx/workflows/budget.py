"""Shapes for a number of parameters: wider, deeper or both, near the model's own proportions, and all lossless.

For every width that leaves heads whole, parameters are affine in the number of layers, so two plans say how many layers
fit. What is proposed has been planned, which the type check allows only if it is lossless.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import cast

from lemonx import architectures
from lemonx.checkpoints import Checkpoint
from lemonx.checkpoints.plain import JsonValue
from lemonx.errors import BadTarget, LemonxError
from lemonx.planning.plan import Plan
from lemonx.planning.request import Target
from lemonx.planning.sizes import Relative, parse_count
from lemonx.planning.summary import flops, human, parameters
from lemonx.specs.config import Config
from lemonx.specs.family import Architecture
from lemonx.workflows.options import GrowthOptions
from lemonx.workflows.planning import plan_growth

# How far from the budget a shape may be; how many shapes are proposed; how many widths are tried.
_NEAR, _MOST, _WIDTHS = 0.1, 6, 14
# How far from the source's proportions: twice as wide for its depth, or half as wide.
_FAR = math.log(2) + 1e-6


@dataclass(frozen=True)
class Shape:
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
        given = [
            ("--width", "width", self.target.width_factor or self.target.width),
            ("--depth", "depth", self.target.depth),
            ("--ffn", "ffn", self.target.ffn),
        ]
        return " ".join(f"{flag} {_shown(family, config, option, size)}" for flag, option, size in given if size)

    def as_dict(self) -> dict[str, JsonValue]:
        return {"options": self.options, "parameters": self.parameters, "flops": self.flops}


def _shown(family: Architecture, config: Config, option: str, size: object) -> str:
    """The number in the target's config, if it is one; else what was asked for, which is relative."""
    values = [config[name] for name in family.sizes.get(option, ()) if name in config.asked]
    if len(set(map(str, values))) == 1 and isinstance(values[0], int):
        return str(values[0])
    return f"{size}x" if isinstance(size, Fraction) else str(size)


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


def shapes(checkpoint: Checkpoint, growth: GrowthOptions, budget: int | str) -> list[Shape]:
    """The shapes near a number of parameters, the cheapest to run first; a width or depth that is given stays.

    BadTarget if there are none.
    """
    asked = growth.sizes
    if any((asked.heads, asked.kv_heads, asked.ffn, asked.like)) or asked.fields:
        raise BadTarget("--params chooses heads, ffn and other sizes itself", "give it with --width or --depth at most")
    search = _Search(checkpoint, growth)
    wanted = parse_budget(budget, search.before)
    found = list(search.around(wanted))
    if not found:
        raise BadTarget(
            f"no lossless shape near {human(wanted)} parameters was found", "give --width and --depth yourself"
        )
    found.sort(key=lambda shape: abs(math.log(shape.parameters / wanted)))
    near = [shape for shape in found if abs(shape.parameters - wanted) <= _NEAR * wanted] or found[:3]
    near.sort(key=lambda shape: shape.distance)
    near = [shape for shape in near if shape.distance <= _FAR] or near[:1]
    return sorted(near[:_MOST], key=lambda shape: (shape.flops, shape.parameters))


class _Search:
    """Tries widths, and for each the depth that meets the budget."""

    def __init__(self, checkpoint: Checkpoint, growth: GrowthOptions) -> None:
        self.checkpoint, self.growth = checkpoint, growth
        self.family = architectures.find(checkpoint.config)
        self.config = self.family.config(checkpoint.config)
        self.spec = self.family.build(self.config)  # from here on the config knows which fields this model has
        self.before = sum(info.numel for info in checkpoint.tensors.values())

    def sizes(self, *options: str) -> list[int]:
        """The source's sizes behind these options, lists flattened."""
        names = [name for option in options for name in self.family.sizes.get(option, ()) if name in self.config.asked]
        return [int(number) for name in names for number in _numbers(self.config[name])]

    def around(self, wanted: int) -> Iterator[Shape]:
        asked = self.growth.sizes
        factors = [None] if asked.width or asked.width_factor else self.factors(wanted)
        for factor in factors:
            target = asked if factor is None else self.wider(asked, factor)
            if asked.depth is not None:
                yield from self.planned(target)
            else:
                yield from self.as_deep(target, wanted)

    def factors(self, wanted: int) -> list[Fraction]:
        """Ratios of widths at which heads stay whole, from 1 to the one that meets the budget alone."""
        units = self.sizes("heads", "kv_heads") or [math.gcd(*self.sizes("width"), 8)]
        step = Fraction(1, math.gcd(*units))
        # The embedding grows with the width, the blocks with its square: between the two lies what the budget allows.
        most = math.floor(Fraction(wanted, self.before) / step)
        ratios = [k * step for k in range(step.denominator, most + 1)]
        every = max(1, math.ceil(len(ratios) / _WIDTHS))
        return ratios[::every]

    def wider(self, asked: Target, factor: Fraction) -> Target:
        """The source times a factor; an inner size of the MLP that is then no whole number is rounded to a near one."""
        if factor == 1:
            return asked
        inner = self.sizes("ffn")
        ffn = None
        if any((size * factor).denominator != 1 for size in inner) and len(set(inner)) == 1:
            unit = math.gcd(inner[0], 64)
            ffn = max(inner[0], round(inner[0] * factor / unit) * unit)
        return replace(asked, width_factor=factor, ffn=ffn)

    def as_deep(self, target: Target, wanted: int) -> Iterator[Shape]:
        """This width with as many layers as meet the budget."""
        listed = any(
            isinstance(self.config[name], list)
            for name in self.family.sizes.get("depth", ())
            if name in self.config.asked
        )
        period = math.lcm(1, *(stack.period for stack in self.spec.stacks.values()))

        def deeper(count: int) -> Target:
            more = Relative(times=Fraction(1 + count)) if listed else Relative(plus=count * period)
            return replace(target, depth=more) if count else target

        low = self.before if target == self.growth.sizes else self.count(target)
        high = self.count(deeper(1))
        if low is None or (low > wanted * (1 + _NEAR) and high is None):
            return
        if high is None or high <= low:
            yield from self.planned(target)
            return
        for count in {max(0, math.floor((wanted - low) / (high - low))), max(0, round((wanted - low) / (high - low)))}:
            yield from self.planned(deeper(count))

    def count(self, target: Target) -> int | None:
        return next((shape.parameters for shape in self.planned(target)), None)

    def planned(self, target: Target) -> Iterator[Shape]:
        """The shape, if it is lossless; other methods than LEMON may have shapes that are not."""
        try:
            plan = plan_growth(self.checkpoint, replace(self.growth, sizes=target), solve=False)
        except LemonxError:
            return
        if plan.policy.lossless or self.growth.method != "lemon":
            yield Shape(target, plan, self.proportion(plan))

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
