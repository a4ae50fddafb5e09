"""The table of a model from two runs of it: spaces, rows and stacks, in the language that tables are written in."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count
from typing import Any

from lemonx.errors import Refused
from lemonx.specs.norms import averaged, batch_norm, group_norm, layer_norm, rms_norm, unit_length
from lemonx.specs.rows import Row
from lemonx.specs.signature import Side, side
from lemonx.specs.spec import Spec, Stack
from lemonx.specs.weights import Parameter, WeightNormed, conv, depthwise, embedding, linear
from lemonx.tracing.axes import DATA, PRODUCT, SUM, Axis, find, fused, is_data, joined, leaves, say
from lemonx.tracing.blocks import Alike
from lemonx.tracing.compare import Matched
from lemonx.tracing.kinds import all_atoms, fix_conflicts, is_still, kinds_of
from lemonx.tracing.stacks import identity_problem
from lemonx.tracing.values import Info, Norm, WeightNorm

_WORD = re.compile(r"\W+")


@dataclass(frozen=True)
class Held:
    """Where a tensor of the table is in the model: the parameter, and how its axes are put into two, if they are."""

    parameter: str
    order: tuple[int, ...] = ()
    columns: int = 0


@dataclass
class Table:
    """An inferred table for both sizes. `held`: every tensor's parameter, by the tensor's name with `*` for blocks.

    `stacks`: which blocks of a list each stack is; a list whose blocks are not alike is several. `norms`: where every
    norm is run, by its row: the module, with `*` for blocks, and its number there in one call of the block.
    """

    small: Spec
    large: Spec
    held: dict[str, Held]
    unused: tuple[str, ...]
    stacks: Mapping[str, Alike] = field(default_factory=dict)
    norms: Mapping[str, tuple[str, int]] = field(default_factory=dict)


@dataclass
class _Writer:
    found: Matched
    names: dict[int, str] = field(default_factory=dict)
    taken: dict[str, Axis] = field(default_factory=dict)
    rows: dict[str, Row] = field(default_factory=dict)
    held: dict[str, Held] = field(default_factory=dict)
    lumps: dict[tuple[Any, ...], Axis] = field(default_factory=dict)
    places: dict[str, tuple[str, int]] = field(default_factory=dict)

    @cached_property
    def factors(self) -> set[str]:
        """Parameters of one number that the stream of their block is multiplied by."""
        made = [info for run in self.found.small.blocks for info in run.made]
        return {self.starred(name) for info in made for carry in info.carries for name in carry.ones}

    # -- names and sides

    def starred(self, name: str) -> str:
        """A name with `*` for the number of a block in a stack that grows."""
        return self.found.starred(name)

    def name(self, atom: Axis, hint: str) -> str:
        """The name of a space: that of what first touched it."""
        atom = find(atom)
        if id(atom) not in self.names:
            base = _WORD.sub("_", self.starred(hint).replace(".*", "")).strip("_") or "space"
            base = f"s{base}" if base[0].isdigit() else base
            name = next(n for i in count(1) if (n := f"{base}_{i}" if i > 1 else base) not in self.taken)
            self.names[id(atom)], self.taken[name] = name, atom
        return self.names[id(atom)]

    def side(self, axis: Axis | None, hint: str) -> Side:
        """An axis as a side of a signature."""
        if axis is None:
            return side("1")
        axis = self.lumped(axis)
        terms = leaves(axis, SUM)
        if len(terms) > 1:
            return Side(tuple(self.part(term, hint) for term in terms))
        outer = leaves(axis, PRODUCT)
        at = next((place for place, factor in enumerate(outer) if factor.kind == SUM), None)
        if at is None:
            return Side((self.part(axis, hint),))
        inside = [fused(term, *outer[at + 1 :]) for term in leaves(outer[at], SUM)]
        if at == 0:
            return Side(tuple(self.part(term, hint) for term in inside))
        if all(factor.kind == DATA or "fixed" in factor.facts for factor in outer[:at]):
            each = tuple(self.part(term, hint) for term in inside)  # the same over and over
            return Side(each * math.prod(factor.size for factor in outer[:at]))
        over = self.part(fused(*outer[:at]), hint)
        return Side(tuple((*over, *self.part(term, hint)) for term in inside), over)

    def lumped(self, axis: Axis) -> Axis:
        """The axis with one atom in place of every part of it that cannot grow, however that is made up."""
        axis = find(axis)
        if axis.kind not in (PRODUCT, SUM):
            return axis
        whole = leaves(axis, axis.kind)
        if all(a.kind == DATA or "fixed" in a.facts for a in all_atoms(axis)) and not all(
            a.kind == DATA for a in whole
        ):
            key = (axis.kind, *(id(leaf) for leaf in whole))
            if key not in self.lumps:
                why = next(a.facts["fixed"] for a in all_atoms(axis) if a.kind != DATA)
                self.lumps[key] = Axis(axis.size, facts={"fixed": why})
                self.found.sizes[id(self.lumps[key])] = self._large(axis)
            return self.lumps[key]
        make = fused if axis.kind == PRODUCT else joined
        return make(*(self.lumped(part) for part in whole))

    def _large(self, axis: Axis) -> int:
        """The size of an axis in the larger model."""
        axis = find(axis)
        if axis.kind not in (PRODUCT, SUM):
            return self.found.size(axis)
        sizes = [self._large(part) for part in leaves(axis, axis.kind)]
        return math.prod(sizes) if axis.kind == PRODUCT else sum(sizes)

    def part(self, axis: Axis, hint: str) -> tuple[str, ...]:
        factors = leaves(axis, PRODUCT)
        if any(factor.kind == SUM for factor in factors):
            raise Refused(f"{hint}: its entries lie in a way that no signature can say", "write a table for the model")
        return tuple(str(f.size) if f.kind == DATA else self.name(f, hint) for f in factors)

    # -- rows

    def write_rows(self) -> None:
        tracer = self.found.small
        norms = {norm.gain: norm for norm in tracer.norms if norm.gain is not None}
        biases = {norm.bias for norm in tracer.norms if norm.gain is not None and norm.bias is not None}
        order = sorted(tracer.parameters, key=lambda name: tracer.used.get(name, len(tracer.used)))
        order.sort(key=lambda name: name.endswith(".bias"))  # a weight's row has its bias too
        done = biases | {norm.gain for norm in tracer.weight_norms.values()}
        for name in order:
            if name in done or not self._first_of_its_kind(name):
                continue
            done.add(name)
            if name in norms:
                self._norm(norms[name], name)
            elif name in tracer.batch_norms:
                done |= self._batch_norm(tracer.batch_norms[name])
            elif name in tracer.weight_norms:
                self._weight_norm(tracer.weight_norms[name])
            elif name in tracer.depthwise:
                self._row(name, depthwise(self._loop(tracer.parameters[name].axes[0], name), tracer.depthwise[name]))
                done |= self._with_bias(name, tracer.parameters[name].axes[0])
            elif name in tracer.indexed and len(tracer.parameters[name].axes) == 2:
                self._table(name)
            elif any((name, place) in tracer.reads for place in range(len(tracer.parameters[name].axes))):
                done |= self._map(name)
            else:
                self._bare(name)
        for number, norm in enumerate(tracer.norms):
            if norm.gain is None and self._first_of_its_kind(norm.path):
                self._norm(norm, f"{norm.path}.norm{number}")
        for number, (axis, path) in enumerate(tracer.lengths):
            if self._first_of_its_kind(path) and "fixed" not in find(axis).facts:
                self.rows[self.starred(f"{path}.length{number}")] = unit_length(self._loop(axis, path))
        for number, (axis, path, squares) in enumerate(tracer.means):
            if self._first_of_its_kind(path) and not is_still(axis):
                self.rows[self.starred(f"{path}.mean{number}")] = averaged(self._loop(axis, path), squares=squares)
        for scalar in tracer.scalars:  # what nothing but other activations meets has no row
            if self._first_of_its_kind(scalar.path) and not is_still(scalar.writes):
                self.side(scalar.writes, f"{scalar.path}.scaled")
        self._ties()

    def _first_of_its_kind(self, name: str) -> bool:
        """Blocks of a growing stack are written once."""
        general, number = self.found.numbered(name)
        stack = next((stack for stack in self.found.stacks if general.startswith(f"{stack}.*")), None)
        return stack is None or int(number) == self.found.stacks[stack].pinned

    def _row(self, name: str, row: Row, suffix: str = "weight") -> str:
        """Add a row for a parameter; its key leaves out what the row's kind appends."""
        key = name.removesuffix(f".{suffix}") if name.endswith(f".{suffix}") else name
        self.rows[self.starred(key)] = row
        self._hold(f"{key}.{suffix}", Held(name))
        return key

    def _hold(self, tensor: str, held: Held) -> None:
        self.held[self.starred(tensor)] = replace(held, parameter=self.starred(held.parameter))

    def _loop(self, axis: Axis | None, name: str) -> str:
        return f"{self.side(axis, name)} -> {self.side(axis, name)}"

    def _with_bias(self, name: str, writes: Axis | None) -> set[str]:
        """The bias beside a weight, where it is that map's alone: in the same row."""
        bias = name.removesuffix("weight") + "bias"
        info = self.found.small.parameters.get(bias)
        if not name.endswith(".weight") or info is None or len(info.axes) != 1 or writes is None:
            return set()
        if info.axes[0] is None or str(self.side(info.axes[0], bias)) != str(self.side(writes, name)):
            return set()
        self._hold(bias, Held(bias))
        return {bias}

    def _norm(self, norm: Norm, name: str) -> None:
        reads, writes = self.side(norm.reads, f"{name}_in"), self.side(norm.out, name)
        signature = f"{reads} -> {writes}"
        if norm.kind == "group":
            row: Row = group_norm(signature, norm.groups)
        elif norm.kind == "layer":
            row = layer_norm(signature, eps=norm.eps, affine=norm.gain is not None)
        elif norm.gain is not None:
            row = rms_norm(signature, eps=norm.eps, offset=norm.offset)
        else:
            row = replace(rms_norm(signature, eps=norm.eps), affine=False)
        if norm.gain is None:
            self.rows[self.starred(name)] = row
            self.places[self.starred(name)] = self._place(norm)
            return
        key = self._row(name, row)
        first = next(other for other in self.found.small.norms if other.gain == norm.gain)
        self.places[self.starred(key)] = self._place(first)
        if norm.bias is not None:
            self._hold(f"{key}.bias", Held(norm.bias))

    def _place(self, norm: Norm) -> tuple[str, int]:
        """The module that runs a norm, and how many others it has run before."""
        norms = self.found.small.norms
        return self.starred(norm.path), sum(other.path == norm.path for other in norms[: norms.index(norm)])

    def _batch_norm(self, names: Mapping[str, str]) -> set[str]:
        first = next(iter(names.values()))
        row = batch_norm(self._loop(self.found.small.parameters[first].axes[0], first))
        prefix = first.rpartition(".")[0]
        if any(name != f"{prefix}.{suffix}" for suffix, name in names.items()) or "weight" not in names:
            for name in names.values():
                self._bare(name)
            return set(names.values())
        self.rows[self.starred(prefix)] = row
        for suffix, name in names.items():
            self._hold(f"{prefix}.{suffix}", Held(name))
        return set(names.values())

    def _table(self, name: str) -> None:
        info = self.found.small.parameters[name]
        index = self.side(info.axes[0], f"{name.removesuffix('.weight')}_rows")
        self._row(name, embedding(f"{index} -> {self.side(info.axes[1], name.removesuffix('.weight'))}"))

    def _map(self, name: str) -> set[str]:
        """A weight that reads some of its axes and writes the others."""
        info, tracer = self.found.small.parameters[name], self.found.small
        dims = range(len(info.axes))
        reads = [place for place in dims if (name, place) in tracer.reads]
        writes = [place for place in dims if place not in reads]
        hint = name.removesuffix(".weight")
        kernel = writes[1:] and all(
            "fixed" in find(axis).facts for p in writes[1:] if (axis := info.axes[p]) is not None
        )
        if len(dims) == 2 and len(reads) == 1:
            signature = f"{self.side(info.axes[reads[0]], f'{hint}_in')} -> {self.side(info.axes[writes[0]], hint)}"
            self._row(name, linear(signature, transposed=reads == [0]))
            return self._with_bias(name, info.axes[writes[0]])
        if len(reads) == 1 and kernel and sorted([reads[0], writes[0]]) == [0, 1]:
            signature = f"{self.side(info.axes[reads[0]], f'{hint}_in')} -> {self.side(info.axes[writes[0]], hint)}"
            key = self._row(name, conv(signature, kernel=len(dims) - 2))
            if reads == [0]:
                self._hold(f"{key}.weight", Held(name, (1, 0, *dims[2:])))
            return self._with_bias(name, info.axes[writes[0]])
        one = self._fused(info, reads), self._fused(info, writes)
        key = self._row(name, linear(f"{self.side(one[0], f'{hint}_in')} -> {self.side(one[1], hint)}"))
        self._hold(f"{key}.weight", Held(name, (*writes, *reads), columns=max(1, len(reads))))
        return set()

    def _weight_norm(self, norm: WeightNorm) -> None:
        """A weight that is kept as its direction and its length."""
        info, names = self.found.small.parameters[norm.direction], (norm.gain, norm.direction)
        hint = norm.gain.rpartition(".")[0]
        if not hint or hint != norm.direction.rpartition(".")[0]:
            raise Refused(f"{norm.direction} and {norm.gain} are not in one module", "put them into one")
        suffixes = [name.removeprefix(f"{hint}.") for name in names]
        reads = [place for place in range(len(info.axes)) if (norm.weight, place) in self.found.small.reads]
        sides = tuple(
            self.side(axis, f"{hint}_in" if place in reads else hint if not place else f"{hint}_{place}")
            for place, axis in enumerate(info.axes)
        )
        written = [p for p, axis in enumerate(info.axes) if p not in reads and axis is not None and not is_still(axis)]
        row = WeightNormed(
            sides[reads[0]] if reads else side("1"), sides[written[0]] if written else side("_"), axes=sides,
            names=(suffixes[0], suffixes[1]), over=tuple(sorted(norm.over)),
        )  # fmt: skip
        self.rows[self.starred(hint)] = row
        for suffix, name in zip(suffixes, names, strict=True):
            self._hold(f"{hint}.{suffix}", Held(name))

    def _fused(self, info: Info, places: list[int]) -> Axis | None:
        present = [axis for place in places if (axis := info.axes[place]) is not None]
        return fused(*present) if present else None

    def _bare(self, name: str) -> None:
        """A parameter that nothing is summed over with: a bias, a token, a position table."""
        info = self.found.small.parameters[name]
        hint = name.removesuffix(".weight").removesuffix(".bias")
        sides = tuple(self.side(axis, hint if place == len(info.axes) - 1 else f"{hint}_{place}")
                      for place, axis in enumerate(info.axes))  # fmt: skip
        named = [one for one in sides if not all(axis.isdigit() for axis in one.axes)]
        factor = self.starred(name) in self.factors
        self.rows[self.starred(name)] = Parameter(side("_"), named[-1] if named else side("_"), axes=sides,
                                                  is_factor=factor)  # fmt: skip
        self._hold(name, Held(name))

    def _ties(self) -> None:
        """Decoders that are tables: they read what is paired with the space that the table writes."""
        tracer = self.found.small
        for name, dual in tracer.ties.items():
            info = tracer.parameters[name]
            ends = [info.axes[1], dual]
            if any("fixed" in find(end).facts for end in ends if end is not None):
                for end in ends:
                    say(end, "fixed", f"{name}: it is a table and a decoder, and one of the two cannot grow")
                continue
            others = [other for other, first in tracer.names.items() if first == name and other != name]
            row = others[0].removesuffix(".weight") if others else f"{name.removesuffix('.weight')}.decoder"
            signature = f"{self.side(dual, f'{row}_in')} -> {self.side(info.axes[0], name)}"
            table = self.starred(name.removesuffix(".weight") if name.endswith(".weight") else name)
            self.rows.pop(f"{row}.bias", None)  # it is this row's
            self.rows[row] = linear(signature, tied=table)


