"""Spaces: the named axes of a model's activations. Each type of space knows how it grows (`expand_to`).

    Stream       what norms read and write: new entries hold the mean, or zeros
    Scaled       a stream in front of a factor that the model multiplies it by
    Units        neurons, heads, channels, tokens: a new one duplicates an old one, or nobody reads it yet
    Grouped      query heads, each under its own key-value head
    Padded       channels to which a narrower space is added between zeros
    ExpertUnits  the neurons of every expert, which may be shared out among several experts
    Entries      entries of a query, a key or a projection, which only linear maps and dot products see
    Experts      what a router chooses from

Tables call the functions at the end (`avg`, `zero`, `circ`, ...), which are named after the paper's expansions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field

import numpy as np

from lemonx.algebra.expansions import Expansion, expansion
from lemonx.algebra.runs import Fill
from lemonx.checkpoints.folder import CONFIG
from lemonx.errors import BadCheckpoint, Refused
from lemonx.guards.limits import LARGEST
from lemonx.specs.space_expansions import (
    entries_expansion,
    experts_expansion,
    grouped_expansion,
    padded_expansion,
    share_of,
)

# The kind of space that a router chooses from.
EXPERTS = "experts"


@dataclass(frozen=True)
class Growth:
    """What a space may ask of the others when it grows: the spaces of source and target, and what has grown so far.

    `kinds`: for a method that is not lossless, the kind that it uses instead of each kind.
    """

    source: Mapping[str, Space] = field(default_factory=dict)
    target: Mapping[str, Space] = field(default_factory=dict)
    grown: Mapping[str, Expansion] = field(default_factory=dict)
    kinds: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Space:
    """A named axis of activations.

    `kind` names the expansion that it grows by. `positions`: the number of tokens or pixels per example at which it is
    computed, for FLOPs. `scale`: the factor by which the model multiplies its entries before they are read, where that
    factor depends on a size (the square root of a width). `like`: another space, whose expansion it shares. `still`:
    why it cannot grow, if it cannot.
    """

    size: int
    kind: str
    _: KW_ONLY
    positions: int = 1
    scale: float = 1.0
    like: str | None = None
    still: str = ""

    # A nonlinearity may see single entries, unless a norm reads or writes them.
    is_linear = False
    # The nonlinearities that see single entries take zero to zero.
    calm = False
    # Nothing but a weighted mean over positions lies between who writes its entries and who reads them.
    is_averaged = False

    def expand_to(self, target: Space, growth: Growth) -> Expansion:
        """The expansion to the size of `target`; Refused if there is none that is lossless."""
        if self.still and target.size != self.size:
            raise Refused(self.still, f"keep it at {self.size}")
        return self._expand_to(target, growth, growth.kinds.get(self.kind, self.kind))

    def _expand_to(self, target: Space, growth: Growth, kind: str) -> Expansion:
        return expansion(kind, self.size, target.size)

    def parts(self, target: Space, growth: Growth) -> int:
        """Into how many equal spaces it is shared out."""
        return 1

    def problems(self, name: str) -> Iterator[BadCheckpoint]:
        """What config.json says of it that cannot be."""
        yield from _wrong_count(self.positions, "positions per example", LARGEST)
        if not 0 < abs(self.scale) < math.inf:
            yield BadCheckpoint(f"scales {name} by {self.scale}", "use a number other than 0", file=CONFIG)


def _wrong_count(number: int, what: str, most: int) -> Iterator[BadCheckpoint]:
    # A config may hold anything, so the annotations of what is computed from it prove nothing.
    if type(number) is not int or not 0 <= number <= most:
        yield BadCheckpoint(f"asks for {number!r} {what}", f"use a whole number up to {most}", file=CONFIG)


@dataclass(frozen=True)
class Stream(Space):
    """What norms read and write."""


@dataclass(frozen=True)
class Scaled(Stream):
    """A stream in front of the factor that makes it the space `like`."""

    is_linear = True


@dataclass(frozen=True)
class Units(Space):
    """Neurons, heads, channels, tokens. `passes`: their activation has act(a) - act(-a) = a."""

    _: KW_ONLY
    passes: bool = False
    calm: bool = False


@dataclass(frozen=True)
class Values(Units):
    """Entries of a head's value. What is read is their mean over positions, weighted, so where they are zero it is."""

    is_averaged = True


@dataclass(frozen=True)
class Grouped(Units):
    """Query heads in equal groups: each can only sit under a copy of its own key-value head, in the space `under`."""

    _: KW_ONLY
    under: str

    def _expand_to(self, target: Space, growth: Growth, kind: str) -> Expansion:
        return grouped_expansion(self.size, target.size, growth.grown[self.under], kind)


