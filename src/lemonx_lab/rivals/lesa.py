"""LESA: blocks in between, predicted from their neighbours in the basis of a singular value decomposition."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from lemonx.algebra.free_parameters import Free
from lemonx.checkpoints import Checkpoint
from lemonx.errors import Refused
from lemonx.methods import Lessons, method
from lemonx.planning.plan import Plan
from lemonx.planning.policy import Change, GrowthPolicy
from lemonx.planning.tensor_steps import Step
from lemonx.specs.spec import Block, Stack
from lemonx_lab.rivals.copying import lossy

if TYPE_CHECKING:
    import torch

# Of the variance between blocks, what the basis keeps; and the penalty of the predictor, relative to its inputs.
KEPT, RIDGE = 0.99, 1e-2
PAPER = "Yang et al., LESA: Learnable LLM Layer Scaling-Up, ACL 2025"


def predicted(plan: Plan, checkpoint: Checkpoint, lessons: Lessons) -> Mapping[str, torch.Tensor]:
    """Source blocks as they are; each added block predicted from the two that it stands between.

    The paper trains a small network on the triples of neighbouring blocks; few blocks give few triples, so here the
    predictor is linear, fitted in closed form, one for each tensor of a block.
    """
    made: dict[str, torch.Tensor] = {}
    rows: dict[tuple[str, str], list[Step]] = {}
    for step in plan.steps:
        if plan.source_spec.stack_of(step.row) is None:
            made[step.name] = checkpoint.read(step.source)
        else:
            rows.setdefault((step.row, step.suffix), []).append(step)
    for steps in rows.values():
        made |= _between(sorted(steps, key=lambda step: step.block), plan, checkpoint)
    return made


def _between(steps: Sequence[Step], plan: Plan, checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    import torch

    stack = plan.source_spec.stack_of(steps[0].row)
    assert stack is not None
    blocks = plan.blocks[stack]
    origins = [blocks[step.block].source for step in steps]
    names = {origin: step.source for origin, step in zip(origins, steps, strict=True)}
    order = sorted(names)
    first = checkpoint.read(names[order[0]])
    if not first.is_floating_point():
        return {step.name: checkpoint.read(step.source) for step in steps}
    flat = torch.stack([checkpoint.read(names[origin]).double().reshape(-1) for origin in order])
    mean = flat.mean(0)
    left, values, right = torch.linalg.svd(flat - mean, full_matrices=False)
    share = (values**2).cumsum(0) / (values**2).sum().clamp(min=1e-300)
    rank = int((share < KEPT).sum()) + 1
    places = left[:, :rank] * values[:rank]  # a point for each block
    weight = _predictor(places)
    found = {}
    for step, origin in zip(steps, origins, strict=True):
        at = order.index(origin)
        if not blocks[step.block].added or at + 1 >= len(order):
            found[step.name] = checkpoint.read(step.source)
            continue
        neighbours = torch.cat([places[at], places[at + 1]])
        made = mean + (neighbours @ weight) @ right[:rank]
        found[step.name] = made.reshape(first.shape).to(first.dtype)
    return found


def _predictor(places: torch.Tensor) -> torch.Tensor:
    """The linear map from the places of two neighbours to that of the block between them; near their middle."""
    import torch

    count, rank = places.shape
    halves = torch.cat([torch.eye(rank), torch.eye(rank)]).double() / 2
    if count < 3:
        return halves
    x = torch.cat([places[:-2], places[2:]], 1)
    penalty = RIDGE * (x**2).sum() / x.shape[1] + 1e-30
    gram = x.T @ x + penalty * torch.eye(2 * rank, dtype=torch.float64)
    return halves + torch.linalg.solve(gram, x.T @ (places[1:-1] - x @ halves))


@method("lesa", paper=PAPER, grows=("depth",), make=predicted)
def lesa(change: Change, free: Free) -> GrowthPolicy:
    """Blocks between neighbours, predicted from them in the basis of an SVD of all blocks: not lossless."""
    for name, stack in change.source.stacks.items():
        most = max(stack.size, 2 * stack.size - 1 - stack.pinned)
        if change.target.stacks[name].size > most:
            raise Refused(
                f"lesa puts at most one layer between two of the {stack.size} of {name}", f"try at most {most} layers"
            )
    made = "predicted from its neighbours"
    return lossy(arrange=_in_gaps, made=made)


def _in_gaps(name: str, stack: Stack, target: int) -> tuple[Block, ...]:
    """Source blocks in their order, and one added block in as many of the gaps between them as are needed.

    >>> [(block.source, block.added) for block in _in_gaps("layers", Stack(4, "residual"), 6)]
    [(0, False), (0, True), (1, False), (2, False), (2, True), (3, False)]
    """
    gaps, wanted = stack.size - 1 - stack.pinned, target - stack.size
    chosen = {stack.pinned + (2 * i + 1) * gaps // (2 * wanted) for i in range(wanted)}
    blocks = []
    for source in range(stack.size):
        blocks.append(Block(source, added=False, closes=source not in chosen))
        blocks += [Block(source, added=True, closes=True)] if source in chosen else []
    return tuple(blocks)
