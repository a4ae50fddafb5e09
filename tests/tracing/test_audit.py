"""The audit of the hand-written tables: a run of every pico model says what its code does, and its table says the same.

A difference is a fault of one of the two, or has a reason that is written down once (tests/auditing/explained.py).
Tables with faults put into them show that the audit sees these.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import transformers as hf

import pico
from auditing.audit import audit
from auditing.explained import AGREED, LIMITS, Reason
from lemonx import architectures
from lemonx.specs.norms import layer_norm, rms_norm
from lemonx.specs.rows import Row
from lemonx.specs.spaces import Entries, Scaled, Space
from lemonx.specs.spec import Spec, Stack
from lemonx.specs.weights import linear

Change = Callable[[Spec], Spec]


@pytest.mark.parametrize("name", pico.PICO)
def test_the_table_says_what_the_code_does(name: str) -> None:
    found = audit(pico.PICO[name]())
    assert found.unexplained == ()
    assert found.axes > 0 and found.equal + found.finer > 0


def test_every_family_has_a_model_that_is_audited() -> None:
    audited = {builder.args[1].model_type for builder in pico.PICO.values() if hasattr(builder, "args")}
    assert audited == set(architectures.families())


@pytest.mark.parametrize("reason", AGREED, ids=lambda reason: reason.name)
def test_a_reason_is_needed(reason: Reason) -> None:
    assert reason in [why for _, why in audit(pico.PICO[reason.example]()).explained]


def test_reasons_have_names_of_their_own() -> None:
    names = [reason.name for reason in (*AGREED, *LIMITS)]
    assert len(set(names)) == len(names)


# ----------------------------------------------------------------- faults that it must see


def with_row(name: str, row: Row) -> Change:
    """A table with another row."""

    def change(spec: Spec) -> Spec:
        assert name in spec.rows
        return replace(spec, rows={**spec.rows, name: row})

    return change


def with_space(name: str, **fields: Any) -> Change:
    """A table that says something else of a space."""

    def change(spec: Spec) -> Spec:
        space: Space = spec.spaces[name]
        return replace(spec, spaces={**spec.spaces, name: replace(space, **fields)})

    return change


def turning(name: str, number: int) -> Change:
    def change(spec: Spec) -> Spec:
        space = spec.spaces[name]
        assert isinstance(space, Entries)
        return with_space(name, turns=replace(space.turns, turning=number))(spec)

    return change


def streaming(stack: str, **fields: Any) -> Change:
    def change(spec: Spec) -> Spec:
        known: Stack = spec.stacks[stack]
        return replace(spec, stacks={**spec.stacks, stack: replace(known, **fields)})

    return change


def grown(spec: Spec) -> Spec:
    """A Marian that may become wider."""
    return replace(spec, fixed={name: size for name, size in spec.fixed.items() if name != "width"})


def untied(spec: Spec) -> Spec:
    rows = {name: replace(row, tied=None) if getattr(row, "tied", None) else row for name, row in spec.rows.items()}
    return replace(spec, rows=rows)


def quiet(spec: Spec) -> Spec:
    return replace(spec, acts=())


def scale_free(spec: Spec) -> Spec:
    """Embeddings that nothing is said to multiply."""
    spaces = {name: replace(space, scale=1.0) if isinstance(space, Scaled) else space
              for name, space in spec.spaces.items()}  # fmt: skip
    return replace(spec, spaces=spaces)


FAULTS: dict[str, tuple[str, Change, str]] = {
    "the kind of a norm": ("llama-tied", with_row("model.norm", layer_norm("residual -> final")), "norm"),
    "the eps of a norm": ("distilbert-mlm", with_row("vocab_layer_norm", layer_norm("transform -> decoded")), "norm"),
    "the offset of a gain": ("gemma", with_row("model.norm", rms_norm("residual -> final")), "norm"),
    "a norm that is run is idle": (
        "bert-cls",
        with_row("bert.embeddings.LayerNorm", layer_norm("residual -> residual", idle=True)),
        "norm",
    ),
    "a map that reads the stream before its norm": (
        "llama-tied",
        with_row("model.layers.*.mlp.up_proj", linear("residual -> hidden")),
        "merged",
    ),
    "an axis that lies otherwise": (
        "gpt2-lm",
        with_row(
            "transformer.h.*.attn.c_attn",
            linear("normed -> (heads query) + (heads key) + (heads value) by heads", transposed=True),
        ),
        "layout",
    ),
    "a map the wrong way round": (
        "llama-untied",
        with_row("model.layers.*.self_attn.o_proj", linear("residual -> (heads value)", transposed=True)),
        "role",
    ),
    "an activation that nobody mentions": ("bert-mlm", quiet, "activation"),
    "a decoder that is a table": ("llama-tied", untied, "tied"),
    "the stream of a stack": ("gpt2-lm", streaming("transformer.h", stream="normed"), "stream"),
    "entries that do not turn": ("gptj", turning("query", 12), "turning"),
    "the scale of attention": ("bert-cls", with_space("query", scale=1.0), "scale"),
    "a factor that depends on the width": ("gemma", scale_free, "number"),
    "a factor that there is not": ("bart", with_space("words", scale=7.0), "factor"),
    "sinusoids that cannot grow": ("marian", grown, "computed"),
    "a size that may grow is fixed": ("gpt2-lm", with_space("positions", still="no"), "free"),
}


@pytest.mark.parametrize(("name", "change", "check"), FAULTS.values(), ids=[name.replace(" ", "-") for name in FAULTS])
def test_a_fault_in_a_table_is_seen(name: str, change: Change, check: str) -> None:
    assert check in {difference.check for difference in audit(pico.PICO[name](), change=change).unexplained}


def test_a_block_that_ends_in_another_activation_is_seen() -> None:
    """A ResNet whose blocks end in GELU: an added one is not the identity, whatever is silent in it."""

    def unaware(spec: Spec) -> Spec:
        return replace(spec, stacks={name: replace(stack, still="") for name, stack in spec.stacks.items()})

    model = pico.of_class(hf.ResNetForImageClassification, hidden_act="gelu")
    assert audit(model).unexplained == ()
    found = audit(model, change=unaware).unexplained
    assert "stream" in {difference.check for difference in found}


def test_slopes_in_grouped_heads_are_seen() -> None:
    """A Falcon in the new layout with ALiBi: heads under their keys have slopes, which copies would not."""

    def unaware(spec: Spec) -> Spec:
        return replace(spec, spaces={name: replace(space, still="") for name, space in spec.spaces.items()})

    fields = {"new_decoder_architecture": True, "num_kv_heads": 2, "alibi": True}
    model = pico.of_class(hf.FalconForCausalLM, **fields)
    assert audit(model).unexplained == ()
    found = audit(model, change=unaware).unexplained
    assert "heads" in {difference.of for difference in found if difference.check == "constant"}
