"""Undo an expansion: the source, bit for bit, from its target alone."""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from lemonx.checkpoints import Checkpoint, CheckpointWriter
from lemonx.checkpoints.folder import CONFIG, INDEX
from lemonx.checkpoints.layout import shards, without_numbers
from lemonx.errors import BadCheckpoint, LemonxError, NotVerified
from lemonx.execution.shrinking import read_back
from lemonx.execution.sidecar_files import follows_sizes
from lemonx.guards.results import Result
from lemonx.options.declared import PathLike, Shrinking, Table
from lemonx.planning.plan import Plan
from lemonx.planning.source_entries import Held, source_entries
from lemonx.verification.certificate import GrownFrom, grown_from
from lemonx.workflows.planning import plan_again
from lemonx.workflows.tables import table_for

_GIVE = "give the expansion as it was written, or one whose training had `train: new`"


@dataclass(frozen=True, repr=False)
class Shrunk(Result, printer="expansion:print_shrunk"):
    """A source that was read back: where it is, how many tensors it has, and the digest that both have."""

    path: Path
    tensors: int
    sha256: str


@contextmanager
def recovered_plan(large: Checkpoint, grown: GrownFrom, table: Table) -> Generator[tuple[Plan, Checkpoint]]:
    """The plan that made a checkpoint, and its source without numbers, from what is recorded beside the target."""
    with without_numbers(grown.layout, large.origin) as small, table_for(small, table):
        try:
            plan = plan_again(small, large, grown.said)
        except NotVerified as error:
            why = error.__cause__.found if isinstance(error.__cause__, LemonxError) else error.found
            found = f"has a {CONFIG} that does not follow from the growth that is recorded beside it ({why})"
            raise BadCheckpoint(found, _GIVE, file=large.origin) from None
        yield plan, small


def shrink_folder(large: Path, given: PathLike, options: Shrinking) -> Shrunk:
    """Write the source of an expansion; NotVerified, and nothing is written, unless its digest is the source's."""
    output = Path(os.path.expanduser(given))
    with Checkpoint.open(large) as target:
        grown = grown_from(target)
        with recovered_plan(target, grown, options) as (plan, small):
            found = source_entries(plan, sums=not grown.trained)
            _require_tensors(target, found)
            files = shards(grown.layout, large)
            with CheckpointWriter(
                output, (), max_shard_size=0, force=options.force, source=large, shards=files
            ) as writer:
                _write(plan, small, target, found, writer)
                writer.add_text(CONFIG, grown.layout.config)
                if grown.layout.index is not None:
                    writer.add_text(INDEX, grown.layout.index)
                _require_same(writer.folder, grown.sha256, large)
                # Files that speak of sizes speak of the larger model's.
                for name in (name for name in target.companions if not follows_sizes(name, plan)):
                    with target.open_companion(name) as file:
                        writer.add_file(file, name)
    return Shrunk(output, len(small.tensors), grown.sha256)


def _write(
    plan: Plan, small: Checkpoint, target: Checkpoint, found: Mapping[str, Held], writer: CheckpointWriter
) -> None:
    tables = {step.row: step.source for step in plan.steps if step.suffix == "weight"}
    for name, info in small.tensors.items():
        # A file may repeat a tied weight.
        origin = name if name in found else tables[plan.tied[name]]
        writer.write(name, 0, read_back(found[origin], target, info))


def _require_tensors(target: Checkpoint, found: Mapping[str, Held]) -> None:
    for step in (held.step for held in found.values()):
        info = target.tensors.get(step.name)
        if info is None or info.shape != step.shape:
            there = "is missing" if info is None else f"is {list(info.shape)}, not {list(step.shape)}"
            raise BadCheckpoint(f"{step.name} {there}, so the source cannot be read back", _GIVE, file=target.origin)


def _require_same(folder: Path, sha256: str, large: Path) -> None:
    with Checkpoint.open(folder) as written:
        if written.content_digest() != sha256:
            raise NotVerified(
                "holds other numbers than the source's where these stood, or a config.json that was changed, so the "
                "source cannot be read back",
                _GIVE,
                file=large,
            )
