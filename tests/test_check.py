"""The type check on tiny specs: right compositions get their types, each wrong one is refused and told why."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lemonx.algebra.expansions import expansion, identity, product
from lemonx.algebra.free_parameters import PRESETS
from lemonx.algebra.recipes import KEEP, Matrix, Vector
from lemonx.errors import BadTarget, LemonxError, Refused
from lemonx.execution.matrix import expand_matrix
from lemonx.frames.placement import PostNormFrame
from lemonx.planning.typecheck import Types, check, unchecked, with_tied
from lemonx.specs.norms import LayerNorm, Norm, batch_norm, group_norm, layer_norm, rms_norm
from lemonx.specs.rows import Row, Typed
from lemonx.specs.signature import side
from lemonx.specs.spaces import Space, Stream, Units, circ, grouped
from lemonx.specs.spec import Spec, Stack
from lemonx.specs.weights import Linear, conv, embedding, linear

EPS = 1e-2
Rows = Mapping[str, Row]
# Space -> kind, size, size of the target.
Sizes = Mapping[str, tuple[str, int, int]]


def of_kind(kind: str, size: int, under: str | None = None) -> Space:
    if under is not None:
        return grouped(size, under, kind)
    if kind == "gelu":
        return circ(size, act=kind)
    return (Stream if kind in ("avg", "zero", "scaled") else Units)(size, kind)


def typed(rows: Rows, sizes: Sizes, *, present: list[str] | None = None, **spec: Any) -> Types:
    """The types of a spec with these rows and sizes; the norms' field is `eps`."""
    config = {"eps": EPS, "other_eps": EPS} | spec.pop("config", {})
    under = spec.pop("under", {})
    stacks, fixed = spec.pop("stacks", {}), spec.pop("fixed", {})
    options = {"eps": "eps", **spec}

    def build(which: int) -> Spec:
        return Spec(
            rows,
            {name: of_kind(size[0], size[which], under.get(name)) for name, size in sizes.items()},
            {name: Stack(n[which - 1], "residual") for name, n in stacks.items()},
            fixed={name: n[which - 1] for name, n in fixed.items()},
            **options,
        )

    return check(build(1), build(2), list(rows) if present is None else present, config)


