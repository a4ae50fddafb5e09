"""The files of a run's checkpoint that an expansion writes, in the form of the run that it grows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from lemonx.checkpoints import Checkpoint, CheckpointWriter
from lemonx.checkpoints.chunks import Views, in_keys, stored_shapes, whole
from lemonx.checkpoints.dcp import WRITER
from lemonx.checkpoints.dcp_files import DcpFiles
from lemonx.checkpoints.runs import RunFolder
from lemonx.checkpoints.shards import Entry, Files, together
from lemonx.checkpoints.universal import UniversalFolder
from lemonx.checkpoints.universal_files import UniversalFiles
from lemonx.errors import BadCheckpoint, BadTarget
from lemonx.models.building import skeleton
from lemonx.models.run_names import RunNames, names_of
from lemonx.optimizer_state.on_disk import GrownState
from lemonx.optimizer_state.trainer import carry
from lemonx.planning.plan import Plan
from lemonx.workflows.ranks import Ranks
from lemonx.workflows.run_state import RunState, origins, source_views

_MOST_PROCESSES = 1 << 16


class RunOutput:
    """What is written beside and around the tensors of a plan: the run's form, and its other state if it is wanted."""

    def __init__(self, plan: Plan, source: Checkpoint, *, processes: int | None, with_state: bool) -> None:
        assert source.run is not None
        if processes is not None and not 1 <= processes <= _MOST_PROCESSES:
            raise BadTarget(f"--shards {processes} is not a number of processes", f"use 1 to {_MOST_PROCESSES}")
        self.run = source.run
        shapes = {name: stored.shape for name, stored in self.run.weights.items()}
        self.names = names_of(source.config, shapes) or RunNames("plain")
        self.entries: list[Entry] = [(step.name, step.dtype, step.shape) for step in plan.steps]
        once = _target_views(plan, self.run, self.names)
        self.views = _with_ties(once, plan, self.run, self.names)
        if processes is not None and isinstance(self.run, UniversalFolder):
            raise BadTarget("a universal checkpoint is loaded by any number of processes", "leave --shards out")
        count = processes or self.run.processes
        self._out: DcpFiles | UniversalFiles = DcpFiles(self.run.below, count)
        if isinstance(self.run, UniversalFolder):
            order = [self.names.key(name) for name, _ in skeleton(plan.target_config).named_parameters()]
            self._out = UniversalFiles(self.run, origins(plan, source_views(source), once), order)
        self.state = RunState(plan, source, once, self._out, count) if with_state else None

    def own(self, ranks: Ranks) -> Callable[[str], bool]:
        """Return whether a file is one that this process writes: those of a rank are numbered so."""

        def own(name: str) -> bool:
            written = WRITER.fullmatch(Path(name).name)
            return written is not None and int(written[1]) % ranks.count == ranks.rank

        return own

    def write_state(self, source: Checkpoint, writer: CheckpointWriter, *, carried: bool = True) -> GrownState | None:
        """Write what is no weight; what a certificate says of the optimizer's state.

        `carried`: the files of a run that are copied beside it, too.
        """
        if self.state is None:
            return None
        if carried:
            carry(source.path, writer.folder)
        return self.state.write(writer)

    def files(self) -> Files:
        """All files to be: the weights, and the rest of the run."""
        dtypes = {part.key: dtype for name, dtype, _ in self.entries for part in self.views[name]}
        keys = {
            key: self._out.add_tensor((*self.run.inside, key), dtypes[key], shape)
            for key, shape in stored_shapes(self.views).items()
        }
        entries, views = self.entries, in_keys(self.views, keys)
        if self.state is None:
            return self._out.files(entries, views)
        more, seen = self.state.lay_out()
        if self.state.out is self._out:
            return self._out.files([*entries, *more], {**views, **seen})
        return together(self._out.files(entries, views), self.state.out.files(more, seen))


def _target_views(plan: Plan, run: RunFolder, names: RunNames) -> Views:
    """The target's tensors as boxes of the run's."""
    files = {step.name: step.shape for step in plan.steps}
    views = dict(names.views(plan.target_config, files))
    if odd := sorted(views.keys() ^ files.keys()):
        raise BadCheckpoint(
            f"stores {odd[0]!r} in a form that cannot be written back",
            "save the model with save_pretrained, and expand that folder",
            file=run.path,
        )
    return views


def _with_ties(views: Views, plan: Plan, run: RunFolder, names: RunNames) -> Views:
    """The same, and a tied weight that the run stores twice is written twice."""
    views = dict(views)
    for name, row in plan.tied.items():
        step = next(step for step in plan.steps if step.row == row)
        key = name if name in run.weights else names.key(name)
        views[step.name] = (*views[step.name], *whole(key, step.shape))
    return views
