"""Spaces: the named axes of a model's activations, and how each kind of them expands."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Space:
    """A named axis of activations: its size, how it expands, and at how many positions it is computed.

    `positions` counts tokens or pixels per example, for FLOPs. `under` names the space of key-value heads
    that these query heads belong to: a query head can only sit under a copy of its own key-value head.
    `like` names the space whose expansion this is too. `scale` is what its entries are multiplied by before they
    are read, by a rule of the model that a larger one computes anew (the square root of a width, say).
    `rotary`: so many first entries turn in pairs, each pair at a speed of its own; `adjacent` pairs are (0, 1),
    (2, 3), ..., others are half of the turning entries apart. `linear`: no nonlinearity sees single entries.
    `still`: why it cannot grow, if it cannot. `chosen`: a router sends each token to so many of these units, which
    share a weight of one if `renormalised`, and whose scores have a bias if `biased`. `within`: every unit of that
    space has these units for itself. `calm`: the nonlinearities that see single entries take zero to zero. `passes`:
    the activation of these units has act(a) - act(-a) = a. `padded` names the space that is added to this one as it is,
    between zeros on both sides (one more behind, where they are odd), so that its units stand in the middle.
    """

    size: int
    kind: str
    positions: int = 1
    under: str | None = None
    like: str | None = None
    scale: float = 1.0
    rotary: int = 0
    adjacent: bool = False
    linear: bool = False
    still: str = ""
    chosen: int = 0
    renormalised: bool = False
    biased: bool = False
    within: str | None = None
    calm: bool = False
    passes: bool = False
    padded: str | None = None


def avg(size: int, positions: int = 1) -> Space:
    """A stream that a LayerNorm reads: the remainder holds the mean, which changes no mean."""
    return Space(size, "avg", positions)


def zero(size: int, positions: int = 1, *, scale: float = 1.0, linear: bool = False) -> Space:
    """A stream that an RMSNorm reads, or what a norm writes: the remainder holds zeros."""
    return Space(size, "zero", positions, scale=scale, linear=linear)


def unscaled(size: int, positions: int = 1) -> Space:
    """What a scale for every channel turns into a stream that a LayerNorm reads: the remainder then holds the mean."""
    return Space(size, "scaled", positions)


# Activations with act(0) = 0 and no weights, as transformers names them.
CALM = frozenset(
    ("gelu", "gelu_10", "gelu_accurate", "gelu_fast", "gelu_new", "gelu_python", "gelu_python_tanh",
     "gelu_pytorch_tanh", "hardswish", "leaky_relu", "linear", "mish", "quick_gelu", "relu", "relu2", "relu6", "silu",
     "swish", "tanh")
)  # fmt: skip
# Activations with act(a) - act(-a) = a, as transformers names them.
PAIRED = frozenset({"gelu", "gelu_new", "gelu_pytorch_tanh", "gelu_fast", "quick_gelu", "relu", "silu", "swish"})


def circ(size: int, positions: int = 1, *, act: str = "", within: str | None = None) -> Space:
    """Units (neurons, heads, channels): each may pass a nonlinearity, so each extra one is a copy.

    `act`: its name, where two units can then pass a number on as it is. `within`: every expert has as many, and may be
    split into several that share them.
    """
    return Space(size, "circ", positions, passes=act in PAIRED, within=within)


def iso(size: int, positions: int = 1) -> Space:
    """Units whose copies share one unit's energy: what an RMSNorm over heads reads at any head count."""
    return Space(size, "iso", positions)


def fresh(size: int, positions: int = 1) -> Space:
    """Units of which new ones hold anything and nobody reads them yet: tokens, positions, entries of a value."""
    return Space(size, "fresh", positions)


def grouped(size: int, under: str, kind: str = "circ", *, calm: bool = False) -> Space:
    """Query heads, in equal groups under the key-value heads of the space `under`."""
    return Space(size, kind, under=under, calm=calm)


def alibi(size: int) -> Space:
    """Heads with a linear bias each, its slope fixed by the number of heads: a head keeps its slope, others are new."""
    return Space(size, "alibi")


def scaled(like: Space, name: str, by: float) -> Space:
    """What becomes the space `name` when it is multiplied by `by`: embeddings times the root of the width."""
    return replace(like, like=name, scale=by, linear=True)


def query(size: int, *, scale: float | None = None, **fields: Any) -> Space:
    """The entries of a query, new ones zero; scores are scaled by size^-1/2 unless `scale` says by what.

    `fields` are those of a Space that say which entries turn, or why none can be added.
    """
    return Space(size, "zero", scale=size**-0.5 if scale is None else scale, linear=True, **fields)


def key(size: int, *, normed: bool = False, **fields: Any) -> Space:
    """The entries of a key; new ones hold anything, since those of the query are zero, but zero if a norm sees them."""
    return Space(size, "zero" if normed else "fresh", linear=True, **fields)


def experts(size: int, chosen: int, *, renormalised: bool = False, biased: bool = False) -> Space:
    """Experts of which a router picks `chosen`: all are copied equally often, and as many times more are picked.

    Where the weights of those picked sum to one (`renormalised`), experts that are never picked may be added, and a
    single one may become any number. `biased`: the router's scores have a bias.
    """
    return Space(size, "circ", chosen=chosen, renormalised=renormalised, biased=biased)