def assert_refused(rows: Rows, sizes: Sizes, *words: str, by: type[LemonxError] = Refused, **spec: Any) -> str:
    """The check refuses, on one line that holds all these words."""
    with pytest.raises(by) as refusal:
        typed(rows, sizes, **spec)
    message = str(refusal.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message
    return message


def advised(message: str) -> list[int]:
    """The sizes that a refusal advises."""
    tail = message.partition(": try ")[2]
    return [int(n) for n in re.findall(r"(?<![x\d])\d+", tail)]


def assert_advice_works(message: str, rows: Rows, sizes: Sizes, grown: tuple[str, ...], **spec: Any) -> None:
    """With each advised size for the spaces `grown`, the same spec passes."""
    found = advised(message)
    assert found
    for size in found:
        typed(rows, {n: (k, s, size if n in grown else t) for n, (k, s, t) in sizes.items()}, **spec)


PRE_LN: Rows = {
    "embed": embedding("5 -> residual"),
    "ln": layer_norm("residual -> normed"),
    "up": linear("normed -> hidden"),
    "down": linear("hidden -> residual"),
    "last": layer_norm("residual -> final"),
    "head": linear("final -> 5"),
}


def pre_ln(kind: str, target: int, hidden: str = "circ") -> Sizes:
    return {
        "residual": (kind, 4, target),
        "normed": ("zero", 4, target),
        "final": ("zero", 4, target),
        "hidden": (hidden, 8, 2 * target),
    }


# ----------------------------------------------------------------- what is right


@pytest.mark.parametrize("target", [4, 5, 6, 8, 11])
def test_pre_ln_gets_its_types(target: int) -> None:
    types = typed(PRE_LN, pre_ln("avg", target))
    assert np.array_equal(types.spaces["residual"].source, expansion("avg", 4, target).source)
    assert np.array_equal(types.spaces["hidden"].source, expansion("circ", 8, 2 * target).source)
    assert all(e.is_plain for e in types.spaces.values())
    fused = types.of(side("(3 hidden)"))
    assert (fused.size, fused.target_size) == (24, 6 * target)
    assert types.of(side("_"), 7).is_identity
    assert types.of(side("_"), 7).size == 7


# ----------------------------------------------------------------- norms


def test_layer_norm_cannot_read_zeros_or_a_circular_remainder() -> None:
    for kind in ("zero", "circ", "iso"):
        sizes = pre_ln(kind, 6)
        message = assert_refused(PRE_LN, sizes, "ln: ", "LayerNorm", "residual", "from 4 to 6", "try 8")
        for size in advised(message):
            typed(PRE_LN, pre_ln(kind, size))


def test_rms_norm_cannot_read_means() -> None:
    """Erratum 4: with row-avg producers a Llama is not lossless."""
    rows: Rows = {**PRE_LN, "ln": rms_norm("residual -> normed"), "last": rms_norm("residual -> final")}
    message = assert_refused(rows, pre_ln("avg", 6), "ln: ", "RMSNorm", "residual", "from 4 to 6", "try 8")
    for size in advised(message):
        typed(rows, pre_ln("avg", size))
    assert_refused(rows, pre_ln("circ", 6), "ln: ", "copies, all as often, or zero")
    typed(rows, pre_ln("zero", 6))


@pytest.mark.parametrize(("target", "framed"), [(5, None), (6, None), (7, True), (8, False), (9, True), (10, True)])
def test_norm_feeds_its_own_stream_by_copies_or_by_frames(target: int, framed: bool | None) -> None:
    """Post-LN: a LayerNorm reads means and writes zeros, which agree for whole multiples only; a frame needs room."""
    rows: Rows = {"embed": embedding("5 -> residual"), "ln": layer_norm("residual -> residual")}
    sizes: Sizes = {"residual": ("avg", 4, target)}
    if framed is None:
        message = assert_refused(rows, sizes, f"no change of basis takes 4 features to {target}", "too little freedom")
        assert_advice_works(message, rows, sizes, ("residual",))
    else:
        types = typed(rows, sizes)
        assert bool(types.framed) == framed == types.spaces["residual"].is_dense


def test_rms_norm_may_feed_its_own_stream() -> None:
    """It reads zeros and writes zeros: Post-RMSNorm grows to any width."""
    rows: Rows = {"embed": embedding("5 -> residual"), "norm": rms_norm("residual -> residual", eps=None)}
    typed(rows, {"residual": ("zero", 4, 6)})


def test_layer_norm_over_a_concatenation_reads_frames_not_means() -> None:
    """Erratum 8, Swin's patch merging: each slice's remainder is the slice's mean, not the concatenation's."""
    rows: Rows = {"embed": embedding("5 -> stage"), "merge": layer_norm("(4 stage) -> (4 merged)")}
    sizes: Sizes = {"stage": ("avg", 4, 6), "merged": ("zero", 4, 6)}
    types = typed(rows, sizes)
    assert [framed.stream for framed in types.framed] == ["stage"] and types.spaces["stage"].is_dense
    assert not typed(rows, {"stage": ("avg", 4, 8), "merged": ("zero", 4, 8)}).framed
    in_place = {**rows, "bn": batch_norm("stage -> stage")}
    assert_refused(in_place, sizes, "bn is neither a linear layer nor a LayerNorm", "try 8")


def test_frames_need_the_rows_in_the_order_of_computation() -> None:
    """What a row reads of a frame was written by the last norm before it, so a table out of order is refused."""
    rows: Rows = {"embed": embedding("5 -> residual"), "entry": layer_norm("residual -> residual"), **PRE_LN}
    sizes: Sizes = {"residual": ("avg", 12, 18), "normed": ("zero", 12, 18), "final": ("zero", 12, 18),
                    "hidden": ("circ", 8, 16)}  # fmt: skip
    stacks = {"blocks": (1, 1)}
    assert [framed.stream for framed in typed(rows, sizes, stacks=stacks).framed] == ["residual"]
    shuffled = {name: rows[name] for name in ("embed", "entry", "up", "ln", "down", "last", "head")}
    assert_refused(shuffled, sizes, "lists up above the norm whose output it reads", stacks=stacks)


def test_a_post_ln_block_with_a_norm_that_only_reads_has_no_frame() -> None:
    """Behind the first norm the stream has that norm's gains in it, so another norm would find other moments."""
    rows: Rows = {
        "embed": embedding("5 -> residual"),
        "blocks.*.mix": linear("residual -> residual"),
        "blocks.*.first": layer_norm("residual -> residual"),
        "blocks.*.up": linear("residual -> hidden"),
        "blocks.*.down": linear("hidden -> residual"),
        "blocks.*.last": layer_norm("residual -> residual"),
    }
    sizes: Sizes = {"residual": ("avg", 12, 18), "normed": ("zero", 12, 18), "hidden": ("gelu", 24, 48)}
    stacks = {"blocks": (1, 1)}
    (framed,) = typed(rows, sizes, stacks=stacks).framed
    assert isinstance(framed, PostNormFrame) and (framed.first, framed.last) == ("blocks.*.first", "blocks.*.last")
    assert (framed.up, framed.down, framed.hidden) == ("blocks.*.up", "blocks.*.down", "hidden")
    read = {**rows, "blocks.*.probe": layer_norm("residual -> normed"), "blocks.*.tap": linear("normed -> 3")}
    assert_refused(read, sizes, "first: ", "18 is not a multiple of 12", stacks=stacks)


def test_group_norm_wants_whole_copies_within_every_group() -> None:
    row = group_norm("(2 inner) -> (2 inner)", groups=2)
    two, three, five = (product(identity(2), expansion("circ", 3, size)) for size in (6, 9, 5))
    row.require(two, two)
    row.require(three, three)
    for reads in (five, expansion("circ", 6, 12), expansion("circ", 6, 9)):
        with pytest.raises(Refused, match="whole copies of its channels"):
            row.require(reads, reads)


def test_batch_norm_keeps_channels_in_place() -> None:
    rows: Rows = {"conv": conv("3 -> inner"), "bn": batch_norm("inner -> outer")}
    same: Sizes = {"inner": ("circ", 4, 6), "outer": ("circ", 4, 6)}
    typed(rows, same)
    assert_refused(rows, {**same, "outer": ("circ", 4, 7)}, "bn: ", "BatchNorm", "inner", "outer")


# ----------------------------------------------------------------- units under a nonlinearity


@pytest.mark.parametrize("kind", ["avg", "zero", "iso"])
def test_what_no_norm_touches_is_under_a_nonlinearity(kind: str) -> None:
    """The default: `hidden` is only written by one linear map and read by another."""
    sizes = pre_ln("avg", 6, hidden=kind)
    message = assert_refused(PRE_LN, sizes, "hidden", "from 8 to 12", "nonlinearity", "try 16")
    assert_advice_works(message, PRE_LN, sizes, ("hidden",))


@pytest.mark.parametrize("kind", ["avg", "zero"])
def test_acts_are_under_a_nonlinearity_though_a_norm_reads_them(kind: str) -> None:
    """Erratum 6: the masked-LM head, linear, act, LayerNorm."""
    norm = layer_norm("transform -> decoded") if kind == "avg" else rms_norm("transform -> decoded")
    rows: Rows = {**PRE_LN, "dense": linear("final -> transform"), "norm": norm, "decoder": linear("decoded -> 5")}
    sizes: Sizes = {**pre_ln("avg", 6), "transform": (kind, 4, 6), "decoded": ("zero", 4, 6)}
    typed(rows, sizes)
    message = assert_refused(rows, sizes, "transform", "from 4 to 6", "nonlinearity", "try 8", acts=("transform",))
    assert_advice_works(message, rows, sizes, ("transform", "decoded"), acts=("transform",))


def test_rows_that_are_absent_do_not_refuse() -> None:
    """A file without the masked-LM head is not refused because of it."""
    rows: Rows = {**PRE_LN, "norm": layer_norm("transform -> decoded"), "dense": linear("final -> transform")}
    sizes: Sizes = {**pre_ln("avg", 6), "transform": ("avg", 4, 6), "decoded": ("zero", 4, 6)}
    assert_refused(rows, sizes, "transform", acts=("transform",))
    typed(rows, sizes, acts=("transform",), present=list(PRE_LN))


def test_gains_cannot_pass_a_nonlinearity() -> None:
    """A hard-coded eps needs a gain on what the norm reads; if that is under an activation, it cannot be."""
    rows: Rows = {**PRE_LN, "inner": rms_norm("gated -> hidden", eps=1e-5), "up": linear("normed -> gated")}
    sizes: Sizes = {**pre_ln("avg", 6), "gated": ("zero", 8, 12), "hidden": ("zero", 8, 12)}
    assert_refused(rows, sizes, "gated", "from 8 to 12", acts=("gated",))
    iso: Sizes = {**sizes, "gated": ("iso", 8, 12), "hidden": ("circ", 8, 12)}
    assert_refused(rows, iso, "gated", "from 8 to 12", acts=("gated",))
    types = typed(rows, iso)
    assert types.spaces["gated"].gain == pytest.approx(math.sqrt(12 / 8))


# ----------------------------------------------------------------- sizes


def test_fixed_sizes_stay() -> None:
    rows: Rows = {**PRE_LN, "q": linear("normed -> (heads head_dim)"), "o": linear("(heads head_dim) -> residual")}
    sizes: Sizes = {**pre_ln("avg", 6), "heads": ("circ", 2, 3)}
    typed(rows, sizes, fixed={"head_dim": (2, 2)})
    assert_refused(rows, sizes, "head_dim", "from 2 to 3", "keep it at 2", fixed={"head_dim": (2, 3)})
    why = {"still": {"head_dim": "it is shared"}, "fixed": {"head_dim": (2, 3)}}
    assert_refused(rows, sizes, "to 3, and it is shared: choose", **why)


def test_a_space_that_is_still_and_a_stack_that_is() -> None:
    """Whatever kind a space is of, and however a stack would be added to: the reason is told, and what to keep."""
    rows: Rows = {"in": linear("wide -> hidden"), "out": linear("hidden -> wide")}
    kinds = {"wide": circ(4), "hidden": circ(8)}

    def grown(hidden: int, depth: int) -> Types:
        def spec(hidden: int, depth: int) -> Spec:
            spaces = {**kinds, "hidden": replace(circ(hidden), still="its units have places")}
            return Spec(rows, spaces, {"layers": Stack(depth, "wide", still="a block ends in gelu")})

        return check(spec(8, 2), spec(hidden, depth), list(rows), {})

    assert grown(8, 2).spaces["hidden"].is_identity
    with pytest.raises(Refused, match="hidden: its units have places: keep it at 8"):
        grown(16, 2)
    with pytest.raises(Refused, match=r"layers cannot grow deeper, since a block ends in gelu: keep its depth at 2"):
        grown(8, 3)


def test_nothing_shrinks() -> None:
    shrunk: Sizes = {**pre_ln("avg", 6), "hidden": ("circ", 8, 7)}
    assert_refused(PRE_LN, shrunk, "hidden", "from 8 to 7", "lemonx only grows", by=BadTarget)
    assert_refused(PRE_LN, pre_ln("avg", 6), "layers", "3 to 2", by=BadTarget, stacks={"layers": (3, 2)})
    typed(PRE_LN, pre_ln("avg", 6), stacks={"layers": (2, 3)})


def test_grouped_heads_must_fit() -> None:
    rows: Rows = {
        **PRE_LN,
        "q": linear("normed -> (heads 2)"),
        "k": linear("normed -> (kv 2)"),
        "o": linear("(heads 2) -> residual"),
    }
    sizes: Sizes = {**pre_ln("avg", 6), "heads": ("circ", 6, 6), "kv": ("circ", 2, 3)}
    message = assert_refused(rows, sizes, "heads", "6 query heads", "3 key-value heads", "try 9", under={"heads": "kv"})
    typed(rows, {**sizes, "heads": ("circ", 6, advised(message)[0])}, under={"heads": "kv"})


def test_rows_of_both_specs_must_agree() -> None:
    """A target with a shortcut that the source has not, or the reverse, is another model."""
    spaces = {"a": circ(4)}
    short = Spec({"conv": conv("3 -> a")}, spaces, {})
    long = Spec({"conv": conv("3 -> a"), "shortcut": conv("3 -> a")}, spaces, {})
    with pytest.raises(Refused, match="gain the module shortcut"):
        check(short, long, ["conv"], {})
    with pytest.raises(Refused, match="lose the module shortcut"):
        check(long, short, ["conv"], {})


def test_spaces_of_both_specs_must_agree() -> None:
    """A shortcut without parameters comes and goes with its space, and with no module."""
    rows = {"conv": conv("3 -> a")}
    one, two = (Spec(rows, {name: circ(4) for name in names}, {}) for names in ("a", "ab"))
    with pytest.raises(Refused, match="gain b, so"):
        check(one, two, ["conv"], {})
    with pytest.raises(Refused, match="lose b, so"):
        check(two, one, ["conv"], {})


# ----------------------------------------------------------------- eps and gains


def test_one_field_with_equal_etas_is_scaled() -> None:
    """The paper's way: eps* = eta^2 eps, and no gains."""
    types = typed(PRE_LN, pre_ln("avg", 6))
    assert types.eps == {"eps": pytest.approx(EPS * 4 / 6, rel=1e-15)}
    assert all(e.gain == 1.0 for e in types.spaces.values())


def test_whole_multiples_leave_eps_and_gains_alone() -> None:
    types = typed(PRE_LN, pre_ln("avg", 8))
    assert types.eps == {}
    assert all(e.gain == 1.0 for e in types.spaces.values())


def qk_norms(**options: Any) -> Rows:
    """Erratum 5: query norms share the stream norms' field, and shrink otherwise."""
    return {
        "embed": embedding("5 -> residual"),
        "ln": rms_norm("residual -> normed"),
        "q": linear("normed -> queries"),
        "q_norm": rms_norm("queries -> heads", **options),
        "o": linear("heads -> residual"),
    }


def qk_sizes(width: int, heads: int) -> Sizes:
    return {
        "residual": ("zero", 4, width),
        "normed": ("zero", 4, width),
        "queries": ("iso", 2, heads),
        "heads": ("circ", 2, heads),
    }


@pytest.mark.parametrize(("width", "heads"), [(6, 2), (4, 3), (7, 3), (6, 5)])
def test_one_field_with_different_etas_takes_gains(width: int, heads: int) -> None:
    """The field stays; each space that a norm reads takes gain 1/eta, and nothing else does."""
    types = typed(qk_norms(), qk_sizes(width, heads), acts=("heads",))
    assert types.eps == {}
    assert types.spaces["residual"].gain == pytest.approx(math.sqrt(width / (width // 4 * 4)), rel=1e-14)
    assert types.spaces["queries"].gain == pytest.approx(math.sqrt(heads / (heads // 2 * 2)), rel=1e-14)
    assert types.spaces["normed"].gain == 1.0
    assert types.spaces["heads"].is_plain


def test_gains_cancel_eta() -> None:
    """gain * eta = 1 for every norm whose eps stays: (gain eta)^2 eps = eps."""
    rows, types = qk_norms(), typed(qk_norms(), qk_sizes(6, 5))
    for row in (rows["ln"], rows["q_norm"]):
        reads = types.of(row.reads)
        assert row.eta(reads) * reads.gain == pytest.approx(1.0, rel=1e-14)  # type: ignore[attr-defined]


@pytest.mark.parametrize("width", [6, 8])
def test_hard_coded_eps_takes_a_gain(width: int) -> None:
    """The fixed norm's stream is gained, and so the other norms that read it keep their field."""
    rows: Rows = {**PRE_LN, "last": layer_norm("residual -> final", eps=1e-5)}
    types = typed(rows, pre_ln("avg", width))
    assert types.eps == {}
    assert types.spaces["residual"].gain == pytest.approx(math.sqrt(width / (width // 4 * 4)), rel=1e-15)


def test_hard_coded_eps_of_another_space_leaves_the_field_to_scale() -> None:
    types = typed(qk_norms(eps=1e-6), qk_sizes(6, 3))
    assert types.eps == {"eps": pytest.approx(EPS * 4 / 6)}
    assert types.spaces["residual"].gain == 1.0
    assert types.spaces["queries"].gain == pytest.approx(math.sqrt(3 / 2))


def test_spec_without_a_field_takes_gains() -> None:
    types = typed(PRE_LN, pre_ln("avg", 6), eps=None)
    assert types.eps == {}
    assert types.spaces["residual"].gain == pytest.approx(math.sqrt(6 / 4))


def test_two_fields_each_with_its_own_eta() -> None:
    types = typed(qk_norms(eps="other_eps"), qk_sizes(6, 3))
    assert types.eps == {"eps": pytest.approx(EPS * 4 / 6), "other_eps": pytest.approx(EPS * 2 / 3)}
    assert all(types.spaces[name].gain == 1.0 for name in ("residual", "queries"))


@pytest.mark.parametrize(("one", "two"), [("eps", "other_eps"), ("other_eps", "eps")])
def test_a_gain_decided_by_one_field_holds_for_the_other(one: str, two: str) -> None:
    """Two norms read the stream through different fields; one field needs gains, so the other must not scale."""
    rows: Rows = {**qk_norms(eps=two), "ln": rms_norm("residual -> normed", eps=one)}
    rows |= {"ln2": rms_norm("residual -> normed", eps=two)}
    types = typed(rows, qk_sizes(6, 2))
    for name in ("ln", "ln2", "q_norm"):
        row = rows[name]
        reads, field = types.of(row.reads), row.eps  # type: ignore[attr-defined]
        wanted = (reads.gain * row.eta(reads)) ** 2 * EPS  # type: ignore[attr-defined]
        assert types.eps.get(field, EPS) == pytest.approx(wanted, rel=1e-14), name


# ----------------------------------------------------------------- tied decoders


@pytest.mark.parametrize("target", [4, 6, 8, 14])
@pytest.mark.parametrize("eps", [None, 1e-5])
def test_tied_decoder_reads_the_dual(target: int, eps: float | None) -> None:
    """sum_t embedding*[t] final*[t] = embedding . final, whatever copies and gains the stream has."""
    rows: Rows = {
        **PRE_LN,
        "last": layer_norm("residual -> final", eps=eps),
        "head": linear("final -> 5", tied="embed"),
    }
    types = typed(rows, pre_ln("avg", target))
    stream, final = types.spaces["residual"], types.spaces["final"]
    x, y = np.array([1.0, -2.0, 3.0, 0.5]), np.array([2.0, 5.0, -1.0, 4.0])
    assert float(stream.expand(x) @ final.expand(y)) == pytest.approx(float(x @ y), rel=1e-14)
    assert not final.is_mean.any()
    assert final.is_zero.any() == (target % 4 != 0)
    assert (stream.gain != 1.0) == (eps is not None and target % 4 != 0)


def test_untied_decoder_reads_plain_copies() -> None:
    assert typed(PRE_LN, pre_ln("avg", 8)).spaces["final"].is_plain


def test_tied_decoder_that_is_absent_changes_nothing() -> None:
    rows: Rows = {**PRE_LN, "head": linear("final -> 5", tied="embed")}
    present = [name for name in rows if name != "head"]
    assert typed(rows, pre_ln("avg", 8), present=present).spaces["final"].is_plain
    assert not typed(rows, pre_ln("avg", 8)).spaces["final"].is_plain


def test_tied_decoders_are_found_by_what_is_written() -> None:
    rows: Rows = {**PRE_LN, "head": linear("final -> 5", tied="embed")}
    spec = Spec(rows, {}, {})
    assert with_tied(spec, ["embed", "last"]) == ["embed", "head", "last"]
    assert with_tied(spec, ["embed"]) == ["embed"]


# ----------------------------------------------------------------- methods that are not lossless


def test_unchecked_types_prove_nothing() -> None:
    """Another method's expansions: every kind replaced, nothing refused, nothing rescaled but a tied pair."""
    rows: Rows = {**PRE_LN, "head": linear("final -> 5", tied="embed")}
    spaces = [{n: of_kind(s[0], s[which]) for n, s in pre_ln("avg", 6).items()} for which in (1, 2)]
    source, target = (Spec(rows, space, {}, eps="eps") for space in spaces)
    types = unchecked(source, target, list(rows), {"avg": "circ", "zero": "circ"})
    assert not types.exact
    assert types.eps == {}
    assert np.array_equal(types.spaces["residual"].source, expansion("circ", 4, 6).source)
    assert typed(PRE_LN, pre_ln("avg", 6)).exact


# ----------------------------------------------------------------- consecutive application, executed
#
# Tokens -> stream -> (norm, linear, gelu, linear) -> (norm, linear, norm over heads, tanh, linear) -> norm -> logits,
# with every kind, size and eps drawn at random. Whatever the check accepts must compute the same logits.

ACTS = {"hidden": F.gelu, "heads": torch.tanh}


def random_case(seed: int) -> tuple[Rows, Sizes, dict[str, tuple[int, int]]]:
    rng = np.random.default_rng(seed)

    def pick(*options: Any) -> Any:
        return options[rng.integers(len(options))]

    def norm(signature: str) -> Row:
        eps = pick(None, None, None, "other_eps", 0.03)
        return layer_norm(signature, eps=eps) if kind == "avg" else rms_norm(signature, eps=eps)

    kind = pick("avg", "zero")
    width, heads, hidden = int(rng.integers(4, 11)), int(rng.integers(2, 6)), int(rng.integers(3, 9))
    odd = "iso" if seed % 3 == 0 else kind
    rows = {
        "embed": embedding("5 -> residual"),
        "ln": norm("residual -> normed"),
        "up": linear("normed -> hidden"),
        "down": linear("hidden -> residual"),
        "ln2": norm("residual -> normed"),
        "q": linear("normed -> (queries dim)"),
        "q_norm": rms_norm("(queries dim) -> (heads dim)", eps=pick(None, None, "other_eps", 0.03)),
        "o": linear("(heads dim) -> residual"),
        "last": norm("residual -> final"),
        "head": linear("final -> 5", tied=pick(None, "embed")),
    }
    sizes = {
        "residual": (pick(kind, kind, kind, odd, "circ"), 4, width),
        "normed": (pick("zero", "zero", "zero", "circ"), 4, width),
        "final": (pick("zero", "zero", "zero", "avg"), 4, width),
        "hidden": (pick("circ", "circ", "circ", "zero"), 3, hidden),
        "queries": (pick("iso", "iso", "circ"), 2, heads),
        "heads": (pick("circ", "circ", "circ", "iso", "zero"), 2, heads),
    }
    return rows, sizes, {"dim": (3, 3)}


def parameters(rows: Rows, types: Types | None) -> dict[str, list[Tensor]]:
    """Weight and bias of every row: random, or those expanded by their recipes."""
    result = {}
    for i, (name, row) in enumerate(rows.items()):
        rng = np.random.default_rng(i)
        result[name] = []
        for suffix, axes in row.tensors().items():
            shape = [math.prod(SMALL[a] for a in axis.side.axes) for axis in axes]
            tensor = torch.from_numpy(rng.normal(size=shape))
            if types is not None:
                per_axis = tuple(types.of(axis.side) for axis in axes)
                how = row.recipe(suffix, Typed(types.of(row.reads), types.of(row.writes), per_axis), KEEP)
                tensor = expanded(how, tensor, tuple(e.target_size for e in per_axis))
            result[name].append(tensor)
        if isinstance(row, Linear) and row.tied:
            result[name][0] = result[row.tied][0]
    return result


SMALL = {"5": 5, "residual": 4, "normed": 4, "final": 4, "hidden": 3, "queries": 2, "heads": 2, "dim": 3}


def expanded(how: Matrix | Vector, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    if isinstance(how, Matrix):
        return expand_matrix(tensor.reshape(how.rows.size, -1), how, PRESETS["vision"]).reshape(shape)
    source = torch.from_numpy(how.expansion.source)
    grown = tensor[source.clamp(min=0)] * torch.from_numpy(how.factor)
    return torch.where(source < 0, 0.7 if how.fill else 0.0, grown)


def logits(rows: Rows, weights: Mapping[str, list[Tensor]], eps: Mapping[str, float]) -> Tensor:
    def call(name: str, x: Tensor) -> Tensor:
        row = rows[name]
        if not isinstance(row, Norm):
            return F.linear(x, *weights[name])
        value = eps[row.eps or "eps"] if not isinstance(row.eps, float) else row.eps
        weight, bias = weights[name]
        normed = F.layer_norm if isinstance(row, LayerNorm) else F.rms_norm
        return normed(x, x.shape[-1:], weight=weight, eps=value) + bias

    stream = weights["embed"][0][torch.arange(5)]
    stream = stream + call("down", ACTS["hidden"](call("up", call("ln", stream))))
    stream = stream + call("o", ACTS["heads"](call("q_norm", call("q", call("ln2", stream)))))
    return call("head", call("last", stream))


def test_what_the_check_accepts_is_lossless() -> None:
    """The paper's claim on consecutive application: types that agree make the whole lossless."""
    accepted, refused, gained, tied = 0, 0, 0, 0
    for seed in range(200):
        rows, sizes, fixed = random_case(seed)
        try:
            types = typed(rows, sizes, fixed=fixed, acts=("heads",))
        except Refused:
            refused += 1
            continue
        eps = {"eps": EPS, "other_eps": EPS}
        wanted, found = (
            logits(rows, parameters(rows, None), eps),
            logits(rows, parameters(rows, types), eps | types.eps),
        )
        assert (found - wanted).abs().max() <= 1e-10 * wanted.abs().max(), f"seed {seed}: {sizes} {rows}"
        accepted += 1
        gained += any(e.gain != 1.0 for e in types.spaces.values())
        tied += rows["head"].tied is not None  # type: ignore[attr-defined]
    # The sample is worth something only if all of this occurs.
    assert min(accepted, refused, gained, tied, accepted - gained, accepted - tied) > 10
