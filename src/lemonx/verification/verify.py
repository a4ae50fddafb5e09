"""Is it the same function? Three kinds of evidence, each of which sees what the others are blind to.

Algebra: every entry of every tensor obeys its rule. Structure: every block has the plain attributes of the block it
comes from, and config.json says nothing else. Outputs: both models, loaded from disk by transformers, agree on a sample
that reaches every branch, which shows that the spec is true of the model's code.
"""

from __future__ import annotations

from dataclasses import dataclass

from lemonx import architectures
from lemonx.checkpoints import Checkpoint, names_its_folder
from lemonx.errors import LemonxError, Refused, UnknownArchitecture, raise_first
from lemonx.execution.row_readers import check_finite
from lemonx.guards import phase
from lemonx.guards.results import Result
from lemonx.guards.workers import one_thread_each
from lemonx.planning.exactness import MADE, ROUNDED
from lemonx.planning.plan import Plan
from lemonx.planning.tensor_steps import FLOATS
from lemonx.specs.coverage import eps_problems, match, matched, tensor_problems
from lemonx.specs.weights import Dropped
from lemonx.verification.algebra import Algebra, check_algebra
from lemonx.verification.check_result import CheckResult
from lemonx.verification.comparison import Comparison
from lemonx.verification.outputs import compare, has_twin
from lemonx.verification.rounding import WIRING, Rounding
from lemonx.verification.running import memory_short, runs_whole
from lemonx.verification.streams import Layers
from lemonx.verification.structure import Structure, check_structure
from lemonx.verification.symmetry import Symmetry, find_twins


@dataclass(frozen=True)
class GrownAdapter(CheckResult):
    """An adapter that was grown along, and what was measured.

    `modules` have an A and a B; `replaced` tensors are there in full. `algebra`: every entry of its tensors; `outputs`:
    the base with its adapter against the grown base with the grown one; None where they were not compared.
    """

    also = ()

    name: str
    folder: str
    modules: int
    replaced: int
    algebra: Algebra | None
    outputs: Comparison | None

    @property
    def passed(self) -> bool:
        return all(part is None or part.passed for part in (self.algebra, self.outputs))

    def reason(self) -> str:
        failed = [part for part in (self.algebra, self.outputs) if part is not None and not part.passed]
        return f"with the adapter {self.name!r}, {failed[0].reason()}" if failed else ""


@dataclass(frozen=True, repr=False)
class Verified(CheckResult, Result, printer="expansion:print_verified"):
    """The results of a verification. A part that was not looked at is None, and `skipped` says why.

    Algebra and structure need a plan that is lossless: two folders that lemonx did not write, or wrote by a method that
    is not, are compared by their outputs alone. `layers`: the outputs were compared block by block.
    """

    also = ("proven",)

    outputs: Comparison | None
    algebra: Algebra | None = None
    structure: Structure | None = None
    symmetry: Symmetry | None = None
    layers: Layers | None = None
    skipped: str | None = None
    # The adapter that was grown along, if one was.
    adapter: GrownAdapter | None = None

    @property
    def passed(self) -> bool:
        evidence = [part for part in (self.algebra, self.structure, self.outputs, self.layers) if part is not None]
        return bool(evidence) and all(part.passed for part in (*evidence, *([self.adapter] if self.adapter else [])))

    @property
    def proven(self) -> bool:
        """All three kinds of evidence are there: outputs alone agree on a sample, and prove nothing beyond it."""
        return self.passed and None not in (self.algebra, self.structure, self.outputs)

    def reason(self) -> str:
        """Say in one line why it did not pass."""
        parts = (self.algebra, self.structure, self.outputs, self.adapter)
        failed = [part for part in parts if part is not None and not part.passed]
        first = self.layers.first if self.layers else None
        where = [] if first is None else [f"the first block that differs is {first.block}, by {first.difference:.2e}"]
        why = [failed[0].reason()] if failed else []
        return "; ".join([*why, *where]) or self.skipped or "nothing was compared"


