"""Does every entry of every tensor obey its rule? Read from the two files, block by block, without a model.

A sample of outputs cannot see a rare token's row or the last position. The identities of `identities.py` can. Together
with the structure (structure.py) they prove that the target computes the source's function, if the spec is true of the
model's code. The sample of outputs shows that the spec is true.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lemonx.algebra.expansions import identity
from lemonx.algebra.recipes import Matrix, Vector
from lemonx.algebra.runs import Run
from lemonx.checkpoints import Checkpoint
from lemonx.checkpoints.values import all_below, all_finite
from lemonx.execution.row_readers import Source, StripReader, blocks_within, is_whole
from lemonx.execution.runner import Job, in_parts, run_jobs
from lemonx.guards.workers import cores, one_thread_each
from lemonx.planning.plan import RECOMPUTED, Plan
from lemonx.planning.tensor_steps import Step
from lemonx.verification.check_result import CheckResult

if TYPE_CHECKING:
    from lemonx.verification.entries import Fault

# Copies of one matrix: the tensor of each, its recipe, and its number among the matrices of that tensor.
Group = Sequence[tuple[Step, Matrix, int]]
# How many faults are kept: one proves that something is wrong, a few show what.
KEPT = 8


@dataclass(frozen=True)
class Wrong:
    """An entry of a tensor of the target that breaks its rule."""

    tensor: str
    entry: tuple[int, ...] | None
    what: str

    def __str__(self) -> str:
        where = "" if self.entry is None else str(list(self.entry))
        return f"{self.tensor}{where} {self.what}"


@dataclass(frozen=True)
class Algebra(CheckResult):
    """The numbers of tensors and entries that were checked, and the first faults."""

    tensors: int
    entries: int
    wrong: tuple[Wrong, ...]

    @property
    def passed(self) -> bool:
        return not self.wrong

    def reason(self) -> str:
        """Say in one line what is wrong."""
        first, *others = self.wrong
        return f"{first}, and {len(others)} more" if others else str(first)


def check_algebra(plan: Plan, source: Checkpoint, target: Checkpoint, *, threads: int | None = None) -> Algebra:
    """Check every tensor of the target against the source, as the plan's recipes say."""
    wrong = list(_odd_tensors(plan, source, target))
    odd = {fault.tensor for fault in wrong}
    steps = [step for step in plan.steps if step.name not in odd]
    task = _Checking(plan, source, target, steps)
    if steps:
        with one_thread_each():
            run_jobs([task.jobs(part) for part in in_parts(steps, threads or cores())])
    order = {step.name: i for i, step in enumerate(plan.steps)}
    found = sorted(task.wrong.values(), key=lambda fault: order[fault.tensor])
    entries = sum(target.tensors[step.name].numel for step in steps)
    return Algebra(len(steps), entries, (*wrong, *found)[:KEPT])


def _odd_tensors(plan: Plan, source: Checkpoint, target: Checkpoint) -> Iterator[Wrong]:
    """Tensors that are missing, have another shape or dtype, or are not in the plan."""
    planned = {step.name: step for step in plan.steps}
    for name, step in planned.items():
        info = target.tensors.get(name)
        if info is None:
            yield Wrong(name, None, "is missing")
        elif (info.shape, info.dtype) != (step.shape, step.dtype):
            yield Wrong(name, None, f"is {info.dtype} {list(info.shape)}, not {step.dtype} {list(step.shape)}")
    tied = {row: step.name for step in plan.steps for row in (step.row,) if step.suffix == "weight"}
    for name in target.tensors:
        if name in planned:
            continue
        if plan.dropped.get(name) == RECOMPUTED:
            if not target.read(name).equal(source.read(name)):
                yield Wrong(name, None, "is not the source's, which a model computes anew and an expansion leaves out")
            continue
        table = tied.get(plan.tied.get(name, ""))  # a file may repeat a tied weight
        if table is None:
            yield Wrong(name, None, "is not a tensor of this expansion")
        elif table in target.tensors and not target.same(name, table):
            yield Wrong(name, None, f"is not {table}, to which it is tied")


