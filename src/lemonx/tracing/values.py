"""What a run of a model knows of its tensors: axes, where they come from, and what their numbers are known to be."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from lemonx.tracing.axes import Axis, say

# (name of a parameter, number of its axis)
Origin = tuple[str, int]


@dataclass(eq=False)
class Token:
    """The numbers of a tensor: tensors that hold the same ones have one token.

    `positive`: none is below zero. `pieces`: what it was joined of along the axis `along`, as (start, stop) of each,
    and the streams that each of them still equals.
    """

    positive: bool = False
    along: int = 0
    pieces: dict[tuple[int, int], tuple[Carry, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Carry:
    """A tensor equals another one, the token's, once these parameters are zero and these norms have no affine part.

    `norms` are those passed on the way, in order; `ends`: the last one's output is this tensor, nothing was added.
    `ones`: parameters of one number that it was multiplied by, and that must be one.
    """

    token: Token
    silent: frozenset[str] = frozenset()
    ones: frozenset[str] = frozenset()
    norms: tuple[Norm, ...] = ()
    ends: bool = True

    def plus(self, silent: frozenset[str]) -> Carry:
        """Behind an addition of what is zero without these parameters."""
        return replace(self, silent=self.silent | silent, ends=False)

    def times(self, one: str) -> Carry:
        """Behind a multiplication by a parameter of one number."""
        return replace(self, ones=self.ones | {one}, ends=False)

    def within(self, whole: Carry) -> Carry:
        """A piece of what was joined of several, behind what was done to the whole."""
        ends = whole.ends and (bool(whole.norms) or self.ends)
        norms = (*self.norms, *whole.norms)
        return replace(self, silent=self.silent | whole.silent, ones=self.ones | whole.ones, norms=norms, ends=ends)

    def through(self, norm: Norm) -> Carry:
        """Behind a norm."""
        return replace(self, norms=(*self.norms, norm), ends=True)


@dataclass(eq=False)
class Norm:
    """A norm that was run: its kind (`layer`, `rms`, `group`), what it reads, and what it writes behind gain and bias.

    `raw`: what it writes before them. `bare`: that was used as it is. `axes`: which axes of its input it was over, of
    which `reads` is the last.
    """

    kind: str
    reads: Axis
    raw: Axis
    eps: float
    path: str
    place: str
    writes: Axis | None = None
    gain: str | None = None
    bias: str | None = None
    offset: float = 0.0
    bare: bool = False
    groups: int = 0

    @property
    def out(self) -> Axis:
        return self.writes if self.writes is not None else self.raw


@dataclass(eq=False)
class MeansUsed:
    """Means over axes that something other than a norm uses, in the module `path`; `all` has those of every module."""

    path: str
    all: list[tuple[Axis, str, bool]]

    def add(self, axis: Axis, *, squares: bool) -> None:
        if (axis, self.path, squares) not in self.all:
            self.all.append((axis, self.path, squares))


class Value:
    """What the numbers of a tensor are known to be, as long as only operations that know it use them."""

    def leak(self, why: str) -> None:
        """Note what follows for the axes if any other operation uses them."""


@dataclass(eq=False)
class Square(Value):
    """The square of a tensor; its root mean is a norm's, anything else sees single entries."""

    token: Token
    axes: list[Axis | None]
    centred: Centred | None = None

    def leak(self, why: str) -> None:
        for axis in self.axes:
            say(axis, "act", why)


@dataclass(eq=False)
class Mean(Value):
    """The mean of a tensor over one axis."""

    token: Token
    axis: Axis
    noted: MeansUsed

    def leak(self, why: str) -> None:
        self.noted.add(self.axis, squares=False)


@dataclass(eq=False)
class Centred(Value):
    """A tensor less its mean over one axis."""

    token: Token
    axis: Axis
    noted: MeansUsed

    def leak(self, why: str) -> None:
        self.noted.add(self.axis, squares=False)