@one_thread_each()
def measure(
    plan: Plan, source: Checkpoint, target: Checkpoint, *, by_layer: bool = False, must: bool = True
) -> Verified:
    """Look at everything that a plan says of its target.

    `by_layer`: run the models block by block, which is done anyway where they are large. Unless outputs `must` be
    compared, a machine that is too small for it is no failure.
    """
    algebra = structure = why = None
    phase.now("verifying: every tensor")
    if plan.policy.lossless:
        algebra = check_algebra(plan, source, target)
        phase.now("verifying: every block")
        structure = check_structure(plan, source, target)
    else:
        check_numbers(target)
        why = f"{plan.policy.method} is not lossless at these sizes, so there are no rules to check tensors by"
    wrong = not all(part is None or part.passed for part in (algebra, structure))
    # What a method makes anew has no copies of units to look at, and wrong tensors may have other shapes.
    phase.now("verifying: duplicated units")
    symmetry = None if plan.exactness == MADE or wrong else find_twins(plan, target)
    by_layer = by_layer or not runs_whole(source, target)
    skipped = "the tensors or the structure are wrong already" if wrong else None
    if by_layer and skipped is None:
        skipped = memory_short(source, target, by_layer=True)
    if skipped is not None and not must:
        return Verified(None, algebra, structure, symmetry, skipped=skipped)
    try:
        twin = not wrong and has_twin(plan)
        outputs, layers = compare_outputs(source, target, plan, by_layer=by_layer, twin=twin)
    except LemonxError as error:
        if not wrong:
            raise
        return Verified(None, algebra, structure, symmetry, skipped=str(error))
    source.check_unchanged()
    target.check_unchanged()
    return Verified(outputs, algebra, structure, symmetry, layers, why)


def compare_outputs(
    source: Checkpoint,
    target: Checkpoint,
    plan: Plan | None,
    *,
    by_layer: bool,
    twin: bool = False,
    rounding: Rounding | None = None,
) -> tuple[Comparison, Layers | None]:
    """Compare what two checkpoints compute; without a plan every weight may have been rounded.

    `twin`: the tensors obey the plan, so a target in which nothing is rounded can show how they are wired. `rounding`:
    what is rounded, if it is more than the plan says.
    """
    if plan is None:
        for checkpoint in (source, target):
            check_covered(checkpoint)
            check_numbers(checkpoint)
    rounding = rounding or (_rounding(plan) if plan is not None else Rounding())
    phase.now("verifying: both models in float64")
    with one_thread_each():
        return compare(source, target, plan, rounding=rounding, by_layer=by_layer, twin=twin)


@names_its_folder
def check_covered(checkpoint: Checkpoint) -> None:
    """BadCheckpoint where a spec knows that config.json and the tensors do not belong together: no model is built.

    A class of which transformers makes up what is missing, or leaves out what is too much, has no outputs of its own.
    """
    try:
        family = architectures.find(checkpoint.config)
        spec = family.spec(checkpoint.config)
    except (UnknownArchitecture, Refused):
        return  # outputs can be compared all the same
    raise_first(eps_problems(spec, family.config(checkpoint.config)))
    infos = ((hit, checkpoint.tensors[hit.name]) for hit in match(spec, checkpoint.tensors))
    raise_first(problem for hit, info in infos for problem in tensor_problems(spec, hit, info, FLOATS))


def _rounding(plan: Plan) -> Rounding | None:
    """The tensors of the source that the plan rounds; None if there are none."""
    if not plan.is_rounded:
        return None
    rounded = frozenset(step.source for step in plan.steps if step.exactness == ROUNDED)
    return Rounding(rounded or None, framed=plan.frames is not None, cap=WIRING)


def check_numbers(checkpoint: Checkpoint) -> None:
    """BadCheckpoint if any number is NaN or Inf, except in buffers that the model computes itself.

    A sample of outputs does not reach every entry, such as the row of a rare token or the last position.
    """
    dropped = _dropped(checkpoint)
    for name in checkpoint.tensors:
        if name not in dropped:
            for block in checkpoint.blocks(name):
                check_finite(block, name, checkpoint)


def _dropped(checkpoint: Checkpoint) -> set[str]:
    """Tensors that no model reads, such as masks, which may hold -Inf; none if there is no spec."""
    try:
        spec = architectures.find(checkpoint.config).spec(checkpoint.config)
    except LemonxError:
        return set()
    return {hit.name for hit in matched(spec, checkpoint.tensors)[0] if isinstance(spec.rows[hit.row], Dropped)}
