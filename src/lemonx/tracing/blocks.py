"""Lists of modules of which the larger model has more: which of its blocks come from which, by what they compute.

Blocks of a list need not be alike: every second one may be a mixture of experts, or look at a window. Those of one kind
are a stack of their own then, `layers~0`, `layers~1` and so on, numbered among themselves.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from lemonx.errors import Refused
from lemonx.planning.depth import arrange
from lemonx.specs.spec import Block, Stack
from lemonx.tracing.operations import Call
from lemonx.tracing.tracer import Tracer

_INDEX = re.compile(r"\.(\d+)(?=\.)")
# Numbers that two runs compute from the same sizes differ by rounding alone.
ROUNDING = 1e-9
ONE_MODEL = "give two sizes of one model, which compute alike"
# Which entry is selected depends on what a router decides.
_DECIDED = frozenset(("select", "_local_scalar_dense", "index", "index_add"))
SMALL, LARGE = 0, 1


@dataclass(frozen=True)
class Alike:
    """Blocks of a list that are alike but for their sizes: `small` and `large` are their numbers in either model.

    `pinned` first ones are unlike the others. `order`: for each of the larger model the one of the smaller that it
    comes from, and whether it is added; without it, added ones are spread evenly.
    """

    within: str
    small: tuple[int, ...]
    large: tuple[int, ...]
    pinned: int = 0
    order: tuple[tuple[int, bool], ...] = ()

    @property
    def sizes(self) -> tuple[int, int]:
        return len(self.small), len(self.large)

    def numbers(self, side: int) -> tuple[int, ...]:
        return (self.small, self.large)[side]

    def blocks(self, name: str) -> tuple[Block, ...]:
        """Every block of the larger model, with the one that it comes from."""
        return _arranged(self, name)


@cache
def _arranged(alike: Alike, name: str) -> tuple[Block, ...]:
    stack = Stack(len(alike.small), "", pinned=alike.pinned, order=alike.order)
    return arrange(name, stack, len(alike.large))


Stacks = Mapping[str, Alike]


def starred(name: str, stacks: Mapping[str, int]) -> tuple[str, str]:
    """A name with `*` for the number of its block, and that number; `stacks`: how many first blocks keep theirs.

    >>> starred("blocks.3.up.weight", {"blocks": 1}), starred("blocks.0.up.weight", {"blocks": 1})
    (('blocks.*.up.weight', '3'), ('blocks.0.up.weight', ''))
    """
    for stack, pinned in stacks.items():
        number, _, inside = name.removeprefix(f"{stack}.").partition(".")
        if name.startswith(f"{stack}.") and number.isdecimal() and int(number) >= pinned:
            return ".".join(filter(None, (stack, "*", inside))), number
    return name, ""


def to_stack(name: str, stacks: Stacks, side: int) -> str:
    """The name of a module or parameter by the stack that its block is in, and its number there.

    >>> layers = {"layers~0": Alike("layers", (0, 2), (0, 2, 4)), "layers~1": Alike("layers", (1,), (1, 3))}
    >>> to_stack("layers.2.up", layers, SMALL), to_stack("layers.3", layers, LARGE), to_stack("head", layers, LARGE)
    ('layers~0.1.up', 'layers~1.1', 'head')
    """
    for stack, alike in stacks.items():
        number, _, inside = name.removeprefix(f"{alike.within}.").partition(".")
        if name.startswith(f"{alike.within}.") and number.isdecimal() and int(number) in alike.numbers(side):
            return ".".join(filter(None, (stack, str(alike.numbers(side).index(int(number))), inside)))
    return name


def to_list(name: str, stacks: Stacks, side: int) -> str:
    """The other way: the name that a module or parameter has in the model."""
    for stack, alike in stacks.items():
        number, _, inside = name.removeprefix(f"{stack}.").partition(".")
        if name.startswith(f"{stack}.") and number.isdecimal():
            return ".".join(filter(None, (alike.within, str(alike.numbers(side)[int(number)]), inside)))
    return name


def find_stacks(small: Tracer, large: Tracer, *, run: bool = True, every: bool = False) -> dict[str, Alike]:
    """Lists of modules that are longer in the larger model; if both were run, by what blocks compute.

    `every`: also those that are as long, where their blocks are alike.
    """
    few, many = _counts(small), _counts(large)
    if small.names.keys() == large.names.keys():
        return _as_long(small, large, few, run=run) if every else {}
    longer = {name: (few[name], number) for name, number in many.items() if few.get(name, number) != number}
    outer = {name: sizes for name, sizes in longer.items() if not any(name.startswith(f"{other}.") for other in longer)}
    found: dict[str, Alike] = {}
    for name, sizes in outer.items():
        ends = _ends(small, large, outer, name, sizes) if run else [(sizes[0] - 1, sizes[1] - 1)]
        last = _parameters(small, f"{name}.{sizes[0] - 1}").keys()
        covers = all(_parameters(small, f"{name}.{index}").keys() >= last for index in range(sizes[0]))
        found |= _sorted_out(name, *_kinds(small, large, name, *sizes, run=run), ends, covers=covers)
    if every:
        kept = {name: number for name, number in few.items() if not any(_nested(name, other) for other in outer)}
        found |= _as_long(small, large, kept, run=run)
    origins = {name: origin_of(name, found) for name in large.names}
    for name, origin in origins.items():
        if origin not in small.names:
            raise Refused(f"the larger model has {name}, and the smaller has nothing like it", ONE_MODEL)
    for name in sorted(small.names.keys() - set(origins.values())):
        raise Refused(f"the larger model has no {name}", "only growth is possible: give the smaller model first")
    return found


def _as_long(small: Tracer, large: Tracer, counts: Mapping[str, int], *, run: bool) -> dict[str, Alike]:
    """Lists of as many blocks in both models that are all alike and have norms in them, outermost first."""
    found: dict[str, Alike] = {}
    for name in sorted(counts, key=len):
        number = counts[name]
        normed = any(norm.path.startswith(f"{name}.0.") for norm in small.norms)
        if not normed or any(_nested(name, other) for other in found):
            continue
        ours, theirs = _kinds(small, large, name, number, number, run=run)
        if len({*ours, *theirs}) == 1:
            found[name] = Alike(name, tuple(range(number)), tuple(range(number)))
    return found


def _nested(one: str, other: str) -> bool:
    """Whether one of two lists is in a block of the other, or is the other."""
    return f"{one}.".startswith(f"{other}.") or f"{other}.".startswith(f"{one}.")


def as_lists(small: Tracer, large: Tracer, pinned: Mapping[str, int] | None = None) -> dict[str, Alike]:
    """Lists of modules as one stack each, whatever their blocks compute; Refused where they have other parameters.

    `pinned`: the lists, and how many first blocks of each are unlike the others; if not given, those that are longer in
    the larger model.
    """
    few, many = _counts(small), _counts(large)
    if pinned is None:
        longer = [name for name, number in many.items() if few.get(name, number) != number]
        outer = [name for name in longer if not any(name.startswith(f"{other}.") for other in longer)]
        pinned = {name: max(_unlike(small, name, few[name]), _unlike(large, name, many[name])) for name in outer}
    for name, first in pinned.items():
        for tracer, counts in ((small, few), (large, many)):
            if name not in counts or counts[name] <= first or _unlike(tracer, name, counts[name]) > first:
                raise Refused(f"the blocks of {name} are not alike", ONE_MODEL)
    names = [{starred(name, pinned)[0] for name in tracer.names} for tracer in (small, large)]
    for name in sorted(names[0] ^ names[1]):
        raise Refused(f"only one of the two models has {name}", ONE_MODEL)
    return {
        name: Alike(name, tuple(range(few[name])), tuple(range(many[name])), first) for name, first in pinned.items()
    }


def _unlike(tracer: Tracer, name: str, count: int) -> int:
    """How many first blocks have other parameters than the last: a strided one, say."""
    kinds = [_parameters(tracer, f"{name}.{index}") for index in range(count)]
    return max((index + 1 for index, kind in enumerate(kinds) if kind != kinds[-1]), default=0)


def origin_of(name: str, stacks: Stacks, *, added: bool = True) -> str | None:
    """What a parameter or module of the larger model is in the smaller one.

    `added`: also one in an added block, for which there is None otherwise.
    """
    here = to_stack(name, stacks, LARGE)
    for stack, alike in stacks.items():
        number, _, inside = here.removeprefix(f"{stack}.").partition(".")
        if here.startswith(f"{stack}.") and number.isdecimal():
            block = alike.blocks(stack)[int(number)]
            if block.added and not added:
                return None
            return ".".join(filter(None, (alike.within, str(alike.small[block.source]), inside)))
    return name


def _counts(tracer: Tracer) -> dict[str, int]:
    """Every list of modules that parameters name, and how long it is."""
    found: dict[str, set[int]] = {}
    for name in tracer.names:
        for number in _INDEX.finditer(name):
            found.setdefault(name[: number.start()], set()).add(int(number[1]))
    return {name: len(numbers) for name, numbers in found.items() if numbers == set(range(len(numbers)))}


def _ends(
    small: Tracer, large: Tracer, lists: Mapping[str, tuple[int, int]], name: str, sizes: tuple[int, int]
) -> list[tuple[int, int]]:
    """Behind which blocks of both models the stream is used outside of the list: each must be as the other."""
    found: tuple[dict[tuple[str, int], list[int]], ...] = ({}, {})
    for tracer, places in zip((small, large), found, strict=True):
        used = ((path, number, block) for (path, number), blocks in tracer.uses.items() for block in blocks)
        for path, number, block in used:
            if block.startswith(f"{name}.") and block.removeprefix(f"{name}.").isdecimal():
                general = starred(path, dict.fromkeys(lists, 0))[0]
                places.setdefault((general, number), []).append(int(block.removeprefix(f"{name}.")))
    pairs = {(sizes[0] - 1, sizes[1] - 1)}
    for place in found[0].keys() & found[1].keys():
        ours, theirs = (sorted(set(places[place])) for places in found)
        if len(theirs) != len(ours):
            raise Refused(
                f"{place[0] or 'the model'} reads behind {_told(name, ours)} in the smaller model and behind "
                f"{_told(name, theirs)} in the larger",
                "let it read behind as many blocks in both",
            )
        pairs |= set(zip(ours, theirs, strict=True))
    return sorted(pairs)


def _told(name: str, blocks: list[int]) -> str:
    return " and ".join(f"{name}.{number}" for number in blocks)


def _sorted_out(
    name: str, ours: list[int], theirs: list[int], ends: list[tuple[int, int]], *, covers: bool
) -> dict[str, Alike]:
    """The blocks of a list by their kinds: one stack, one with pinned first blocks, or one for every kind.

    `ends`: a block of each model, behind which the stream must be the same. `covers`: every block has all parameters
    that the last one has, so that first ones can be pinned.
    """
    few, many = len(ours), len(theirs)
    pinned = max((i + 1 for i, kind in enumerate(ours) if kind != ours[-1]), default=0)
    rest = {*ours[pinned:], *theirs[pinned:]}
    like = covers and few > pinned and len(rest) == 1 and ours[:pinned] == theirs[:pinned]
    if like and len(ends) == 1:
        return {name: Alike(name, tuple(range(few)), tuple(range(many)), pinned)}
    places, before = list[int](), (-1, -1)
    for end in ends:
        places += _places(ours, theirs, before, end)
        before = end
    if len(places) < few or len(set(places)) < few:
        raise Refused(f"the blocks of {name} are of other kinds, or in another order, in the larger model", ONE_MODEL)
    for i, kind in enumerate(theirs):
        if kind not in ours:
            raise Refused(f"{name}.{i} of the larger model is unlike every block of the smaller", ONE_MODEL)
    kinds = [ours[-1]] if like else list(dict.fromkeys(ours))
    found: dict[str, Alike] = {}
    for number, kind in enumerate(kinds):
        mine = [i for i, k in enumerate(ours) if k == kind or like]
        others = [i for i, k in enumerate(theirs) if k == kind or like]
        origin = {places[i]: rank for rank, i in enumerate(mine)}
        order = tuple((_nearest(origin, i), i not in origin) for i in others)
        here = Alike(name, tuple(mine), tuple(others), pinned if like else 0, order)
        found[name if like else f"{name}~{number}"] = here
    return found


def _places(ours: list[int], theirs: list[int], before: tuple[int, int], end: tuple[int, int]) -> list[int]:
    """Where the larger model has the blocks of the smaller between two ends: each in the first place it may have."""
    places, at = list[int](), before[1] + 1
    for kind in ours[before[0] + 1 : end[0] + 1]:
        while at <= end[1] and theirs[at] != kind:
            at += 1
        if at > end[1]:
            return []
        places.append(at)
        at += 1
    return places


def _nearest(origin: Mapping[int, int], place: int) -> int:
    """The block that one at a place is, or is a copy of: the last before it, or else the first."""
    return origin[max((at for at in origin if at <= place), default=min(origin))]


def _kinds(small: Tracer, large: Tracer, name: str, few: int, many: int, *, run: bool) -> tuple[list[int], list[int]]:
    """A number for the kind of every block of both models."""
    known: list[tuple[Tracer, str]] = []
    result: tuple[list[int], list[int]] = ([], [])
    for tracer, count, kinds in ((small, few, result[0]), (large, many, result[1])):
        for index in range(count):
            path = f"{name}.{index}"
            fits = [kind for kind, other in enumerate(known) if _alike(*other, tracer, path, run)]
            if not fits:
                fits = [len(known)]
                known.append((tracer, path))
            # Of several, which have other sizes in the smaller model, the one that would change least.
            kind = min(fits, key=lambda kind: _changes(*known[kind], tracer, path))
            kinds.append(kind)
    return result


def _alike(one: Tracer, path: str, two: Tracer, other: str, run: bool) -> bool:
    """Whether two blocks have the same parameters and, where they were run, compute alike."""
    ours, theirs = _parameters(one, path), _parameters(two, other)
    if ours.keys() != theirs.keys() or (one is two and ours != theirs):
        return False
    if not run:
        return True
    first, second = _calls(one, path), _calls(two, other)
    return first.keys() == second.keys() and all(
        _same(calls, second[inside], strict=one is two) for inside, calls in first.items()
    )


def _changes(one: Tracer, path: str, two: Tracer, other: str) -> int:
    """In how many axes of their parameters two blocks differ."""
    ours, theirs = _parameters(one, path), _parameters(two, other)
    return sum(a != b for name in ours for a, b in zip(ours[name], theirs[name], strict=False))


def _parameters(tracer: Tracer, path: str) -> dict[str, tuple[int, ...]]:
    found = {}
    for name in tracer.names:
        if name.startswith(f"{path}."):
            info = tracer.parameters.get(tracer.names[name])
            found[name.removeprefix(path)] = (
                tuple(1 if axis is None else axis.size for axis in info.axes) if info else ()
            )
    return found


def _calls(tracer: Tracer, path: str) -> dict[str, list[Call]]:
    return {
        inner.removeprefix(path): calls
        for inner, calls in tracer.calls.items()
        if inner == path or inner.startswith(f"{path}.")
    }


def _same(ours: list[Call], theirs: list[Call], *, strict: bool) -> bool:
    """Whether two modules run the same operations; `strict`: with the same numbers, since their sizes are the same.

    How many experts are run is for a router to decide, and so is which.
    """
    if [call.op for call in ours] != [call.op for call in theirs]:
        return {call.op for call in ours} == {call.op for call in theirs} and "index_add" in {c.op for c in ours}
    for one, two in zip(ours, theirs, strict=True):
        if one.op in _DECIDED:
            continue
        sized = one.op in ("mul", "div") and not strict
        if not sized and not (len(one.numbers) == len(two.numbers) and all(map(close, one.numbers, two.numbers))):
            return False
        if any(a.shape == b.shape and a.differs(b) for a, b in zip(one.constants, two.constants, strict=False)):
            return False
    return True


def close(a: float, b: float) -> bool:
    """Whether two numbers are the same but for rounding."""
    return a == b or math.isclose(a, b, rel_tol=ROUNDING)
