"""One tensor of the target after the other: where it comes from, and by which recipe."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from lemonx.algebra.expansions import Expansion
from lemonx.algebra.recipes import HALF, KEEP, MUTED, SILENT, Copied, Matrix, TensorRecipe, Vector
from lemonx.checkpoints import TensorInfo
from lemonx.errors import BadTarget, Refused, raise_first
from lemonx.frames.solution import SolvedFrames
from lemonx.guards.limits import MOST_TARGET_TENSORS
from lemonx.planning import depth, upcycling
from lemonx.planning.exactness import BIT_EXACT, BITS, MADE, ROUNDED, UP_TO_EPS, exactness
from lemonx.planning.half_silent import half_silent
from lemonx.planning.policy import COPY, JITTER, NEXT, GrowthPolicy
from lemonx.planning.typecheck import Types, split_into
from lemonx.specs.coverage import UNIT, Matched, tensor_problems
from lemonx.specs.norms import Scale
from lemonx.specs.rows import IDENTITY, Axis, Row, Typed
from lemonx.specs.space_expansions import share_of
from lemonx.specs.spaces import Experts
from lemonx.specs.spec import LAST, OUTSIDE, Block, Spec
from lemonx.specs.weights import Linear

FLOATS = frozenset(BITS)


@dataclass(frozen=True)
class Step:
    """One tensor of the target: where it comes from, how, and how exactly in the dtype it is stored in."""

    name: str
    source: str
    row: str
    suffix: str
    # The stack as the file names it and the target's block in it; None and 0 outside of all stacks.
    stack: str | None
    block: int
    shape: tuple[int, ...]
    dtype: str
    recipe: TensorRecipe
    exactness: str
    flops: int
    # Where the further heads and neurons of a silenced block come from, if not from `source`.
    appended: str | None = None
    # How the method makes this tensor, if it does not read it from `source`.
    made: str | None = None
    # Which unit's own tensor it is, where units are modules: experts.
    unit: int | None = None
    # The scale for every channel behind it, which weights the mean of its rows.
    scaled_by: str | None = None
    # It writes the stream in an added block, and is silent there.
    silent: bool = False

    @property
    def origin(self) -> str:
        """The tensor it comes from, or how it is made."""
        return self.made or self.source

    @property
    def rule(self) -> str:
        """The rule in the paper's words, and where further units come from if they are not plain copies."""
        if self.made:
            return self.made
        words = [self.recipe.rule]
        if self.appended:
            words.append("next block's")
        elif isinstance(self.recipe, Matrix) and self.recipe.jitter:
            words.append("jitter")
        if isinstance(self.recipe, Matrix) and (copied := self.recipe.copied):
            words += ["±Φ over copies"] if max(copied.copies) > 1 else []
            words += ["unused"] if any(copied.unused) else []
        return " + ".join(words)


