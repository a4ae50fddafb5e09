"""Methods that deepen by copying blocks: StackBERT, G_stack, MSLT, SOLAR, MIDAS, LLaMA-Pro."""

from __future__ import annotations

from lemonx.algebra.free_parameters import EVEN, Free
from lemonx.errors import Refused
from lemonx.methods import method
from lemonx.planning import depth
from lemonx.planning.policy import Change, GrowthPolicy, copies, in_order, placed, silenced, stacked
from lemonx.specs.spec import Block, Stack

STACKBERT_PAPER = "Gong et al., Efficient Training of BERT by Progressively Stacking, ICML 2019"
MIDAS_PAPER = "Saunshi et al., On the Inductive Bias of Stacking Towards Improving Reasoning, NeurIPS 2024"


@method("stackbert", paper=STACKBERT_PAPER, grows=("depth",))
def stackbert(change: Change, free: Free) -> GrowthPolicy:
    """The whole stack again on top of itself, which doubles the depth: not lossless."""
    for name, stack in change.source.stacks.items():
        size = change.target.stacks[name].size
        if size not in (stack.size, 2 * stack.size):
            raise Refused(
                f"stackbert doubles the {stack.size} layers of {name} in each stage", f"try {2 * stack.size} layers"
            )
    return placed(stacked)


@method("gstack", paper="Du et al., Stacking Your Transformers (G_stack), NeurIPS 2024", grows=("depth",))
def gstack(change: Change, free: Free) -> GrowthPolicy:
    """The whole stack repeated a whole number of times: not lossless."""
    for name, stack in change.source.stacks.items():
        if change.target.stacks[name].size % stack.size:
            sizes = f"{2 * stack.size} or {3 * stack.size}"
            raise Refused(f"gstack repeats the {stack.size} layers of {name} a whole number of times", f"try {sizes}")
    return placed(stacked)


@method("mslt", paper="Yang et al., Progressively Stacking 2.0: Multi-stage Layerwise Training, 2020", grows=("depth",))
def mslt(change: Change, free: Free) -> GrowthPolicy:
    """Copies of the top blocks on top; these are trained first, with the others frozen, then all: not lossless."""
    frozen = ", ".join(f"{name}.0 to {name}.{stack.size - 1}" for name, stack in change.source.stacks.items())
    return placed(_top_again, f"stage 1: freeze the embeddings and {frozen}; last stage: train all")


def _top_again(name: str, stack: Stack, target: int) -> tuple[Block, ...]:
    added = target - stack.size
    if added > stack.size - stack.pinned:
        most = 2 * stack.size - stack.pinned
        raise Refused(
            f"mslt copies each of the {stack.size} layers of {name} at most once per stage",
            f"try at most {most} layers",
        )
    return in_order([*range(stack.size), *range(stack.size - added, stack.size)])


@method("solar", paper="Kim et al., SOLAR 10.7B: Effective yet Simple Depth Up-Scaling, NAACL 2024", grows=("depth",))
def solar(change: Change, free: Free) -> GrowthPolicy:
    """Two copies of the stack, the first without its last m blocks, the second without its first m: not lossless."""
    return placed(_overlapping)


def _overlapping(name: str, stack: Stack, target: int) -> tuple[Block, ...]:
    half, odd = divmod(target, 2)
    if target == stack.size:
        return in_order(range(target))
    if odd or half > stack.size or stack.pinned:
        most = 2 * stack.size
        raise Refused(
            f"solar joins two equal parts of the {stack.size} layers of {name}",
            f"try an even number of layers up to {most}",
        )
    return in_order([*range(half), *range(stack.size - half, stack.size)])


@method("midas", paper=MIDAS_PAPER, grows=("depth",))
def midas(change: Change, free: Free) -> GrowthPolicy:
    """Copies of the blocks in the middle behind themselves, gradually over several stages: not lossless."""
    return placed(_middle, "the paper adds a few blocks in each of several stages")


def _middle(name: str, stack: Stack, target: int) -> tuple[Block, ...]:
    return in_order(block.source for block in depth.PLACEMENTS["middle"](name, stack, target))


@method("llama-pro", paper="Wu et al., LLaMA Pro: Progressive LLaMA with Block Expansion, ACL 2024", grows=("depth",))
def llama_pro(change: Change, free: Free) -> GrowthPolicy:
    """A copy of the last block of every group of blocks, with output weights of zero: lossless."""
    for name, stack in change.source.stacks.items():
        added = change.target.stacks[name].size - stack.size
        if added and stack.size % added and added % stack.size:
            divisors = [n for n in range(1, stack.size + 1) if stack.size % n == 0]
            near = min(divisors, key=lambda n: abs(n - added))
            raise Refused(
                f"llama-pro cuts the {stack.size} layers of {name} into equal groups", f"try {stack.size + near} layers"
            )
    frozen = ", ".join(change.source.stacks)
    note = f"the paper trains the added blocks alone: freeze the blocks of {frozen} that come from the source"
    return GrowthPolicy(EVEN, lossless=True, mode=silenced, further=copies, notes=(note,))
