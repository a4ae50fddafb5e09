"""How the survey of all model types grows a model: by the table of its family, or by what a run of it shows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from lemonx import api, architectures
from lemonx.diagnostics.survey import pool, record
from lemonx.diagnostics.survey.measuring import LARGEST, Claim
from lemonx.diagnostics.survey.pool import Ways
from lemonx.diagnostics.survey.record import Record
from lemonx.diagnostics.survey.running import giving
from lemonx.errors import BadData, LemonxError
from lemonx.planning.plan import Plan
from lemonx.verification.media import Batch


def ways(model_type: str) -> Ways:
    """How models of this type can be grown."""
    inferred = {"inferred": (__name__, "by_run")}
    table = {"table": (__name__, "by_table")} if model_type in architectures.families() else {}
    return {**inferred, **table}


def survey(only: list[str] | None, kept: Path | None, jobs: int, tell: Callable[[int, int, str], None]) -> Record:
    """A row for every model type and task, or for some types; those in the file `kept` are not measured again.

    The file is written after every row, so that whoever stops the survey can go on with it later.
    """
    before = record.read(kept) if kept else Record.empty()
    known = {(row.model_type, row.task): row for row in before.rows}
    wanted = [job for job in pool.all_jobs() if not only or job[0] in only]
    todo = [job for job in wanted if job not in known]
    for done, row in enumerate(pool.survey(todo, ways, at_once=jobs), start=1):
        known[row.model_type, row.task] = row
        tell(done, len(todo), row.model_type)
        if kept:
            record.write(kept, before.transformers, list(known.values()))
    return Record(before.transformers, [known[job] for job in wanted])


def recorded(only: list[str] | None, kept: Path) -> Record:
    """The rows of a file, and nothing else."""
    if not kept.exists():
        raise BadData("is not there", "measure it: --record", file=kept)
    found = record.read(kept)
    rows = sorted(found.rows, key=lambda row: (row.model_type, row.task))
    return Record(found.transformers, [row for row in rows if not only or row.model_type in only])


def by_run(small: Any, large: Any, inputs: Batch, answers: frozenset[str]) -> Claim:
    """Fill the larger model by what the runs of both show, and nothing else; if eps costs anything, with small gains.

    It is asked for these outputs alone: where some have the same size in both, wider hidden states are not.
    """
    with giving(answers, small, large):
        lost = loss(api.grow(small, large, inputs).plan)
        if lost <= LARGEST:
            return Claim(loss=lost, begins=True)
        try:
            plan = api.grow(small, large, inputs, small_gains=True).plan
            return Claim(loss=loss(plan), begins=True, small_gains=True)
        except LemonxError:  # it stays as it was
            return Claim(loss=lost, begins=True)


def by_table(small: Any, large: Any, inputs: Batch, answers: frozenset[str]) -> Claim:
    """The model that `lemonx.expand` makes, without its verification: the survey compares the two itself.

    A table may ask for more than sizes (the eps of a norm, the kinds of new layers), so its own config is kept.
    """
    from lemonx.verification.float64 import Float64

    def made(*, small_gains: bool = False) -> Claim:
        plans: list[Plan] = []
        with Float64():  # what a model computes for itself, such as angles, is as exact as in the smaller one
            model = api.expand(
                small, like=large.config.to_dict(), verify=False, planned=plans.append, small_gains=small_gains
            )
        return Claim(model, loss(plans[0]), small_gains=small_gains)

    claim = made()
    if claim.loss <= LARGEST:
        return claim
    try:
        return made(small_gains=True)
    except LemonxError:
        return claim


def loss(plan: Plan) -> float:
    """What the plan says that added Post-LN blocks lose to the eps of their norms."""
    return plan.expected_loss if plan.chains else 0.0
