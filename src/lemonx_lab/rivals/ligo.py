"""LiGO: width and depth operators that are learned on data, one per space and one per row of a stack.

    W*_l = sum_j w[l, j]  B_out W_j (S B_in)^T

B (target x source) is the operator of a space, w (target blocks x source blocks) that of a row. S is constant: the
share of each copy at the start. There B copies units in turn and w stacks blocks, so learning begins at bert2BERT's
FPI, plus a little noise without which all copies would learn the same.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from lemonx.algebra.free_parameters import Free
from lemonx.checkpoints import Checkpoint
from lemonx.errors import BadData, Refused
from lemonx.methods import Lessons, method
from lemonx.planning.plan import Plan
from lemonx.planning.policy import Change, GrowthPolicy
from lemonx.planning.tensor_steps import Step
from lemonx.specs.rows import Axis, Row
from lemonx_lab.rivals.copying import lossy_stacked

if TYPE_CHECKING:
    import torch

PAPER = "Wang et al., Learning to Grow Pretrained Models for Efficient Transformer Training, ICLR 2023"
# Of the operators, at the start; and the learning rate of Adam on them.
NOISE = 0.01
LEARNING_RATE = 2e-3


def learn(plan: Plan, checkpoint: Checkpoint, lessons: Lessons) -> Mapping[str, torch.Tensor]:
    """The target's tensors, after training the operators on the task's own loss."""
    import torch

    from lemonx.models.building import disk_names, new_model
    from lemonx.models.foreign import foreign

    model = new_model(plan.target_config, plan.seed).train()
    named = {on_disk: name for name, on_disk in disk_names(model, buffers=True).items()}
    if odd := sorted({step.name for step in plan.steps} ^ named.keys()):
        raise Refused(
            f"ligo trains the model under transformers' names, and {odd[0]} has another name in its file",
            "use another --method",
        )
    operators = _Operators(plan, checkpoint)
    optimizer = torch.optim.Adam(operators.learned, lr=LEARNING_RATE)
    state = torch.random.get_rng_state()
    torch.manual_seed(plan.seed)  # dropout
    try:
        for step, batch in enumerate(_batches(plan, lessons)):
            weights = {named[name]: tensor for name, tensor in operators.tensors()}
            with foreign("run the target on this data", "give other data", BadData):
                loss = torch.func.functional_call(model, weights, kwargs=batch).loss
            if not bool(loss.isfinite()):
                raise Refused(f"ligo's loss is not finite after {step} steps", "use other data, or fewer steps")
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            lessons.tell(step, loss.item())
    finally:
        torch.random.set_rng_state(state)
    with torch.no_grad():
        return dict(operators.tensors())


def _batches(plan: Plan, lessons: Lessons) -> Iterator[dict[str, torch.Tensor]]:
    import torch
    from torch.utils.data import DataLoader

    from lemonx_lab import data
    from lemonx_lab.data.tasks import default, task_of

    task = task_of(plan.target_config)
    made = data.prepare(task, lessons.data or default(plan.target_config), config=plan.target_config, seed=plan.seed)
    if not len(made.train):
        raise Refused("ligo has no data to learn from", "give more data")
    order = torch.Generator().manual_seed(plan.seed)
    loader: Any = DataLoader(
        made.train, batch_size=lessons.batch_size, shuffle=True, generator=order, collate_fn=made.collate
    )
    return itertools.islice(itertools.chain.from_iterable(itertools.repeat(loader)), lessons.steps)


class _Operators:
    """The operators of a plan, and the tensors that they compute from the source's."""

    def __init__(self, plan: Plan, checkpoint: Checkpoint) -> None:
        import torch

        noise = torch.Generator().manual_seed(plan.seed)
        self.plan = plan
        self.source = {step.source: checkpoint.read(step.source) for step in plan.steps}
        self.width, self.start, self.share = {}, {}, {}
        for name, expansion in plan.types.spaces.items():
            if expansion.is_identity:
                continue
            start = torch.zeros(expansion.target_size, expansion.size)
            # New tokens and positions copy nothing: their rows begin as noise.
            copied = np.flatnonzero(expansion.is_copy)
            origins, scale = expansion.unit[copied], expansion.amp[copied] * expansion.gain
            start[copied, origins] = torch.as_tensor(scale, dtype=torch.float32)
            share = np.ones(expansion.target_size)
            share[copied] = 1 / (expansion.copies[origins] * scale**2)
            self.start[name] = start
            self.width[name] = (start + NOISE * torch.randn(start.shape, generator=noise)).requires_grad_()
            self.share[name] = torch.as_tensor(share, dtype=torch.float32)
        self.groups = defaultdict[tuple[str, str], list[Step]](list)
        for step in plan.steps:
            self.groups[step.row, step.suffix].append(step)
        self.depth = {}
        for row in plan.rows:
            stack = plan.source_spec.stack_of(row)
            if stack and plan.source_spec.stacks[stack].stored != len(plan.blocks[stack]):
                first, blocks = plan.source_spec.stacks[stack].pinned, plan.blocks[stack]
                start = torch.zeros(len(blocks) - first, plan.source_spec.stacks[stack].stored - first)
                for index, block in enumerate(blocks[first:]):
                    start[index, block.source - first] = 1.0
                self.depth[row] = (start + NOISE * torch.randn(start.shape, generator=noise)).requires_grad_()

    @property
    def learned(self) -> list[torch.Tensor]:
        if not self.width and not self.depth:
            raise Refused("ligo learns how to grow, and nothing grows here", "give a size that grows")
        return [*self.width.values(), *self.depth.values()]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor of the target, differentiable in the operators."""
        import torch

        for (name, suffix), steps in self.groups.items():
            row = self.plan.source_spec.rows[name]
            statistics = suffix.startswith(("running", "num_batches"))
            # Statistics are not weights: a mixture of variances may be negative, so they are copied.
            wide = {step.source: self._widened(row, suffix, step, learned=not statistics) for step in steps}
            stack = self.plan.source_spec.stack_of(name)
            first = self.plan.source_spec.stacks[stack].pinned if stack else 0
            mixed = [step for step in steps if name in self.depth and step.block >= first and not statistics]
            for step in steps:
                if step not in mixed:
                    yield step.name, wide[step.source]
            if mixed:
                mixed.sort(key=lambda step: step.block)
                origins = list(dict.fromkeys(step.source for step in sorted(mixed, key=self._origin)))
                blocks = torch.tensordot(self.depth[name], torch.stack([wide[origin] for origin in origins]), 1)
                yield from ((step.name, block) for step, block in zip(mixed, blocks, strict=True))

    def _origin(self, step: Step) -> int:
        stack = self.plan.source_spec.stack_of(step.row)
        assert stack is not None
        return self.plan.blocks[stack][step.block].source

    def _widened(self, row: Row, suffix: str, step: Step, *, learned: bool) -> torch.Tensor:
        """B_out W (S B_in)^T, along every axis that is a space."""

        tensor = self.source[step.source]
        if not tensor.is_floating_point():
            return tensor
        operators = self.width if learned else self.start
        wide = tensor.float()
        for position, axis in enumerate(row.tensors()[suffix]):
            wide = self._along(wide.movedim(position, 0), axis, operators).movedim(0, position)
        return wide.reshape(step.shape)

    def _along(self, tensor: torch.Tensor, axis: Axis, operators: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The operators of the first axis: of every space in it, part by part where parts are joined."""
        import torch

        spec, others = self.plan.source_spec, tensor.shape[1:]
        over, over_target = (one.slices(axis.side) for one in (spec, self.plan.target_spec))
        sizes = [[spec.axis_size(name) or len(tensor) for name in part] for part in axis.side.parts]
        slices = tensor.reshape(over, -1, *others).split([math.prod(part) // over for part in sizes], 1)
        grown = []
        for names, shape, piece in zip(axis.side.parts, sizes, slices, strict=True):
            part = piece.reshape(*shape, *others)
            for position, name in enumerate(names):
                if name in operators:
                    operator = operators[name]
                    # Whatever reads copies takes its share of each.
                    operator = operator * self.share[name][:, None] if axis.role == "r" else operator
                    part = (part.movedim(position, -1) @ operator.T).movedim(-1, position)
            grown.append(part.reshape(over_target, -1, *others))
        return torch.cat(grown, 1).reshape(-1, *others)


@method("ligo", paper=PAPER, make=learn, learns=True)
def ligo(change: Change, free: Free) -> GrowthPolicy:
    """Learned operators for width and depth, trained for some steps on data: not lossless, not symmetric."""
    return lossy_stacked(made="learned from all blocks")