class _Checking:
    """A plan and its two checkpoints, and what was found wrong so far, by tensor."""

    def __init__(self, plan: Plan, source: Checkpoint, target: Checkpoint, steps: Sequence[Step]) -> None:
        from lemonx.execution import noise

        self.plan, self.source, self.target = plan, source, target
        # Each reads into memory of its own: a block of both is needed at once.
        self.scratch, self.other = noise.Scratch(), noise.Scratch()
        self.wrong: dict[str, Wrong] = {}
        self._lock = Lock()
        self._groups = _groups(steps)

    def jobs(self, steps: Sequence[Step]) -> Iterator[Job]:
        """The independent pieces of work that check these tensors."""
        for step in steps:
            if isinstance(step.recipe, Vector):
                yield partial(self._vector, step, step.recipe)
            elif step.made:
                continue
            else:
                yield from self._blocks(step, step.recipe)
                yield from (partial(self._together, group) for group in self._groups.get(step.name, ()))

    def _blocks(self, step: Step, how: Matrix) -> Iterator[Job]:
        before, after = self._before(step, how), self._after(step, how)
        rows = after.pieces() if isinstance(after, StripReader) else [range(how.rows.target_size)]
        for piece in rows:
            for _, run in blocks_within(step, piece):
                # Copies that are used together are looked at together.
                if how.copied is None or how.copied.at(run, how.rows.target_size)[1] == 1:
                    yield partial(self._block, step, how, before, after, _cut(run, piece))

    def _before(self, step: Step, how: Matrix) -> Source:
        """The source's rows, as the expansion reads them."""
        if is_whole(step):
            return StripReader(step, how, self.plan, self.source, self.scratch, range(step.shape[0]))
        return Source(step, how, self.plan, self.source, self.scratch)

    def _after(self, step: Step, how: Matrix) -> Source:
        """The target's rows: those of a tensor that expands into itself."""
        same = replace(how, rows=identity(how.rows.target_size), columns=identity(how.columns.target_size))
        here = replace(step, source=step.name, appended=None, scaled_by=None, recipe=same)
        if is_whole(step):
            return StripReader(here, same, self.plan, self.target, self.other, range(step.shape[0]))
        return Source(here, same, self.plan, self.target, self.other)

    def _block(self, step: Step, how: Matrix, before: Source, after: Source, run: Run) -> None:
        from lemonx.verification import identities

        if step.name in self.wrong:
            return
        found = after.reader(further=True).rows(run.target, run.target + run.length)
        free, fault = identities.is_free(run, how, step.appended is not None), None
        if not all_below(found, identities.FREE):
            if not all_finite(found):
                self._not_finite(step, found, run.target)
                return
            fault = identities.wild_fault(found, how, free, self._most(step))
        if fault is None and not free:
            fault = identities.matrix_fault(found, run, how, before.reader(further=False))
        if fault is not None:
            self._fault(step, how, fault, run.target)

    def _most(self, step: Step) -> float:
        """The largest number of the source's tensors that a tensor is made from."""
        names = [step.source, *([step.appended] if step.appended else [])]
        return max(float(piece.abs().max()) for name in names for piece in self.source.blocks(name) if len(piece))

    def _together(self, group: Group) -> None:
        """Check copies of a matrix that are used together and differ by noise: they sum to a multiple of the source."""
        from lemonx.verification import entries, identities

        step, how, first = group[0]
        size, before = how.rows.target_size // len(how.copied.number if how.copied else [0]), self._before(step, how)
        readers = [(other, self._after(other, its).reader(further=True), at * size) for other, its, at in group]
        whole = range(first * size, (first + 1) * size)
        for _, run in blocks_within(step, whole):
            run = _cut(run, whole)
            total = entries.Sums.zero(run.length, how.columns.size)
            for other, reader, start in readers:
                low = start + run.target - whole.start
                rows = reader.rows(low, low + run.length)
                if not all_finite(rows):
                    self._not_finite(other, rows, low)
                    return
                if (fault := identities.unread_fault(rows, how.columns)) is not None:
                    self._fault(other, how, fault, low)
                    return
                total = total.plus(entries.sums(rows, how.columns))
            wanted = identities.wanted_rows(run, how, before.reader(further=False))
            fault = entries.sums_fault(total, wanted, how.columns, before.dtype, len(group))
            if fault is not None:
                others = dict.fromkeys(other.name for other, *_ in group if other.name != step.name)
                with_others = f", together with {', '.join(others)}" if others else ""
                self._fault(step, how, fault._replace(rule=fault.rule + with_others), run.target)
                return

    def _vector(self, step: Step, how: Vector) -> None:
        from lemonx.verification import identities

        found, before = self.target.read(step.name), self.source.read(step.source)
        fault = identities.vector_fault(found, before, how)
        if fault is not None:
            self._add(step, np.unravel_index(fault.column, step.shape or (1,)), _said(fault))

    def _fault(self, step: Step, how: Matrix, fault: Fault, first: int) -> None:
        row = fault.row + first
        copies = [str([int(i) for i in _entry(step.shape, how, row, column)]) for column in fault.copies]
        rule = f"with its copies at {', '.join(copies)} {fault.rule}" if copies else fault.rule
        self._add(step, _entry(step.shape, how, row, fault.column), _said(fault._replace(rule=rule)))

    def _not_finite(self, step: Step, found: torch.Tensor, first: int) -> None:
        row, column = (int(i) for i in (~found.isfinite()).nonzero()[0])
        assert isinstance(step.recipe, Matrix)
        self._add(step, _entry(step.shape, step.recipe, row + first, column), f"is {float(found[row, column])}")

    def _add(self, step: Step, entry: Sequence[Any], what: str) -> None:
        with self._lock:
            self.wrong.setdefault(step.name, Wrong(step.name, tuple(int(i) for i in entry), what))


