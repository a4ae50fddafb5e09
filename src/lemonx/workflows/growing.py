"""Grow any module: fill a larger instance of its class with the same function, and prove it.

The table is inferred from a run of both (tracing/). From there on a module is a checkpoint like any other: its tensors
go through a folder, and check, plan, execution and the check of every entry are the same.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch

from lemonx.algebra.norm_chains import LIMIT
from lemonx.checkpoints import Checkpoint
from lemonx.checkpoints.safetensors_file import torch_dtype
from lemonx.errors import NotVerified, Refused
from lemonx.execution.held import HeldSink
from lemonx.execution.runner import run_plan
from lemonx.guards.results import Result
from lemonx.guards.workers import one_thread_each
from lemonx.options.declared import Choices, Growth
from lemonx.planning.depth import check_added
from lemonx.planning.plan import Plan, make_plan
from lemonx.planning.request import Target
from lemonx.planning.summary import size_table
from lemonx.specs.family import Architecture
from lemonx.specs.norms import Fed
from lemonx.tracing.blocks import SMALL
from lemonx.tracing.infer import infer
from lemonx.tracing.of_inputs import moved_by_inputs, run_both
from lemonx.tracing.running import Run as Traced
from lemonx.tracing.storing import filled, floating, held_by, in_memory, opened, require_own
from lemonx.tracing.table import Table
from lemonx.verification.algebra import Algebra, check_algebra
from lemonx.verification.blocks import Moved
from lemonx.verification.float64 import Float64
from lemonx.verification.modules import (
    Example,
    ModuleRun,
    apart,
    cast,
    check_modules,
    examples,
    longer_axes,
    module_stability,
    outputs,
    randomised,
    repeated,
    rounding,
    still,
    wide_outputs,
    widened,
)
from lemonx.verification.stability import REMEDY, Stability
from lemonx.verification.symmetry import Symmetry, find_twins
from lemonx.verification.variations import variations

# Outputs in float64 may differ by so much of the largest.
TOLERANCE = 1e-10
# What is stored in fewer bits may differ by so many times what one rounding of every parameter changes: a weight that
# is split is rounded in each part, and every part adds up.
TIMES_ROUNDING = 16.0
# The one "size" of a module's config: 1 is the smaller instance, 2 the larger.
_FIELD = "instance"


@dataclass(frozen=True)
class Rule:
    """Where a parameter of the larger module comes from, by which rule, and how exactly."""

    origin: str
    rule: str
    exactness: str


@dataclass(frozen=True, repr=False)
class Grown(Result, printer="expansion:print_grown"):
    """What `grow` did, and what shows that the larger module computes the same function.

    `sizes`: every space and stack, before and after. `rehearsed`: how much outputs differed, of the largest, when all
    parameters were random and all was computed in float64; `difference`: the same of the parameters as they are stored,
    which may differ by `tolerance`. Where added Post-LN blocks norm their input again, both compare with the smaller
    module that does so too, and `lost_to_eps` is how far from the outputs without that the larger one's are.
    `stability`: of a module whose stream frames carry, its noise in float32 and its
    gradient beside the smaller one's. `exercised`: the share of the smaller module's learned numbers that the inputs
    used; nothing is claimed of `unused` parameters, which were copied. The proof holds for the way that the inputs took
    through the code: another branch is another function.
    """

    method: str
    sizes: Mapping[str, tuple[int, int]]
    parameters: tuple[int, int]
    rules: Mapping[str, Rule]
    rehearsed: float
    difference: float
    lost_to_eps: float
    tolerance: float
    algebra: Algebra
    symmetry: Symmetry
    stability: Stability | None
    exercised: float
    unused: tuple[str, ...]
    plan: Plan


def grow_module(
    small: torch.nn.Module,
    large: torch.nn.Module,
    example_inputs: object,
    choices: Choices,
) -> Grown:
    """Fill `large` with the function of `small`; it stays as it was unless all is shown."""
    check_modules(small, large)
    inputs = examples(example_inputs)
    with still(small, large), one_thread_each():
        table, rehearsed = _rehearsed(small, large, inputs, choices)
        plan, source, target = _planned(small, table, choices)
        algebra, symmetry = check_algebra(plan, source, target), find_twins(plan, target)
        if not algebra.passed:
            raise NotVerified(algebra.reason(), "please report this module; nothing was changed")
        made = filled(copy.deepcopy(large), table, [step.name for step in plan.steps], target)
        off, lost, tolerance = _compare(small, made, inputs, plan, table)
        stability = module_stability(small, made, inputs) if plan.types.framed else None
        if stability is not None and not stability.passed:
            raise Refused(stability.found, REMEDY)
    with torch.no_grad():
        made_tensors = floating(made)
        for name, tensor in floating(large).items():
            tensor.copy_(made_tensors[name])
    learned = {name: tensor.numel() for name, tensor in floating(small).items()}
    return Grown(
        method=plan.policy.method,
        sizes={name: (before, after) for name, before, after in size_table(plan)},
        parameters=(sum(learned.values()), sum(tensor.numel() for tensor in floating(large).values())),
        rules={
            held_by(table, step.name)[0]: Rule(held_by(table, step.source, SMALL)[0], step.rule, step.exactness)
            for step in plan.steps
        },
        rehearsed=rehearsed,
        difference=off,
        lost_to_eps=lost,
        tolerance=tolerance,
        algebra=algebra,
        symmetry=symmetry,
        stability=stability,
        exercised=1 - sum(learned[name] for name in table.unused) / max(1, sum(learned.values())),
        unused=table.unused,
        plan=plan,
    )


def _run(inputs: list[Example]) -> Traced:
    """A run to be traced: what is stored in float64 is computed in it, also where code asks for float32 by name."""

    def run(module: torch.nn.Module) -> list[object]:
        # Nothing else may be asked of a parameter here: that would be a use of it.
        wide = any(tensor.dtype == torch.float64 for tensor in module.parameters())
        with Float64() if wide else contextlib.nullcontext():
            return outputs(module, inputs)

    return run


def _alone_and_changed(small: torch.nn.Module, large: torch.nn.Module, inputs: list[Example]) -> Iterator[Traced]:
    """Runs on an example, and on two of other sizes."""
    yield _run(inputs)
    for example, _ in islice(variations(widened(small), large, inputs), 2):
        yield _run([example])


def _planned(module: torch.nn.Module, table: Table, choices: Choices) -> tuple[Plan, Checkpoint, Checkpoint]:
    """Return the plan between a module's tensors and those of the larger one, and both as checkpoints in memory."""
    source = opened(module, table, {"model_type": "module", _FIELD: 1})
    plan = _plan(source, table, choices)
    weights = {step.name: torch.empty(step.shape, dtype=torch_dtype(step.dtype)) for step in plan.steps}
    run_plan(plan, source, HeldSink.whole(weights))
    return plan, source, in_memory(weights, plan.target_config)