@dataclass(frozen=True)
class StepBuilder:
    """Makes the steps of a plan, tensor by tensor of the source."""

    source: Spec
    target: Spec
    types: Types
    blocks: Mapping[str, tuple[Block, ...]]
    policy: GrowthPolicy
    tensors: Mapping[str, TensorInfo]
    dtype: str | None
    # Spaces of experts whose router is new.
    scored_anew: frozenset[str] = frozenset()
    frames: SolvedFrames | None = None

    @cached_property
    def split(self) -> dict[str, int]:
        """The space whose units are shared out among the parts of an expert, and how many parts there are."""
        found = {name: split_into(self.source, self.target, name) for name in self.source.spaces}
        return {name: times for name, times in found.items() if times > 1}

    @cached_property
    def copies(self) -> dict[str, dict[int, list[tuple[int, Block]]]]:
        """The blocks of the target that come from each of the source's, with their places, by stack."""
        found: dict[str, dict[int, list[tuple[int, Block]]]] = {stack: {} for stack in self.blocks}
        for stack, blocks in self.blocks.items():
            for index, block in enumerate(blocks):
                found[stack].setdefault(block.source, []).append((index, block))
        return found

    def check_count(self, found: Iterable[Matched]) -> None:
        """BadTarget where the target would have more tensors than any model: they would fill the memory."""
        count = sum(
            len(self._units(hit)) * (len(self.copies[hit.stack].get(hit.index, ())) if hit.stack is not None else 1)
            for hit in found
        )
        if count > MOST_TARGET_TENSORS:
            raise BadTarget(
                f"the target would have {count} tensors, more than {MOST_TARGET_TENSORS}", "choose smaller sizes"
            )

    def steps(self, hit: Matched) -> list[Step]:
        """The target tensors that come from this one: one per block of the target."""
        raise_first(tensor_problems(self.source, hit, self.tensors[hit.name], FLOATS))
        if hit.stack is None:
            return [self._step(hit, 0, KEEP, unit) for unit in self._units(hit)]
        stream, last_norms = self.source.stacks[hit.stack].stream, depth.stream_norms(self.source, hit.stack)[-1:]
        result = []
        for index, block in self.copies[hit.stack].get(hit.index, ()):
            if (here := self._placed(hit, hit.stack, index)) is not None:
                row = self.source.rows[here.row]
                writes = depth.written_stream(self.source, row, stream)
                mode = self.policy.mode(row, here.row in last_norms, writes, block)
                for unit in self._units(here):
                    step = self._in_chain(self._step(here, index, mode, unit, block.added), here, block, mode)
                    step = replace(step, silent=mode == SILENT)
                    result.append(self._with_further_units(step, here, self.policy.further(block, mode)))
        return result

    def opened(self) -> StepBuilder:
        """The builder of the same target with nothing silent: what its added blocks would write as full copies."""
        silencing = self.policy.mode

        def mode(row: Row, last_norm: bool, stream: str, block: Block) -> str:
            found = silencing(row, last_norm, stream, block)
            return KEEP if found == SILENT else found

        return replace(self, policy=replace(self.policy, mode=mode))

    def _in_chain(self, step: Step, hit: Matched, block: Block, mode: str) -> Step:
        """The step of a norm in a group of Post-LN blocks: exact up to eps, with the gain that it has there."""
        chains, recipe, again = self.types.chains.get((hit.stack or "", hit.index)), step.recipe, mode == IDENTITY
        if chains is None or not isinstance(recipe, Vector):
            return step
        general = hit.row.replace(f".{LAST}.", ".*.", 1)  # the last block may have a row of its own for its last norm
        is_last = general in depth.stream_norms(self.source, hit.stack or "")[-1:]
        closes = is_last and block.added and block.closes
        exact = UP_TO_EPS if again else step.exactness
        if not chains[0].small or step.suffix != "weight" or not (again or closes):
            return replace(step, exactness=exact)
        if BITS[step.dtype] < BITS["F32"]:
            raise Refused(
                f"{step.name} is stored in 16 bits, which would round small gains by more than eps costs without them",
                "leave small_gains out, or give --dtype float32",
            )
        gains = chains[0].gains
        gain = gains.last if closes else gains.between if block.added else gains.first
        rule = f"{recipe.rule} x {gain:.3g}"
        recipe = replace(recipe, factor=recipe.factor * gain, rest=recipe.rest * gain, rule=rule)
        return replace(step, recipe=recipe, exactness=exact if again else ROUNDED)

    def _placed(self, hit: Matched, stack: str, index: int) -> Matched | None:
        """The tensor under the row it has in this block: a row of one block's own stays with the first or the last."""
        own, _, inside = hit.row.removeprefix(f"{stack}.").partition(".")
        place = len(self.blocks[stack]) - 1 if own == LAST else hit.index
        if own == "*" or index == place:
            return hit
        general = f"{stack}.*.{inside}"
        return replace(hit, row=general) if general in self.source.rows else None

    def untied(self, name: str, found: list[Matched]) -> Step:
        """The weight of a decoder that was the embedding, and is one of its own in the target."""
        row = self.source.rows[name]
        assert isinstance(row, Linear)
        table = next(hit for hit in found if hit.row == row.tied and hit.suffix == "weight")
        hit = replace(table, row=name)
        step = self._step(hit, 0, KEEP)
        return replace(step, name=f"{name}.weight")

    def routers(self, name: str, beside: Matched) -> list[Step]:
        """The weights of a router that the source lacks, in the target's blocks that come from this one."""
        row, info = self.source.rows[name], self.tensors[beside.name]
        rows = upcycling.scores(info, self.types.of(row.writes))
        recipe = Matrix(rows, self.types.of(row.reads), consumes=True)
        shape, dtype = (rows.target_size, recipe.columns.target_size), self.dtype or info.dtype
        result = []
        for index, _ in self.copies[beside.stack or ""].get(beside.index, ()):
            stack = (beside.stack or "")[beside.bare :]
            named = f"{name[beside.bare :].replace('*', str(index), 1)}.weight"
            flops = row.flops_per_weight * math.prod(shape) * self._positions(row)
            result.append(
                Step(named, beside.name, name, "weight", stack, index, shape, dtype, recipe, BIT_EXACT, flops)
            )
        return result

    def _units(self, hit: Matched) -> list[int | None]:
        """The copies in the target of the unit whose own tensor this is: experts that are a module each."""
        if hit.unit is None:
            return [None]
        origin = self.types.spaces[UNIT.findall(hit.row)[0]].origin
        return [int(unit) for unit in np.flatnonzero(origin == hit.unit)]

    def _with_further_units(self, step: Step, hit: Matched, choices: tuple[str, ...]) -> Step:
        """The step with its further heads and neurons from the first of these places that there is."""
        row = self.source.rows[hit.row]
        if not isinstance(row, Linear) or not isinstance(step.recipe, Matrix) or step.recipe.rows.is_identity:
            return step
        following = hit.named(hit.index + 1)
        choice = next(c for c in choices if c != NEXT or following in self.tensors)
        # The next block has one unit to append for each of this block's; a unit that is appended twice gets noise.
        first = {COPY: 0, JITTER: 1, NEXT: 2 if JITTER in choices else 0}[choice]
        recipe = replace(step.recipe, jitter=first if step.recipe.rows.copies.max() > first else 0)
        return replace(step, recipe=recipe, appended=following if choice == NEXT else None)

    def _types_at(self, hit: Matched, unit: int | None, at: Block) -> tuple[Types, Types]:
        """The types that a row reads and writes: where frames carry a space, and in parts of an expert, its own."""
        if self.split and unit is not None:
            ((name, times),) = self.split.items()
            number = int(self.types.spaces[UNIT.findall(hit.row)[0]].copy_number[unit])
            size, spaces = self.source.spaces[name].size, self.types.spaces
            own = (share_of(size, number, times, gain=1 / times), share_of(size, number, times))
            reads, writes = (replace(self.types, spaces={**spaces, name: one}, _known={}) for one in own)
            return reads, writes
        if self.frames is None:
            return self.types, self.types
        row, there = self.source.rows[hit.row], self.frames.types(hit.row, at)
        reads, writes = (
            replace(self.types, _known={(side, None): own} if own else {})
            for side, own in zip((row.reads, row.writes), there, strict=True)
        )
        return reads, writes

    def _of(self, types: Types, row: Row, axis: Axis, size: int) -> Expansion:
        """The expansion of an axis; one that says whose matrix it is (experts) has an origin for every target unit."""
        found = types.of(axis.side, size)
        if not isinstance(row, Linear) or axis.side != row.each:
            return found
        return Expansion(found.size, found.origin, np.ones(found.target_size))

    def _with_expert_noise(self, recipe: TensorRecipe, hit: Matched, unit: int | None, added: bool) -> TensorRecipe:
        """The recipe of an expert's weight with the noise that makes its copies differ."""
        row = self.source.rows[hit.row]
        each = row.each.axes[0] if isinstance(row, Linear) and row.each else None
        name = UNIT.findall(hit.row)[0] if hit.unit is not None else each
        if name is None or not isinstance(recipe, Matrix) or hit.suffix not in ("weight", ""):
            return recipe
        experts, before, after = self.types.spaces[name], self.source.spaces[name], self.target.spaces[name]
        assert isinstance(before, Experts) and isinstance(after, Experts)
        together = before.chosen * after.size == after.chosen * before.size and name not in self.scored_anew
        stack = self.source.stacks[hit.stack] if hit.stack else None
        writes = stack is not None and stack.stream in row.writes.axes
        summed = writes and together and not recipe.rows.is_mean.any() and not added and not self.split
        at = range(experts.target_size) if unit is None else [unit]
        # Nobody is sent to an expert without a source; in an added block the copies write nothing yet.
        silent = added and self.policy.free.depth_type == 1 and unit is not None and not writes
        copied = Copied(
            number=tuple(int(experts.copy_number[t]) for t in at),
            copies=tuple(int(experts.copies[experts.origin[t]]) if summed else 1 for t in at),
            unused=tuple(bool(not experts.is_copy[t] or (silent and experts.copy_number[t] > 0)) for t in at),
        )
        return replace(recipe, copied=copied) if max(copied.copies) > 1 or any(copied.unused) else recipe

    @cached_property
    def _rules(self) -> dict[tuple[Any, ...], tuple[tuple[int, ...], TensorRecipe, str]]:
        """What blocks have in common: a model of a hundred thousand tensors has some dozens of these."""
        return {}

    def _step(self, hit: Matched, block: int, mode: str, unit: int | None = None, added: bool = False) -> Step:
        row, info = self.source.rows[hit.row], self.tensors[hit.name]
        at = OUTSIDE if hit.stack is None else self.blocks[hit.stack][block]
        key = hit.row, hit.suffix, info.shape, info.dtype, mode, unit, added, at if self.frames else None
        if key not in self._rules:
            self._rules[key] = self._rule(hit, at, mode, unit, added)
        shape, recipe, exact = self._rules[key]
        weight = hit.suffix in ("weight", "_weight", "")
        flops = row.flops_per_weight * math.prod(shape) * self._positions(row) if weight else 0
        stack = None if hit.stack is None else hit.stack[hit.bare :]
        name, scaled_by = hit.named(block, unit), self._scale_behind(hit, recipe)
        return Step(
            name, hit.name, hit.row, hit.suffix, stack, block, shape, self._dtype_of(info), recipe, exact, flops,
            made=self.policy.made, unit=unit, scaled_by=scaled_by,
        )  # fmt: skip

    def _dtype_of(self, info: TensorInfo) -> str:
        return self.dtype if self.dtype and info.dtype in BITS else info.dtype

    def _rule(
        self, hit: Matched, at: Block, mode: str, unit: int | None, added: bool
    ) -> tuple[tuple[int, ...], TensorRecipe, str]:
        """The shape, the recipe and the exactness of a tensor of the target."""
        row, info = self.source.rows[hit.row], self.tensors[hit.name]
        axes = row.tensors()[hit.suffix]
        sizes = info.shape if axes else (1,)
        reads, writes = self._types_at(hit, unit, at)
        expansions = tuple(
            self._of(reads if axis.role == "r" else writes, row, axis, size)
            for axis, size in zip(axes, sizes, strict=False)
        )
        typed = Typed(reads.of(row.reads), writes.of(row.writes), expansions, self.types.exact)
        recipe = self.frames.norm(hit.row, at, hit.suffix) if self.frames else None
        recipe = self._with_expert_noise(recipe or row.recipe(hit.suffix, typed, mode), hit, unit, added)
        if mode in (HALF, MUTED) and isinstance(recipe, Matrix):
            recipe = half_silent(recipe, row, mode, self.target)
        if self.frames and isinstance(recipe, Matrix) and hit.suffix == "weight":
            recipe = replace(recipe, spare=self.frames.spare(hit.row, at))
        if isinstance(recipe, Matrix) and self._keeps_own(recipe):
            recipe = replace(recipe, own=True)
        made, dtype = self.policy.made, self._dtype_of(info)
        exact = MADE if made else exactness(recipe, info.dtype, dtype, self.policy.free)
        return tuple(e.target_size for e in expansions), recipe, exact

    def _keeps_own(self, recipe: Matrix) -> bool:
        """Whether copies of rows read copies, and each of them keeps the weight of its own."""
        columns = recipe.as_if or recipe.columns
        reads = recipe.consumes and recipe.mode in (KEEP, MUTED, HALF) and columns.copies.max() > 1
        return self.policy.free.is_own and bool(reads and recipe.rows.copies.max() > 1)

    def _scale_behind(self, hit: Matched, recipe: TensorRecipe) -> str | None:
        """The tensor of the scale that reads what this one writes, in the same block, if it weights a mean."""
        if not isinstance(recipe, Matrix) or not recipe.rows.is_weighed_mean.any():
            return None
        written = self.source.rows[hit.row].writes
        name, suffix = next(
            (name, row.suffix)
            for name, row in self.source.rows.items()
            if isinstance(row, Scale) and row.reads == written
        )
        full = f"{name}.{suffix}" if suffix else name
        return full.replace("*", str(hit.index))[hit.bare :]

    def _positions(self, row: Row) -> int:
        return max((self.target.spaces[a].positions for a in row.writes.axes if a in self.target.spaces), default=1)