@dataclass(eq=False)
class Spread(Value):
    """The mean square over one axis, of a tensor (`rms`) or of one less its mean (`layer`); plus `eps`.

    `token`: the tensor it is of. `state`: `square`, its `root`, or what is to be multiplied with, `inverse`.
    """

    kind: str
    token: Token
    axis: Axis
    noted: MeansUsed
    eps: float = 0.0
    state: str = "square"

    def leak(self, why: str) -> None:
        self.noted.add(self.axis, squares=True)


@dataclass(eq=False)
class Length(Value):
    """The length of a tensor's vectors along one axis, or its `square`."""

    token: Token
    axis: Axis
    square: bool = False

    def leak(self, why: str) -> None:
        say(self.axis, "fixed", f"{why}: its length is used")


@dataclass(eq=False)
class Lengths(Value):
    """The lengths of a parameter's vectors over its axes `over`; or the parameter `gain` divided by them."""

    parameter: str
    over: frozenset[int]
    axes: list[Axis | None]
    gain: str | None = None

    def leak(self, why: str) -> None:
        for axis in self.axes:
            say(axis, "fixed", f"{why}: the length of a weight is used")


@dataclass(frozen=True)
class WeightNorm:
    """A weight that a parameter is the direction of: divided by its lengths over these axes, times a `gain`.

    `weight`: what stands for the product where it is noted which axes of it are read, and which written.
    """

    direction: str
    gain: str
    over: frozenset[int]

    @property
    def weight(self) -> str:
        return f"{self.direction} at its length"


@dataclass(eq=False)
class Chosen(Value):
    """Single entries chosen from these axes: harmless as long as they are only counted."""

    axes: list[Axis | None]
    how: str = "entries of it are chosen"

    def leak(self, why: str) -> None:
        for axis in self.axes:
            say(axis, "fixed", f"{why}: {self.how}")


@dataclass(eq=False)
class Normed(Value):
    """What a norm wrote, before its gain (`raw`) or behind it."""

    norm: Norm
    raw: bool

    def leak(self, why: str) -> None:
        if self.raw:
            self.norm.bare = True


@dataclass(eq=False)
class Pair:
    """Two axes that were multiplied and summed, entry by entry: queries and keys, in the module `path`. `factors`: what
    the sums were multiplied by before anything else used them."""

    first: Axis
    second: Axis
    place: str
    path: str
    factors: set[float] = field(default_factory=set)


@dataclass(eq=False)
class Dot(Value):
    """Such a sum, times a factor."""

    pair: Pair
    factor: float = 1.0

    def leak(self, why: str) -> None:
        self.pair.factors.add(self.factor)


@dataclass(eq=False)
class Branch(Value):
    """What a map wrote of a tensor, the token's; or what a second one wrote of that, behind an activation.

    `maps`: these one or two weights. `acted`: it is behind an activation that can pass a number on.
    """

    token: Token
    maps: tuple[str, ...]
    acted: bool = False


@dataclass(eq=False)
class Info:
    """A tensor that derives from parameters.

    `weight`: from parameters alone, with the axes of parameters that each of its axes is in `origins`; `linear`: it is
    a linear function of them, up to an `offset`; `rows`: one vector, or vectors repeated for every example, which a map
    reads as it does an activation. `silent`: parameters without which it is zero. `carries`: the tensors
    that blocks were given and that this one still equals. `shaped`: the token of the tensor that it is a view of.
    """

    axes: list[Axis | None]
    weight: bool = False
    linear: bool = True
    rows: bool = False
    origins: tuple[frozenset[Origin], ...] = ()
    offset: float = 0.0
    value: Value | None = None
    token: Token = field(default_factory=Token)
    shaped: Token | None = None
    carries: tuple[Carry, ...] = ()
    silent: frozenset[str] | None = None
    version: int | None = None

    @property
    def flat(self) -> Token:
        """The same for all tensors that hold the same numbers in the same order, in whatever shape."""
        return self.shaped or self.token

    @property
    def parameter(self) -> str | None:
        """The one parameter that it is, moved about at most."""
        names = {name for origin in self.origins for name, _ in origin}
        return names.pop() if self.weight and self.linear and len(names) == 1 else None


def shape_of(info: Info) -> list[int]:
    """The shape of a tensor, by its axes."""
    return [1 if axis is None else axis.size for axis in info.axes]
