"""The files of a distributed checkpoint that an expansion writes, in the form of the run that it grows."""

from __future__ import annotations

from lemonx.checkpoints import Checkpoint
from lemonx.checkpoints.chunks import Views, in_keys, stored_shapes, whole
from lemonx.checkpoints.dcp import DcpFolder
from lemonx.checkpoints.dcp_files import DcpFiles
from lemonx.checkpoints.shards import Entry, Files, together
from lemonx.errors import BadCheckpoint, BadTarget
from lemonx.models.run_names import RunNames, names_of
from lemonx.planning.plan import Plan
from lemonx.workflows.run_state import RunState

_MOST_PROCESSES = 1 << 16


class RunOutput:
    """What is written beside and around the tensors of a plan: the run's form, and its other state if it is wanted."""

    def __init__(self, plan: Plan, source: Checkpoint, *, processes: int | None, with_state: bool) -> None:
        assert source.dcp is not None
        if processes is not None and not 1 <= processes <= _MOST_PROCESSES:
            raise BadTarget(f"--processes {processes} is not a number of processes", f"use 1 to {_MOST_PROCESSES}")
        self.dcp = source.dcp
        shapes = {name: stored.shape for name, stored in self.dcp.weights.items()}
        self.names = names_of(source.config, shapes) or RunNames("plain")
        self.entries: list[Entry] = [(step.name, step.dtype, step.shape) for step in plan.steps]
        once = _target_views(plan, self.dcp, self.names)
        self.views = _with_ties(once, plan, self.dcp, self.names)
        count = processes or self.dcp.processes
        self._out = DcpFiles(self.dcp.below, count)
        self.state = RunState(plan, source, once, self._out, count) if with_state else None

    def files(self) -> Files:
        """All files to be: the weights, and the rest of the run."""
        dtypes = {part.key: dtype for name, dtype, _ in self.entries for part in self.views[name]}
        keys = {
            key: self._out.add_tensor((*self.dcp.inside, key), dtypes[key], shape)
            for key, shape in stored_shapes(self.views).items()
        }
        entries, views = self.entries, in_keys(self.views, keys)
        if self.state is None:
            return self._out.files(entries, views)
        more, seen = self.state.lay_out()
        if self.state.out is self._out:
            return self._out.files([*entries, *more], {**views, **seen})
        return together(self._out.files(entries, views), self.state.out.files(more, seen))


def _target_views(plan: Plan, dcp: DcpFolder, names: RunNames) -> Views:
    """The target's tensors as boxes of the run's."""
    files = {step.name: step.shape for step in plan.steps}
    views = dict(names.views(plan.target_config, files))
    if odd := sorted(views.keys() ^ files.keys()):
        raise BadCheckpoint(
            f"stores {odd[0]!r} in a form that cannot be written back",
            "save the model with save_pretrained, and expand that folder",
            file=dcp.path,
        )
    return views


def _with_ties(views: Views, plan: Plan, dcp: DcpFolder, names: RunNames) -> Views:
    """The same, and a tied weight that the run stores twice is written twice."""
    views = dict(views)
    for name, row in plan.tied.items():
        step = next(step for step in plan.steps if step.row == row)
        key = name if name in dcp.weights else names.holder + name
        views[step.name] = (*views[step.name], *whole(key, step.shape))
    return views