@dataclass(frozen=True)
class Padded(Units):
    """Channels to which the space `inner` is added as it is, between zeros on both sides: its units are in the middle.

    Where the number of zeros is odd, there is one more behind.
    """

    _: KW_ONLY
    inner: str

    def _expand_to(self, target: Space, growth: Growth, kind: str) -> Expansion:
        return padded_expansion(self.size, target.size, growth.grown[self.inner])


@dataclass(frozen=True)
class ExpertUnits(Units):
    """Neurons that every unit of the space `within` has for itself."""

    _: KW_ONLY
    within: str

    def parts(self, target: Space, growth: Growth) -> int:
        """Into how many experts each is split, its neurons being shared out among them; 1 if it is not.

        All parts of an expert are chosen together, each with its share of the weight, so each writes that much more.
        """
        before, after = growth.source[self.within], growth.target[self.within]
        if not isinstance(before, Experts) or not isinstance(after, Experts):
            return 1
        times, rest = divmod(after.size, before.size)
        whole = not rest and after.chosen == times * before.chosen
        return times if whole and times > 1 and target.size * times == self.size else 1

    def _expand_to(self, target: Space, growth: Growth, kind: str) -> Expansion:
        times = self.parts(target, growth)
        return share_of(self.size, 0, times) if times > 1 else super()._expand_to(target, growth, kind)


@dataclass(frozen=True)
class Rotary:
    """How many first entries of a head turn in pairs, and why no entry can be added, if none can.

    `adjacent` pairs are (0, 1), (2, 3), ...; others are half of the turning entries apart.
    """

    turning: int = 0
    adjacent: bool = False
    still: str = ""


@dataclass(frozen=True)
class Entries(Space):
    """Entries of a query, a key or a projection: one copy, and new ones hold zeros, or anything."""

    _: KW_ONLY
    turns: Rotary = field(default_factory=Rotary)
    is_linear = True

    def _expand_to(self, target: Space, growth: Growth, kind: str) -> Expansion:
        turning = target.turns.turning if isinstance(target, Entries) else 0
        # Entries turn at speeds of their own, so a lossy method cannot use another kind of expansion for them either.
        return entries_expansion(
            self.kind, (self.size, target.size), (self.turns.turning, turning), adjacent=self.turns.adjacent
        )

    def problems(self, name: str) -> Iterator[BadCheckpoint]:
        yield from super().problems(name)
        yield from _wrong_count(self.turns.turning, "rotary entries per head", self.size)


@dataclass(frozen=True)
class Placed(Space):
    """Numbers that a model computes by itself, and that maps read. `at`: where it has those of a smaller one."""

    kind: str = "fresh"
    _: KW_ONLY
    at: tuple[int, ...] = ()
    is_linear = True

    def _expand_to(self, target: Space, growth: Growth, kind: str) -> Expansion:
        assert isinstance(target, Placed)
        source = np.full(target.size, int(Fill.RAND))
        source[list(target.at)] = np.arange(self.size)
        return Expansion(self.size, source, np.ones(target.size))


@dataclass(frozen=True)
class Experts(Space):
    """Experts of which a router chooses so many for a token.

    `renormalised`: the weights of those chosen sum to one; `biased`: the router's scores have a bias.
    """

    _: KW_ONLY
    chosen: int
    renormalised: bool = False
    biased: bool = False
    is_linear = True  # a router chooses them by their scores

    def _expand_to(self, target: Space, growth: Growth, kind: str) -> Expansion:
        assert isinstance(target, Experts)
        if kind != self.kind:  # for a method that is not lossless
            return expansion(kind, self.size, target.size)
        sizes, chosen = (self.size, target.size), (self.chosen, target.chosen)
        return experts_expansion(sizes, chosen, renormalised=self.renormalised, biased=self.biased)

    def problems(self, name: str) -> Iterator[BadCheckpoint]:
        yield from super().problems(name)
        if type(self.chosen) is int and self.chosen > self.size:
            found = f"asks for {self.chosen} of {self.size} {name} per token"
            yield BadCheckpoint(found, f"use a whole number up to {self.size}", file=CONFIG)
        yield from _wrong_count(self.chosen, f"{name} per token", self.size)


def avg(size: int, positions: int = 1) -> Stream:
    """A stream that a LayerNorm reads: the remainder holds the mean, which changes no mean."""
    return Stream(size, "avg", positions=positions)


