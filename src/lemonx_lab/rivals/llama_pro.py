"""LLaMA-Pro: identity blocks spread over the stack."""

from lemonx.algebra.free_parameters import EVEN, Free
from lemonx.errors import Refused
from lemonx.methods import method
from lemonx.planning.policy import Change, GrowthPolicy, copies, silenced


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