def _said(fault: Fault) -> str:
    return f"is {fault.found:.9g} and should be {fault.wanted:.9g}: {fault.rule}"


def _cut(run: Run, rows: range) -> Run:
    """A run without the rows that lie outside."""
    start, stop = max(run.target, rows.start), min(run.target + run.length, rows.stop)
    source = run.source + start - run.target if run.is_copy else run.source
    return Run(start, source, stop - start, run.copy)


def _entry(shape: tuple[int, ...], how: Matrix, row: int, column: int) -> Sequence[Any]:
    """The index in the tensor, as the file keeps it, of an entry of the matrix."""
    if not how.transposed:
        return np.unravel_index(row * how.columns.target_size + column, shape)
    *tables, inputs, outputs = shape
    table, output = divmod(row, outputs)
    return np.unravel_index((table * inputs + column) * outputs + output, (*tables, inputs, outputs))


def _groups(steps: Sequence[Step]) -> dict[str, list[Group]]:
    """Copies of matrices that are used together, by the name of the tensor that the first of them is in."""
    found: dict[tuple[str, str, int, int], list[tuple[Step, Matrix, int]]] = {}
    for step in steps:
        how = step.recipe
        if not isinstance(how, Matrix) or how.copied is None:
            continue
        size = how.rows.target_size // len(how.copied.number)
        for at, copies in enumerate(how.copied.copies):
            if copies > 1:
                # Whose copy it is: several may lie in one tensor, and every one has rows of its origin's.
                key = step.source, step.suffix, step.block, int(how.rows.unit[at * size : (at + 1) * size].max())
                found.setdefault(key, []).append((step, how, at))
    result: dict[str, list[Group]] = {}
    for group in found.values():
        ordered = sorted(group, key=_number)
        result.setdefault(ordered[0][0].name, []).append(ordered)
    return result


def _number(member: tuple[Step, Matrix, int]) -> int:
    _, how, at = member
    assert how.copied is not None
    return how.copied.number[at]
