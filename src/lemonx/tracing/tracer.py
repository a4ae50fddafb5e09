"""Runs a module once and lets every axis of every parameter find its space.

A dispatch mode sees each ATen operation with its tensors. A rule for that operation (rules/) says which axes are one,
and what the operation needs of them. Where there is no rule, all axes that it touches are fixed.

Tensors that derive from no parameter (inputs, masks, rotary tables) are not tracked; persistent buffers are learned
state and count as parameters.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakTensorKeyDictionary

from lemonx.tracing.axes import Axis, Misfit, data, is_data, say, unify
from lemonx.tracing.held import Held, storage
from lemonx.tracing.modes import Mode
from lemonx.tracing.operations import (
    BLANK,
    DECISIONS,
    MOVES,
    RULES,
    TURNED,
    BlockRun,
    Call,
    Constant,
    Op,
    Rule,
    Scalar,
    numbers,
    outputs_of,
    paths,
    tensors_in,
)
from lemonx.tracing.values import Carry, Info, Norm, Origin, Pair, Token, Value, WeightNorm

ZERO, UNIFORM, VARIES = "zero", "uniform", "varies"


class Tracer(Mode):
    """The record of a run: axes and roles of every parameter, norms, products, and what each module called.

    `scaled`: calls, by path and number, whose multiplication by a number makes another space. `follows`: what the
    smaller model decided in a module (which experts a token goes to), as a larger one that computes the same does too.
    """

    def __init__(self, module: torch.nn.Module, scaled: frozenset[tuple[str, int]] = frozenset()) -> None:
        super().__init__()
        self.scaled = scaled
        self.paths = paths(module)
        self.stack: list[str] = []
        self.fresh: list[torch.Tensor] = []
        self.infos: Any = WeakTensorKeyDictionary()
        self.prints: Any = WeakTensorKeyDictionary()
        self.blank: Any = WeakTensorKeyDictionary()
        self.written: dict[int, StorageWeakRef] = {}
        self.held = Held(module)
        self.parameters: dict[str, Info] = {}
        self.names: dict[str, str] = {}
        self.reads: set[Origin] = set()
        self.used: dict[str, int] = {}
        self.indexed: set[str] = set()
        # Along which axes maps read constants, in which module, and their numbers, a row for every vector.
        self.constants: list[tuple[str, Axis, torch.Tensor]] = []
        self.norms: list[Norm] = []
        self.pairs: list[Pair] = []
        self.scalars: list[Scalar] = []
        self.lengths: list[tuple[Axis, str]] = []
        self.means: list[tuple[Axis, str, bool]] = []
        self.ties: dict[str, Axis] = {}
        self.batch_norms: dict[str, dict[str, str]] = {}
        self.depthwise: dict[str, int] = {}
        # How often every weight was a map, and how often one of the two of a branch (rules/branches.py).
        self.maps: Counter[str] = Counter()
        self.returned: Counter[str] = Counter()
        self.weight_norms: dict[str, WeightNorm] = {}
        self.calls: dict[str, list[Call]] = defaultdict(list)
        self.blocks: list[BlockRun] = []
        self.problems: list[str] = []
        self.shown: list[Axis] = []
        self.ends: dict[Token, str] = {}
        self.uses: dict[tuple[str, int], list[str]] = defaultdict(list)
        self.last_use: dict[Token, int] = {}
        self.count = 0
        self.decisions: dict[str, list[torch.Tensor]] = defaultdict(list)
        self.follows: Callable[[str], list[torch.Tensor]] | None = None
        self.op = ""
        self.kept: set[int] = set()
        self.changed: set[int] = set()
        self.summed: set[Origin] = set()
        self.exempt: set[Origin] = set()
        self.wrote: set[Origin] = set()
        self.numbers: tuple[float, ...] = ()
        self._register(module)

    def _register(self, module: torch.nn.Module) -> None:
        persistent = module.state_dict(keep_vars=True)
        self.buffers = persistent.keys() - dict(module.named_parameters(remove_duplicate=False)).keys()
        for name, tensor in persistent.items():
            if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point() or not tensor.numel():
                continue
            if tensor in self.infos:  # one tensor under two names
                self.names[name] = next(iter(self.infos[tensor].origins[0]))[0] if tensor.dim() else name
                continue
            origins = tuple(frozenset({(name, place)}) for place in range(tensor.dim()))
            axes = [None if size == 1 else Axis(size) for size in tensor.shape]
            rows = len(axes) > 1 and axes[0] is None
            info = Info(axes, weight=True, origins=origins, silent=frozenset({name}), rows=rows)
            self.fresh.append(tensor)
            self.names[name] = name
            self.infos[tensor] = self.parameters[name] = info

    # -- what rules ask and say

    @property
    def path(self) -> str:
        return self.stack[-1] if self.stack else ""

    def why(self, reason: str) -> str:
        """Where this is, and a reason."""
        return f"{self.path or 'the model'}, {self.op}: {reason}"

    def info(self, tensor: Any) -> Info | None:
        """What is known of a tensor that derives from parameters."""
        if not isinstance(tensor, torch.Tensor):
            return None
        found = self.infos.get(tensor)
        if found is None and storage(tensor) in self.written:
            found = self._opaque_info(tensor, self.why("it is written into a tensor piece by piece"))
            self.infos[tensor] = found
        if found is not None and found.version not in (None, tensor._version):  # an alias was changed in place
            if found.value is not None:
                found.value.leak(self.why("it is changed in place elsewhere"))
            found.value, found.carries, found.silent, found.token = None, (), None, Token()
            found.version = tensor._version
        return found

    def note_written(self, tensor: torch.Tensor) -> None:
        """Its memory holds what the model computed; a reference to it, so that no other has its number."""
        self.written[storage(tensor)] = StorageWeakRef(tensor.untyped_storage())

    def axes(self, tensor: torch.Tensor) -> list[Axis | None]:
        """Its axes; of a constant those of the inputs, and of zeros any."""
        info = self.info(tensor)
        if info is not None:
            return list(info.axes)
        free = self.along(tensor, None) == ZERO
        return [None if size == 1 else Axis(size) if free else data(size) for size in tensor.shape]

    def along(self, tensor: torch.Tensor, place: int | None) -> str:
        """How a constant's numbers are along an axis: all zero, the same, or others. On meta nobody knows."""
        if tensor.is_meta or tensor.numel() == 0:
            return VARIES
        known = self.prints.setdefault(tensor, {})
        key = place, tensor._version
        if key not in known:
            with _disable_current_modes():
                if known.get((None, tensor._version)) == ZERO or not bool(tensor.count_nonzero()):
                    known[key] = ZERO
                elif place is None or not bool((tensor == tensor.narrow(place, 0, 1)).all()):
                    known[key] = VARIES
                else:
                    known[key] = UNIFORM
        return known[key]

    def put(self, tensor: Any, axes: Sequence[Axis | None], **known: Any) -> Info | None:
        """Note what is known of a result."""
        if not isinstance(tensor, torch.Tensor):
            return None
        sizes = [1 if axis is None else axis.size for axis in axes]
        if sizes != list(tensor.shape):
            raise Misfit(f"axes of {sizes} for a tensor of {list(tensor.shape)}")
        old = self.infos.get(tensor)
        if (
            old is not None and old.axes is not axes and self.op not in TURNED
        ):  # in place: other views of it keep their axes, so these are one
            axes = [self.unified(a, b) for a, b in zip(old.axes, axes, strict=True)]
        elif old is None and id(tensor) in self.changed:
            self._written_into(tensor, axes)
        info = self.infos[tensor] = Info(list(axes), **known)
        self.fresh.append(tensor)
        return info

    def _sync(self) -> None:
        """Note the versions of what was made last: torch counts them up only after it was made."""
        for tensor in self.fresh:
            self.infos[tensor].version = tensor._version
        self.fresh.clear()

    def _written_into(self, tensor: torch.Tensor, axes: Sequence[Axis | None]) -> None:
        """A constant was changed in place, and with it all that shares its memory, of which nothing is known."""
        self.note_written(tensor)
        if tensor._is_view():
            for axis in axes:
                self.fix(axis, "it is written into a tensor piece by piece")

    def unified(self, first: Axis | None, second: Axis | None) -> Axis | None:
        """Both axes as one; None is an axis of one entry, repeated."""
        if first is None or second is None:
            return first if second is None else second
        return unify(first, second, self.why("it meets an axis of the inputs"))

    def act(self, axes: Sequence[Axis | None], reason: str = "single entries pass a nonlinearity") -> None:
        """These axes must hold plain copies."""
        for axis in axes:
            if axis is not None and not is_data(axis):
                say(axis, "act", self.why(reason))

    def fix(self, axis: Axis | None, reason: str) -> None:
        """This axis cannot grow."""
        if axis is not None and not is_data(axis):
            say(axis, "fixed", self.why(reason))

    def keep(self, value: Value | None) -> None:
        """This operation knew what it was given."""
        self.kept.add(id(value))

    def read(self, info: Info, place: int) -> None:
        """An axis of a weight is summed over: its parameter reads."""
        self.summed |= info.origins[place] if info.origins else frozenset()
        if not info.linear or info.offset:
            self.fix(info.axes[place], "a weight that was changed nonlinearly reads it")

    # -- the run

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._sync()
        given = tensors_in(args, kwargs)
        before = [info for tensor in given if (info := self.info(tensor)) is not None]
        full = func._schema.name.partition("::")[2]
        changes = func._schema.is_mutable
        for tensor in given if before and changes else ():
            if tensor not in self.infos:
                self.along(tensor, None)  # what is changed in place is zero before, if it ever is
        if changes:
            self.held.keep(func._schema.arguments, args)
        out = func(*args, **kwargs)
        name = full.removesuffix("_") if changes and not full.startswith("_") else full
        if full in BLANK and isinstance(out, torch.Tensor):
            self.blank[out] = full
        if before and name in DECISIONS:
            out = self._decide(name, args, out)
        op = Op(name, args, kwargs, out, func, changes)
        if before and not op.is_empty:
            if changes:  # what is changed in place is for the rule to say
                for tensor in given:
                    if tensor in self.infos:
                        self.infos[tensor].version = None
                        self.fresh.append(tensor)
            self._apply(op, before)
        return out

    def _decide(self, name: str, args: tuple[Any, ...], out: Any) -> Any:
        """Which entries are the largest, as the smaller model found it: what is the same function decides alike."""
        chosen = out[1] if isinstance(out, tuple) else out
        made = self.decisions[self.path]
        made.append(chosen)
        theirs = self.follows(self.path) if self.follows else []
        if len(made) > len(theirs) or theirs[len(made) - 1].shape != chosen.shape or chosen.is_meta:
            return out
        with _disable_current_modes():
            chosen.copy_(theirs[len(made) - 1])
            if isinstance(out, tuple):
                values, place = args[0], DECISIONS[name]
                at = args[place] if place < len(args) else -1
                index = chosen if chosen.dim() == values.dim() else chosen.unsqueeze(at)
                out[0].copy_(values.gather(at, index).reshape(out[0].shape))
        return out

    def _apply(self, op: Op, known: list[Info]) -> None:
        self.op, self.kept, self.numbers, self.summed, self.exempt = op.name, set(), numbers(op), set(), set()
        made = {id(tensor) for tensor in tensors_in(op.out)}
        self.changed = {id(tensor) for tensor in op.tensors if op.in_place and id(tensor) in made}
        for name in sorted({name for info in known for origin in info.origins for name, _ in origin}):
            self.used.setdefault(name, len(self.used))
        for info in known:  # a parameter without axes has no origins
            if info.weight and not info.axes and info.silent:
                for name in info.silent:
                    self.used.setdefault(name, len(self.used))
        self._note_uses(known)
        pending = [info.value for info in known if info.value is not None]
        try:
            self._rule(op)(self, op)
        except Misfit as misfit:
            self.opaque(op, f"no rule fits ({misfit})")
        for value in pending:
            if id(value) not in self.kept:
                value.leak(self.why("it is used"))
        self._note_roles(op, known)
        if op.name not in MOVES:
            self.calls[self.path].append(Call(op.name, self.numbers, self._constants(op)))

    def _note_uses(self, known: list[Info]) -> None:
        """Where what a block of a list gave is used, other than in that list."""
        self.count += 1
        for info in known:
            self.last_use[info.token] = self.count
            block = self.ends.get(info.token)
            if block is not None and not self.path.startswith(f"{block.rpartition('.')[0]}."):
                self.uses[self.path, len(self.calls[self.path])].append(block)

    def _note_roles(self, op: Op, known: list[Info]) -> None:
        """What is summed over is read; all other axes of a weight that is used, and not only moved, are written."""
        self.reads |= self.summed
        made = [self.infos.get(tensor) for tensor in tensors_in(op.out)]
        if not any(info is not None and info.weight for info in made):
            used = {origin for info in known if info.weight for axis in info.origins for origin in axis}
            self.wrote |= used - self.summed - self.exempt

    def _rule(self, op: Op) -> Rule:
        if op.name in RULES:
            return RULES[op.name]
        if torch.Tag.pointwise in op.func.tags:
            return RULES["pointwise"]
        drawn = torch.Tag.nondeterministic_seeded in op.func.tags
        reason = "random numbers are drawn for its entries" if drawn else "there is no rule for it"
        return lambda tracer, op: tracer.opaque(op, reason)

    def _constants(self, op: Op) -> tuple[Constant, ...]:
        """Prints of what is no parameter; a factor of one number is among the numbers."""
        known = [t for t in op.tensors if self.infos.get(t) is None and id(t) not in self.changed]
        factors = op.name in ("mul", "div")
        whole = torch.bool, torch.float64, torch.float32, torch.float16, torch.bfloat16
        return tuple(
            Constant(tuple(t.shape), self._print(t), t.dtype not in whole)
            for t in known
            if not (factors and t.numel() == 1)
        )

    def _print(self, tensor: torch.Tensor) -> float:
        """A number that tells two constants apart, but for a coincidence."""
        if tensor.is_meta:
            return math.nan
        if tensor.is_complex():
            return 0.0
        known = self.prints.setdefault(tensor, {})
        if ("print", tensor._version) not in known:
            with _disable_current_modes():
                flat = tensor.detach().reshape(-1).double().nan_to_num()
                weights = torch.arange(1, flat.numel() + 1, dtype=torch.float64, device=flat.device).sin()
                known["print", tensor._version] = float((flat.clamp(-1e6, 1e6) * weights).sum())
        return known["print", tensor._version]

    def opaque(self, op: Op, reason: str) -> None:
        """Nothing is known of this operation: whatever it touches is fixed."""
        for tensor in op.tensors:
            info = self.info(tensor)
            for axis in info.axes if info else ():
                self.fix(axis, reason)
        for tensor in tensors_in(op.out):
            if id(tensor) in self.changed:
                self.note_written(tensor)
            self.infos[tensor] = self._opaque_info(tensor, self.why(reason))
            self.fresh.append(tensor)

    def _opaque_info(self, tensor: torch.Tensor, why: str) -> Info:
        axes = [None if size == 1 else Axis(size) for size in tensor.shape]
        for axis in axes:
            say(axis, "fixed", why)
        return Info(list(axes))

    # -- modules

    def entered(self, module: torch.nn.Module, given: Any) -> None:
        self._sync()
        names = self.paths.get(id(module), [self.path])
        self.stack.append(next((name for name in names if name.startswith(f"{self.path}.")), names[0]))
        if self.stack[-1].rpartition(".")[2].isdecimal():
            infos = self._tracked(given)
            for info in infos:
                info.carries = (*info.carries, Carry(info.token))
            self.blocks.append(BlockRun(self.stack[-1], [replace(info) for info in infos]))

    def left(self, module: torch.nn.Module, made: Any) -> None:
        self._sync()
        path = self.stack.pop()
        if path.rpartition(".")[2].isdecimal():
            run = next(run for run in reversed(self.blocks) if run.path == path and not run.made)
            infos, own = self._tracked(made), {info.token for info in run.given}
            run.made = [replace(info) for info in infos]
            run.behind = self.count
            self.ends |= {info.token: path for info in infos}
            # The first module of a list inside a block is given what the block was given, which goes on.
            own -= {info.token for other in self.blocks if other.path in self.stack for info in other.given}
            for info in infos:
                info.carries = tuple(carry for carry in info.carries if carry.token not in own)

    def _tracked(self, tree: Any) -> list[Info]:
        return [info for tensor in outputs_of(tree) if (info := self.info(tensor))]

    def normed(self, norm: Norm, read: torch.Tensor, made: torch.Tensor, place: int, bias: Any = None) -> None:
        """A norm was run over one axis of a tensor; `bias`: what it added to that."""

    def finish(self, outputs: Any) -> None:
        """Note what leaves the model."""
        self._sync()
        self.op = "output"
        for tensor in outputs_of(outputs):
            if (info := self.info(tensor)) is not None:
                if info.value is not None:
                    info.value.leak(self.why("it leaves the model"))
                self.shown += [axis for axis in info.axes if axis is not None]
                self.last_use[info.token] = self.count + 1