def table(found: Matched) -> Table:
    """The table of both models."""
    tracer = found.small
    fix_conflicts(found)
    writer = _Writer(found)
    writer.write_rows()
    kinds = kinds_of(found, writer.taken)
    streams = {stack: _stream(writer, stack) for stack in found.stacks}
    small = {name: space for name, (space, _) in kinds.spaces.items()}
    large = {name: space for name, (_, space) in kinds.spaces.items()}
    stacks = {
        name: Stack(len(alike.small), streams[name] or "", pinned=alike.pinned, order=alike.order)
        for name, alike in found.stacks.items()
    }
    common = Spec(rows=writer.rows, spaces=small, stacks=stacks, fixed={n: s for n, (s, _) in kinds.fixed.items()},
                  still=kinds.still, acts=tuple(kinds.acts), shown=tuple(kinds.shown),
                  mixed=tuple(kinds.mixed))  # fmt: skip
    for name, stack in stacks.items():
        problem = "what its blocks add to cannot be told"
        if stack.stream:
            problem = identity_problem(found, name, common, writer.held) or ""
        stacks[name] = replace(stack, still=problem)
    deeper = {name: replace(stack, size=len(found.stacks[name].large)) for name, stack in stacks.items()}
    target = replace(common, spaces=large, stacks=deeper, fixed={n: s for n, (_, s) in kinds.fixed.items()})
    unused = tuple(name for name in tracer.parameters if name not in tracer.used)
    return Table(common, target, writer.held, unused, found.stacks, writer.places)


def _stream(writer: _Writer, stack: str) -> str | None:
    """The space that the blocks of a stack are given and add to; the last of those that its axis is made of."""
    names: set[str | None] = set()
    for run in writer.found.small.blocks:
        if writer.starred(run.path) == f"{stack}.*" and run.given:
            axes = [axis for axis in run.given[0].axes if axis is not None and not is_data(axis)]
            names |= {writer.names.get(id(find(list(all_atoms(writer.lumped(axis)))[-1]))) for axis in axes}
    if len(names) > 1:  # tokens may be parameters too, and blocks do not write to them one by one
        names &= {row.writes.axes[-1] for key, row in writer.rows.items() if key.startswith(f"{stack}.*.")}
    return names.pop() if len(names) == 1 else None
