"""The twin of a target: the same expansion, with all that the target's dtype rounds made again in float64.

Outputs of a rounded target differ from the source's, and how far a rounding carries is the model's own affair: one can
send a token to another expert. Any tolerance for that is an estimate, in which a wrong wire may hide, and which a right
target may exceed. So the wiring is shown by a model in which nothing is rounded: its config.json and every tensor that
is exact are the target's own, as they are stored, and only the others are made from the source again, by the same
recipes. It must agree with the source as exactly as if nothing had ever been rounded. What is stored in place of these
tensors is bounded by the algebra, which compares each of its entries with its rule.

A recipe is lossless by itself, whatever noise it draws: tensors made twice go together with tensors made once. Only
copies that are used together share their noise, and these are one row of the spec, which is made again as a whole.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from lemonx.checkpoints import Checkpoint, CheckpointWriter
from lemonx.checkpoints.temporary import Temporary
from lemonx.errors import BadOutput, CannotVerify
from lemonx.execution.runner import everything, run_plan
from lemonx.planning.exactness import BITS, ROUNDED, UP_TO_EPS
from lemonx.planning.plan import Plan
from lemonx.planning.tensor_steps import Step
from lemonx.verification.comparison import Comparison, Twin

# Bytes of the target's tensors that are copied at a time, and of a file.
PIECE, SHARD = 1 << 24, 5 * 10**9


def remade(plan: Plan) -> set[str]:
    """The tensors of the target that may be rounded."""
    # Norms that an added block applies again may have a gain of their own, which rounds as any other.
    rows = {(step.row, step.suffix) for step in plan.steps if step.exactness in (ROUNDED, UP_TO_EPS)}
    return {step.name for step in plan.steps if (step.row, step.suffix) in rows and step.dtype in BITS}


def has_twin(plan: Plan) -> bool:
    """Whether a plan rounds anything, and every tensor has a rule by which it can be made again."""
    return plan.policy.lossless and plan.is_rounded and not any(step.made for step in plan.steps)


def with_twin(
    found: Comparison, plan: Plan, source: Checkpoint, target: Checkpoint, run: Callable[[Checkpoint], Comparison]
) -> Comparison:
    """A comparison with that of the twin, which `run` makes.

    Where there is no room for a twin, the comparison of what is stored must do: if that does not pass, nobody knows.
    """
    try:
        with _twin(plan, source, target) as twin:
            return replace(found, twin=Twin.of(run(twin), len(remade(plan))))
    except BadOutput as error:
        if found.passed:
            return found
        raise CannotVerify(
            f"{found.reason()}; every tensor is right to one rounding, so it may be by rounding alone, but the "
            f"temporary folder has no room for a copy that is not rounded ({error.found})",
            "set TMPDIR to a larger one",
        ) from None


@contextmanager
def _twin(plan: Plan, source: Checkpoint, target: Checkpoint) -> Iterator[Checkpoint]:
    """The twin of a target, in a folder for a while; its errors name the target's."""
    names = remade(plan)
    exact = replace(plan, steps=tuple(replace(s, dtype="F64") if s.name in names else s for s in plan.steps))

    def again(step: Step) -> range:
        return everything(step) if step.name in names else range(0)

    with Temporary() as folder:
        entries = [(step.name, step.dtype, step.shape) for step in exact.steps]
        with CheckpointWriter(folder / "twin", entries, max_shard_size=SHARD, kept=False) as writer:
            run_plan(exact, source, writer, wanted=again)
            for step in plan.steps:
                if step.name not in names:
                    _copy(target, step, writer)
            writer.add_text("config.json", json.dumps(target.config))
        with Checkpoint.open(folder / "twin") as twin:
            twin.origin = target.origin
            yield twin


def _copy(target: Checkpoint, step: Step, writer: CheckpointWriter) -> None:
    """A tensor as it is stored."""
    rows = len(everything(step))
    piece = max(1, PIECE * rows // max(1, target.tensors[step.name].nbytes))
    for start in range(0, rows, piece):
        writer.write(step.name, start, target.read(step.name, start, min(start + piece, rows)))