def _plan(source: Checkpoint, table: Table, choices: Choices) -> Plan:
    family = Architecture(
        model_types=("module",),
        build=lambda config: table.small if config[_FIELD] == 1 else table.large,
        sizes={_FIELD: (_FIELD,)},
        kind="language",
        defaults={},
    )
    plan = make_plan(
        source,
        Target(fields={_FIELD: 2}),
        Growth.of(choices),
        family=family,
    )
    for name in table.small.shown:
        grown = plan.types.spaces[name]
        if grown.is_dense or not grown.is_plain or (grown.source[: grown.size] != np.arange(grown.size)).any():
            raise Refused(
                f"the model gives {name} out, of which the first {grown.size} entries would not be what they were",
                f"keep it at {grown.size}",
            )
    return plan


def _rehearsed(
    small: torch.nn.Module, large: torch.nn.Module, inputs: list[Example], choices: Choices
) -> tuple[Table, float]:
    """The table of both, and what its rehearsal came to.

    Blocks have rows of their own unless there are more of them in the larger module. Where a norm then cannot write
    what the next one reads, they are put into stacks, whose streams frames can carry.
    """
    table = infer(small, large, _run(inputs), others=_alone_and_changed(small, large, inputs[:1]))
    try:
        return table, _rehearse(small, large, inputs, table, choices)
    except Fed as refusal:
        try:
            stacked = infer(small, large, _run(inputs), every=True)
        except Refused:
            raise refusal from None
        if stacked.stacks.keys() == table.stacks.keys():
            raise
    return stacked, _rehearse(small, large, inputs, stacked, choices)


