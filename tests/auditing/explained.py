"""Why a table and a trace may differ: each reason once, in words that can be checked, and where it holds.

`AGREED`: the table says in a word of its own what the trace says otherwise, or is more careful than it need be.
`LIMITS`: the trace gives up, which only ever refuses more; what the table grows there is expanded and measured, family
by family, in tests/test_families.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from auditing.subject import Difference, Subject
from lemonx.specs.norms import Norm, Scale
from lemonx.specs.rows import Row
from lemonx.specs.spaces import Entries, Experts, Padded, Space
from lemonx.specs.weights import Depthwise


@dataclass(frozen=True)
class Reason:
    """A reason for differences, whether it is the reason for one, and a pico model that needs it."""

    name: str
    says: str
    fits: Callable[[Subject, Difference], bool]
    example: str


def _space(subject: Subject, difference: Difference) -> Space | None:
    return subject.spec.spaces.get(difference.of)


def _touched(subject: Subject, name: str, *kinds: type[Row]) -> bool:
    """Whether a row of these kinds reads or writes a space."""
    return any(isinstance(row, kinds) and name in row.touches for row in subject.spec.rows.values())


def _has_experts(subject: Subject) -> bool:
    return any(isinstance(space, Experts) for space in subject.spec.spaces.values())


# ----------------------------------------------------------------- in other words


def _turns(subject: Subject, difference: Difference) -> bool:
    space = _space(subject, difference)
    told = "a constant has a number" in difference.trace or "single entries of it" in difference.trace
    return difference.check == "fixed" and isinstance(space, Entries) and space.turns.turning > 0 and told


def _sometimes(subject: Subject, difference: Difference) -> bool:
    space = _space(subject, difference)
    turning = space.turns.turning if isinstance(space, Entries) else 0
    return difference.check == "turning" and difference.trace == f"0 and {turning} do"


def _slopes(subject: Subject, difference: Difference) -> bool:
    space = _space(subject, difference)
    return (
        difference.check == "fixed" and space is not None and space.kind == "alibi" and "constant" in difference.trace
    )


def _scaled(subject: Subject, difference: Difference) -> bool:
    if difference.check == "silent":
        return any(isinstance(row, Scale) for row in subject.spec.rows.values())
    return (
        difference.check == "activation"
        and _touched(subject, difference.of, Scale)
        and "multiplied" in difference.trace
    )


def _kernels(subject: Subject, difference: Difference) -> bool:
    here = {difference.of, *(row.reads.axes[0] for row in subject.spec.rows.values()
                             if isinstance(row, Scale) and difference.of in row.touches)}  # fmt: skip
    joined = any(_touched(subject, name, Depthwise) or _beside(subject, name) for name in here)
    return difference.check == "activation" and joined and "a kernel of its own" in difference.trace


def _beside(subject: Subject, name: str) -> bool:
    """Whether a scale leads from a space to one that a depthwise convolution reads."""
    rows = [row for row in subject.spec.rows.values() if isinstance(row, Scale) and name in row.reads.axes]
    return any(_touched(subject, axis, Depthwise) for row in rows for axis in row.writes.axes)


def _unread(subject: Subject, difference: Difference) -> bool:
    space = _space(subject, difference)
    return difference.check == "activation" and isinstance(space, Entries) and space.kind == "fresh"


def _router(subject: Subject, difference: Difference) -> bool:
    return difference.check in ("activation", "fixed") and isinstance(_space(subject, difference), Experts)


def _gate(subject: Subject, difference: Difference) -> bool:
    kinds = {subject.spec.spaces[name].kind for name in difference.of.split() if name in subject.spec.spaces}
    return difference.check == "merged" and kinds == {"rand", "zero"}


def _lacking(subject: Subject, difference: Difference) -> bool:
    return difference.check == "tied" and difference.table == "a decoder too" and not _decodes(subject)


def _decodes(subject: Subject) -> bool:
    """Whether the model gives scores for the tokens of its vocabulary."""
    head = subject.model.get_output_embeddings()
    return head is not None


def _never_used(subject: Subject, difference: Difference) -> bool:
    return difference.check == "unused"


def _decided(subject: Subject, difference: Difference) -> bool:
    slopes = any(space.kind == "alibi" for space in subject.spec.spaces.values())
    entries = isinstance(_space(subject, difference), Entries)
    return difference.check == "free" and (difference.of in ("distances", "frames") or (slopes and entries))


def _held(subject: Subject, difference: Difference) -> bool:
    used = {axis for row in subject.spec.rows.values() for axis in row.touches}
    sizes = {size for name, size in subject.spec.fixed.items() if name in subject.spec.still and name not in used}
    space = _space(subject, difference)
    return difference.check == "computed" and space is not None and space.size in sizes


def _first_only(subject: Subject, difference: Difference) -> bool:
    own = any(f"{stack}.0." in row for stack in subject.spec.stacks for row in subject.spec.rows)
    return difference.check == "run" and difference.trace == "other operations" and own


AGREED = (
    Reason(
        "rotary",
        "Entries of a query or key turn at speeds of their own, so the trace fixes them. The table says how many turn, "
        "and `turns` adds pairs that keep the speeds of the old ones. The number is the same in both.",
        _turns,
        "llama-tied",
    ),
    Reason(
        "rotary in some blocks",
        "Some blocks do not turn at all (SmolLM3, Cohere 2). The table has one space for all blocks, and pairs of "
        "entries may be added where none turns, too.",
        _sometimes,
        "smollm3",
    ),
    Reason(
        "ALiBi",
        "Each head has a slope of its own, so the trace fixes heads. `alibi` gives a new head the place of its slope.",
        _slopes,
        "bloom",
    ),
    Reason(
        "scale per channel",
        "A branch times a parameter is a product of activations to the trace, and it is silent once either factor is "
        "zero: the trace names the branch, `scale` its own parameter. `scale` checks its two sides by itself.",
        _scaled,
        "dinov2-cls",
    ),
    Reason(
        "depthwise convolution",
        "Each channel has a kernel of its own, which `depthwise` checks: copies, or zeros whose kernel reads zeros.",
        _kernels,
        "convnext-cls",
    ),
    Reason(
        "nobody reads them",
        "New entries of a `key` hold anything, because the query's are zero; so a nonlinearity may change them.",
        _unread,
        "mamba",
    ),
    Reason(
        "router",
        "A softmax and the choice of the largest see all experts. `experts` knows how copies change the weights.",
        _router,
        "mixtral",
    ),
    Reason(
        "gates",
        "A gate and what it multiplies are one axis. Where the one is zero the other may hold anything, so the table "
        "has two spaces (`unread`, `silent`).",
        _gate,
        "mamba2",
    ),
    Reason(
        "a tied decoder that a class lacks",
        "The table has the decoder of the masked LM for every class. Without it, what it would read still grows by the "
        "dual of the embedding's space, which other heads follow as they follow any expansion.",
        _lacking,
        "modernbert-cls",
    ),
    Reason(
        "what no output depends on",
        "The file has these tensors and this class does not use them (a bias beside a decoder with its own, a mask "
        "token where nothing is masked): nothing is claimed of them.",
        _never_used,
        "bert-mlm-untied",
    ),
    Reason(
        "the code decides otherwise at another size",
        "One run cannot see it: the bucket of a distance depends on the number of buckets, Whisper asks for inputs as "
        "long as its table, and Falcon divides its slopes by the root of a head's width. The table says that these "
        "stay.",
        _decided,
        "t5-encoder",
    ),
    Reason(
        "sinusoids",
        "Marian computes its positions from the width, and does not store them. The table keeps the width itself "
        "(`fixed`, with the reason in `still`), and with it every space of that size.",
        _held,
        "marian",
    ),
    Reason(
        "rows of the first block",
        "T5's first block computes the distances for all. A copy of it is a block like the others, as the row's name "
        "says.",
        _first_only,
        "t5-encoder",
    ),
)


# ----------------------------------------------------------------- limits of the trace


def _dispatch(subject: Subject, difference: Difference) -> bool:
    experts = ("an index that the model computes", "piece by piece", "single entries", "plus a sum", "other operations")
    return _has_experts(subject) and any(words in difference.trace for words in experts)


def _gathered(subject: Subject, difference: Difference) -> bool:
    return difference.check == "fixed" and "gather: entries are picked by number" in difference.trace


def _interleaved(subject: Subject, difference: Difference) -> bool:
    joined = [row.writes for row in subject.spec.rows.values() if len(row.writes.parts) == 3]
    ends = {part[-1] for side in joined for part in side.parts}
    turning = any(isinstance(space := subject.spec.spaces.get(name), Entries) and space.turns.turning for name in ends)
    entries = bool(difference.of) and set(difference.of.split()) <= ends
    one = turning or "with itself" in difference.trace
    return entries and (difference.check == "merged" or (one and difference.check in ("fixed", "constant")))


def _zeros(subject: Subject, difference: Difference) -> bool:
    padded = any(isinstance(space, Padded) for space in subject.spec.spaces.values())
    words = ("it is padded", "meets an axis of the inputs", "it is given nothing")
    return padded and any(word in difference.trace for word in words)


def _each(subject: Subject, difference: Difference) -> bool:
    each = {name: row for name, row in subject.spec.rows.items() if isinstance(row, Norm) and row.each}
    if difference.check == "norm":
        return any(difference.of == name or _starred(difference.of) == name for name in each)
    axes = {axis for row in each.values() for axis in row.touches}
    return difference.check == "activation" and difference.of in axes and "multiplied" in difference.trace


def _starred(path: str) -> str:
    return ".".join("*" if part.isdecimal() else part for part in path.split("."))


def _modules(subject: Subject, difference: Difference) -> bool:
    units = any("{" in row for row in subject.spec.rows)
    return difference.check == "fixed" and units and "an axis of the inputs" in difference.trace


LIMITS = (
    Reason(
        "experts",
        "Tokens are sent to experts by an index that the model computes, and which experts run depends on the weights.",
        _dispatch,
        "mixtral",
    ),
    Reason(
        "a token by its number", "GPT-2's second head reads the token that an input names, by `gather`.", _gathered, ""
    ),
    Reason(
        "queries beside keys",
        "Falcon has queries, keys and values of a group along one axis of three, so the trace takes their entries for "
        "one.",
        _interleaved,
        "falcon-new",
    ),
    Reason(
        "padding with channels",
        "The trace does not follow zeros around channels; `padded` does.",
        _zeros,
        "cifar-basic",
    ),
    Reason(
        "a gain for every head",
        "The trace takes a gain with two axes for a product; the table says `each`.",
        _each,
        "cohere-qk",
    ),
    Reason(
        "a module for every head",
        "StableLM has a list of norms, one a head, which the trace cannot count.",
        _modules,
        "stablelm-qk",
    ),
)


def reason_for(subject: Subject, difference: Difference) -> Reason | None:
    """Why they differ, if that is known."""
    return next((reason for reason in (*AGREED, *LIMITS) if reason.fits(subject, difference)), None)
