"""Grow a LoRA adapter along with its base, and show that both together are the same function as before."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch

from lemonx.checkpoints import Checkpoint, CheckpointWriter
from lemonx.checkpoints.adapters import WEIGHTS as ADAPTER_WEIGHTS
from lemonx.checkpoints.adapters import Adapter, as_checkpoint, changes_of, merged
from lemonx.checkpoints.folder import ADAPTER, ADAPTER_FOLDER
from lemonx.checkpoints.safetensors_file import torch_dtype
from lemonx.execution.held import HeldSink
from lemonx.execution.runner import run_plan
from lemonx.guards import phase
from lemonx.models.sources import in_files
from lemonx.planning.adapters import Followed, follow
from lemonx.planning.plan import Plan
from lemonx.verification.algebra import check_algebra
from lemonx.verification.comparison import Comparison
from lemonx.verification.rounding import PRECISION, WIRING, Rounding, stored_dtype
from lemonx.verification.running import runs_whole
from lemonx.verification.verify import GrownAdapter, compare_outputs


class GrowingAdapter:
    """An adapter beside its base, while the base grows by a plan; `close` removes what it needed on disk."""

    def __init__(self, adapter: Adapter, base: Checkpoint, plan: Plan, output: Path) -> None:
        self._adapter, self._base, self._plan = adapter, base, plan
        self._kept = ExitStack()
        try:
            changes = changes_of(base, adapter, in_files(base))
            self._stored = self._kept.enter_context(as_checkpoint(adapter, base.config))
            renamed = any(name not in change.names for name, change in changes.items())
            named = _in_model(plan) if renamed else str
            self.followed: Followed = follow(plan, adapter, changes, self._stored.tensors, named, str(output))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> GrowingAdapter:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        self._kept.close()

    def write(self, writer: CheckpointWriter) -> None:
        """Add the grown adapter to an output."""
        steps = self.followed.plan.steps
        weights = {step.name: torch.empty(step.shape, dtype=torch_dtype(step.dtype)) for step in steps}
        run_plan(self.followed.plan, self._stored, HeldSink.whole(weights))
        writer.add_tensors(f"{ADAPTER_FOLDER}/{ADAPTER_WEIGHTS}", weights)
        text = json.dumps(self.followed.settings, indent=2, sort_keys=True) + "\n"
        writer.add_text(f"{ADAPTER_FOLDER}/{ADAPTER}", text)

    def measured(self, target: Checkpoint | None, *, outputs: bool = True) -> GrownAdapter:
        """What becomes of the adapter; of a target, every entry of the grown one is checked, and `outputs` of both."""
        algebra = compared = None
        if target is not None:
            phase.now("verifying: the adapter")
            grown = Adapter(target.path / ADAPTER_FOLDER)
            with as_checkpoint(grown, target.config) as found:
                algebra = check_algebra(self.followed.plan, self._stored, found)
            if algebra.passed and outputs:
                compared = self._compared(target, grown)
        name, follows = self._adapter.name, self.followed
        return GrownAdapter(name, ADAPTER_FOLDER, follows.modules, follows.replaced, algebra, compared)

    def _compared(self, target: Checkpoint, grown: Adapter) -> Comparison:
        """Both pairs as one model each, merged in float64: nothing is rounded that is not in the files."""
        with _merged(self._base, self._adapter) as before, _merged(target, grown) as after:
            whole, rounding = runs_whole(before, after), self._rounding(target)
            outputs, _ = compare_outputs(before, after, self._plan, by_layer=not whole, rounding=rounding)
        return outputs

    def _rounding(self, target: Checkpoint) -> Rounding | None:
        """What is rounded in either: weights of the base, or of the adapter."""
        if not (self._plan.is_rounded or self.followed.plan.is_rounded):
            return None
        own = {str(torch_dtype(info.dtype)).removeprefix("torch.") for info in self._stored.tensors.values()}
        coarse = min(*own, stored_dtype(target), key=PRECISION.index)
        return Rounding(framed=self._plan.frames is not None, cap=WIRING, dtype=coarse)


def _merged(base: Checkpoint, adapter: Adapter) -> Checkpoint:
    return merged(base, adapter, in_files(base), wide=True)


def _in_model(plan: Plan) -> Callable[[str], str]:
    """A function from the name of a tensor in the target's files to its name in the model."""
    from lemonx.models.building import disk_names, skeleton

    known = {disk: name for name, disk in disk_names(skeleton(plan.target_config), buffers=True).items()}
    return lambda name: known.get(name, name)
