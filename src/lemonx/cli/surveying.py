"""How the survey of all model types grows a model: by the table of its family, or by what a run of it shows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lemonx import api, architectures
from lemonx.diagnostics.survey import pool, record
from lemonx.diagnostics.survey.measuring import Row
from lemonx.diagnostics.survey.pool import Ways


def ways(model_type: str) -> Ways:
    """How models of this type can be grown."""
    inferred = {"inferred": (__name__, "by_run")}
    table = {"table": (__name__, "by_table")} if model_type in architectures.families() else {}
    return {**inferred, **table}


def survey(only: list[str] | None, kept: Path | None, jobs: int, tell: Callable[[int, int, str], None]) -> list[Row]:
    """A row for every model type and task, or for some types; those in the file `kept` are not measured again."""
    known = {(row.model_type, row.task): row for row in (record.read(kept) if kept else [])}
    wanted = [job for job in pool.all_jobs() if not only or job[0] in only]
    todo = [job for job in wanted if job not in known]
    for done, row in enumerate(pool.survey(todo, ways, at_once=jobs), start=1):
        known[row.model_type, row.task] = row
        tell(done, len(todo), row.model_type)
        if kept:
            record.write(kept, list(known.values()))
    return [known[job] for job in wanted]


def by_run(small: Any, large: Any, inputs: Mapping[str, Any]) -> None:
    """Fill the larger model by what the runs of both show, and nothing else."""
    api.grow(small, large, dict(inputs))


def by_table(small: Any, large: Any, inputs: Mapping[str, Any]) -> Any:
    """The model that `lemonx.expand` makes, without its verification: the survey compares the two itself.

    A table may ask for more than sizes (the eps of a norm, the kinds of new layers), so its own config is kept.
    """
    from lemonx.verification.float64 import Float64

    with Float64():  # what a model computes for itself, such as angles, is as exact as in the smaller one
        return api.expand(small, like=large.config.to_dict(), verify=False)