def zero(size: int, positions: int = 1, *, scale: float = 1.0) -> Stream:
    """A stream that an RMSNorm reads, or what a norm writes: the remainder holds zeros."""
    return Stream(size, "zero", positions=positions, scale=scale)


def unscaled(size: int, positions: int = 1) -> Stream:
    """A branch in front of a scale for every channel, which makes its remainder the mean that a LayerNorm reads."""
    return Stream(size, "scaled", positions=positions)


def scaled(space: Space, name: str, by: float) -> Scaled:
    """A space that the model multiplies by `by` to get the space `name`: embeddings times the root of the width."""
    return Scaled(space.size, space.kind, positions=space.positions, like=name, scale=by)


# Activations with act(0) = 0 and no weights, as transformers names them.
CALM = frozenset(
    ("gelu", "gelu_10", "gelu_accurate", "gelu_fast", "gelu_new", "gelu_python", "gelu_python_tanh",
     "gelu_pytorch_tanh", "hardswish", "leaky_relu", "linear", "mish", "quick_gelu", "relu", "relu2", "relu6", "silu",
     "swish", "tanh")
)  # fmt: skip
# Activations with act(a) - act(-a) = a, as transformers names them.
PAIRED = frozenset({"gelu", "gelu_new", "gelu_pytorch_tanh", "gelu_fast", "quick_gelu", "relu", "silu", "swish"})


def circ(size: int, positions: int = 1, *, act: str = "", within: str | None = None) -> Units:
    """Units (neurons, heads, channels): each may pass a nonlinearity, so each extra one is a copy.

    `act`: its name, where two units can then pass a number on as it is. `within`: every expert has as many, and may be
    split into several that share them.
    """
    if within is not None:
        return ExpertUnits(size, "circ", positions=positions, passes=act in PAIRED, within=within)
    return Units(size, "circ", positions=positions, passes=act in PAIRED)


def iso(size: int, positions: int = 1) -> Units:
    """Units whose copies share one unit's energy: what an RMSNorm over heads reads at any head count."""
    return Units(size, "iso", positions=positions)


def fresh(size: int, positions: int = 1) -> Units:
    """Units of which new ones hold anything and nobody reads them yet: tokens, positions."""
    return Units(size, "fresh", positions=positions)


def values(size: int, positions: int = 1) -> Values:
    """Entries of a head's value; new ones hold anything, and nobody reads them yet."""
    return Values(size, "fresh", positions=positions)


def silent(size: int, *, calm: bool) -> Units:
    """Units of which new ones are zero; `calm`: the nonlinearity that they pass takes zero to zero."""
    return Units(size, "zero", calm=calm)


def unread(size: int) -> Units:
    """Units of which further ones, behind whole copies, hold anything: what they multiply is zero."""
    return Units(size, "rand")


def grouped(size: int, under: str, kind: str = "circ", *, calm: bool = False) -> Grouped:
    """Query heads, in equal groups under the key-value heads of the space `under`."""
    return Grouped(size, kind, under=under, calm=calm)


def padded(size: int, inner: str, positions: int = 1) -> Padded:
    """Channels to which those of the space `inner` are added between zeros."""
    return Padded(size, "circ", positions=positions, inner=inner)


def alibi(size: int) -> Units:
    """Heads with a linear bias each, its slope fixed by the number of heads: a head keeps its slope, others are new."""
    return Units(size, "alibi")


def query(size: int, turns: Rotary | None = None, *, scale: float | None = None, positions: int = 1) -> Entries:
    """The entries of a query, new ones zero; scores are scaled by size^-1/2 unless `scale` says by what."""
    turns = turns or Rotary()
    by: float = size**-0.5 if scale is None else scale
    return Entries(size, "zero", positions=positions, scale=by, still=turns.still, turns=turns)


def key(size: int, turns: Rotary | None = None, *, normed: bool = False, positions: int = 1) -> Entries:
    """The entries of a key; new ones hold anything, since those of the query are zero, but zero if a norm sees them."""
    turns = turns or Rotary()
    return Entries(size, "zero" if normed else "fresh", positions=positions, still=turns.still, turns=turns)


def projection(size: int) -> Entries:
    """What linear maps alone write and read: new entries hold zeros."""
    return Entries(size, "zero")


def experts(size: int, chosen: int, *, renormalised: bool = False, biased: bool = False) -> Experts:
    """Experts of which a router picks `chosen`: all are copied equally often, and as many times more are picked.

    Where the weights of those picked sum to one (`renormalised`), experts that are never picked may be added, and a
    single one may become any number. `biased`: the router's scores have a bias.
    """
    return Experts(size, EXPERTS, chosen=chosen, renormalised=renormalised, biased=biased)
