"""The free parameters: what losslessness leaves open, as named presets.

Paper: appendix C.4, parameter choices. There D_T <= 2 D_S; with k copies of a unit, all copies but one take what
the paper gives to W_2 (or W_res), and that one takes the rest, so that they always sum to W.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace

from lemonx.errors import BadTarget

# Which copy of an input keeps the rest of a weight: the first, the one with the row's own number among its copies, or
# the first, which in rows that are first copies gives nothing away.
FIRST, OWN, INSIDE = "first", "own", "inside"
# Where added blocks stand.
INTERLEAVED, BEFORE = "interleaved", "before"
PLACEMENTS = (INTERLEAVED, BEFORE, "stacked", "middle")


@dataclass(frozen=True)
class Free:
    """How copies come to differ, how unread entries are filled, and how added blocks are silenced.

    Fan-out of all copies of a unit but one:  W_c = split W/k + Phi;  Phi ~ N(0, phi^2).  The one that is left takes
    the rest: split 1 is even, 0 leaves all on that one, between them it is uneven.
    `rest`: which copy that is. "first": the first one, in every row. "own": in a row that is copy i of its unit, copy
    i (modulo their number), so that the copies are networks side by side that exchange only Phi. "inside": the first
    one; and in a row that is the first copy of its unit it keeps all of W, and the others are 0, so that the source's
    numbers stand in the target as they are, and other entries can be trained while these are kept.
    `relative`: phi is in units of the weight's own spread, the root of its mean square without the pull of outliers (of
    a sample of the rows, if it is large), instead of 1.
    Weights that read zeros (col-rand):       zeta ~ N(0, zeta^2).
    Norm weights on coordinates that are 0:   zeta ~ U(-norm_zeta, norm_zeta).
    Added blocks:  type 1 writes zeros; type 2 writes copies that cancel, with fan-out N(0, cancel^2); type 3 silences
    half of the units where they are written, and the other half where they are read (planning/half_silent.py).
    `append_next`: in types 1 and 3, further heads and neurons come from the next layer instead of being copies.
    `small_gains`: norms of added Post-LN blocks lose less to eps, and write a small stream (algebra/norm_chains.py).
    `placement`: where added blocks stand (planning/depth.py). "interleaved": spread evenly, each right behind the block
    that it copies; "before": each in front of it; "stacked": all on top, in the source's order; "middle": the blocks
    in the middle once more behind themselves.
    `ramp`: added blocks of type 1 are full copies but for what writes the stream; that travels beside the checkpoint,
    and comes in during the first steps of training (execution/ramp.py).
    """

    name: str
    split: float
    phi: float
    depth_type: int
    append_next: bool = False
    zeta: float = 0.02
    norm_zeta: float = 1.0
    cancel: float = 0.02
    placement: str = INTERLEAVED
    small_gains: bool = False
    rest: str = FIRST
    relative: bool = False
    ramp: bool = False

    def share(self, copies: int) -> float:
        """The part of W that each copy takes that does not keep the rest, before Phi."""
        return self.split / copies

    @property
    def is_own(self) -> bool:
        """Whether every row leaves the rest on the copy with its own number."""
        return self.rest == OWN

    @property
    def is_inside(self) -> bool:
        """Whether the first copies of units read what the source's read, from first copies alone."""
        return self.rest == INSIDE


PRESETS = {
    "vision": Free("vision", split=1.0, phi=0.02, depth_type=2),
    "language": Free("language", split=0.0, phi=0.002, depth_type=1, append_next=True),
    "own": Free("own", split=0.0, phi=0.1, depth_type=1, rest=OWN, relative=True),
    "inside": Free("inside", split=0.0, phi=0.002, depth_type=1, append_next=True, rest=INSIDE),
}

# Own copies. Trained without a warm-up they end lower than all of the weight on one copy (the paper's choice for
# language) on a Llama and a ViT (`lemonx compare start`, start-vit), most of all at four times the width; the two are
# level on a BERT (bert) and at widths that are not multiples (start-widths, start-widths-bert, -vit). That choice
# beats the paper's for vision, an even split, on the first two (free-parameters, free-parameters-vit), and is level
# with it on the third (free-parameters-bert).
DEFAULT = "own"

# What the methods before LEMON do: copies share evenly, and stay identical.
EVEN = Free("even", split=1.0, phi=0.0, depth_type=1, zeta=0.0)

# The values that a parameter may have, by its declared type, and what to say of any other.
_KINDS: Mapping[str, tuple[tuple[type, ...], str]] = {
    "str": ((str,), "give a name"),
    "int": ((int,), "give a whole number"),
    "bool": ((bool,), "give true or false"),
    "float": ((float, int), "give a number that is not negative"),
}


def preset(name: str) -> Free:
    if name not in PRESETS:
        raise BadTarget(f"there is no preset {name!r} of free parameters", f"choose one of {', '.join(PRESETS)}")
    return PRESETS[name]


def parse_free(given: str | Mapping[str, object]) -> Free:
    """A preset by name, or a section with the parameters that differ from those of the preset that it is `like`.

    Examples:
        >>> parse_free({"like": "language", "rest": "own", "phi": 0.02}).rest
        'own'
    """
    if isinstance(given, str):
        return preset(given)
    changes = {name: value for name, value in given.items() if name != "like"}
    known = [field.name for field in fields(Free) if field.name != "name"]
    if odd := next((name for name in changes if name not in known), None):
        raise BadTarget(f"{str(odd)[:40]!r} is not a free parameter", f"choose from like, {', '.join(known)}")
    base = preset(str(given.get("like", DEFAULT)))
    return checked(replace(base, **changes))  # pyright: ignore[reportArgumentType]


def as_section(free: str | Mapping[str, object] | Free | None) -> dict[str, object]:
    """Return free parameters as a section that `parse_free` takes: a preset and its changes.

    >>> as_section("language")
    {'like': 'language'}
    """
    if isinstance(free, Free):
        values = asdict(free)
        name = values.pop("name")
        return {"like": name if name in PRESETS else DEFAULT, **values}
    return {"like": free} if isinstance(free, str) else dict(free or {})


def checked(free: Free) -> Free:
    """The same, if every parameter has a value that it can have; BadTarget where one has not."""
    for field in fields(Free):
        value, (kinds, wanted) = getattr(free, field.name), _KINDS[str(field.type)]
        if type(value) not in kinds or (field.type == "float" and not 0 <= value < float("inf")):
            raise BadTarget(f"the free parameter {field.name} is {repr(value)[:40]}", wanted)
    if free.rest not in (FIRST, OWN, INSIDE):
        raise BadTarget(f"the free parameter rest is {free.rest[:40]!r}", f"use {FIRST}, {OWN} or {INSIDE}")
    if free.placement not in PLACEMENTS:
        raise BadTarget(
            f"the free parameter placement is {free.placement[:40]!r}", f"use one of {', '.join(PLACEMENTS)}"
        )
    if free.depth_type not in (1, 2, 3):
        raise BadTarget(f"the free parameter depth_type is {free.depth_type}", "use 1, 2 or 3")
    if free.ramp and free.depth_type != 1:
        raise BadTarget(
            f"a ramp opens blocks that write zeros, and type {free.depth_type} writes others", "use depth_type: 1"
        )
    if free.is_own and not free.phi:
        raise BadTarget(
            "with rest: own and phi: 0 the copies are twin networks, which would stay equal for ever", "give a phi"
        )
    return free