def _rehearse(
    small: torch.nn.Module, large: torch.nn.Module, inputs: list[Example], table: Table, choices: Choices
) -> float:
    """Do all of it in float64 with random parameters, and compare: is the table true of the code?"""
    require_own(small, table)
    check_added(table.small, table.large)
    source = randomised(small)
    plan, _, target = _planned(source, table, choices)
    made = filled(widened(large), table, [step.name for step in plan.steps], target)
    run = repeated(plan, table, Moved())
    ours, theirs = wide_outputs(source, inputs, run), wide_outputs(made, inputs)
    off = apart(ours, theirs)
    if not off <= TOLERANCE:
        raise NotVerified(
            f"with random parameters in float64 the outputs differ by {off:.1e} of the largest, so the table that was "
            "inferred is not true of the code",
            "please report this module; nothing was changed",
        )
    return max(off, _elsewhere(source, made, inputs, run, table, longer_axes(ours, theirs)))


def _elsewhere(
    source: torch.nn.Module,
    made: torch.nn.Module,
    inputs: list[Example],
    run: ModuleRun,
    table: Table,
    longer: set[tuple[int, int, int]],
) -> float:
    """How much outputs differ on inputs unlike the examples; Refused if they do. `longer`: axes that grow."""
    off = 0.0
    for example, ours in variations(source, made, inputs, run):
        try:
            theirs = wide_outputs(made, [example])
            off = max(off, apart(ours, theirs) if longer_axes(ours, theirs) <= longer else float("inf"))
        except Exception:  # whatever the larger module raises where the smaller one does not
            off = float("inf")
        if not off <= TOLERANCE:
            raise Refused(
                f"on inputs of other sizes or values than the examples, {example.sizes}, the outputs would differ by "
                f"{off:.1e} of the largest: {_why(source, made, inputs, example, table)}",
                "give examples of several lengths and values",
            )
    return off


def _why(source: torch.nn.Module, made: torch.nn.Module, inputs: list[Example], example: Example, table: Table) -> str:
    """What is another number on another example, as far as runs of both show it."""
    try:
        one, other = (
            run_both(source, made, _run(cast([given], torch.float64)), table.stacks) for given in (inputs[0], example)
        )
        where = moved_by_inputs(one, other)
    except Exception:  # whatever the larger module raises where the smaller one does not
        where = None
    return where or "some number depends on the width and on the input, or the examples do not take every branch"


def _compare(
    small: torch.nn.Module, made: torch.nn.Module, inputs: list[Example], plan: Plan, table: Table
) -> tuple[float, float, float]:
    """How much outputs differ as the parameters are stored, what is lost to eps, and by how much they may differ."""
    moved, theirs = Moved(), wide_outputs(widened(made), inputs)
    off, tolerance = apart(wide_outputs(widened(small), inputs, repeated(plan, table, moved)), theirs), TOLERANCE
    if plan.is_rounded and not off <= tolerance:
        tolerance += TIMES_ROUNDING * rounding(small, inputs)
    if not off <= tolerance:
        raise NotVerified(
            f"the outputs differ by {off:.1e} of the largest, and {tolerance:.1e} may be", "nothing was changed"
        )
    if not moved.most <= LIMIT:
        raise Refused(
            f"norms that added blocks apply again would move the stream by {moved.most:.1e} of itself, more than "
            f"{LIMIT:.1e}, because eps is not small beside its variance",
            "give small_gains=True, or keep the depth",
        )
    return off, apart(wide_outputs(widened(small), inputs), theirs) if plan.chains else 0.0, tolerance
