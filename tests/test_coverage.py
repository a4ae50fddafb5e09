"""Coverage both ways: every tensor has one row, every row its tensors, in every block."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lemonx.errors import BadCheckpoint
from lemonx.specs.coverage import Matched, match, settled, tied_copies
from lemonx.specs.norms import batch_norm, layer_norm
from lemonx.specs.rows import Row
from lemonx.specs.spaces import avg, circ, zero
from lemonx.specs.spec import Spec, Stack
from lemonx.specs.weights import conv, dropped, embedding, linear, parameter

SPACES = {"residual": avg(4), "normed": zero(4), "hidden": circ(8)}
ROWS: Mapping[str, Row] = {
    "model.embed": embedding("5 -> residual"),
    "model.token": parameter("1 residual"),
    "model.layers.*.norm": layer_norm("residual -> normed"),
    "model.layers.*.up": linear("normed -> hidden"),
    "model.layers.*.down": linear("hidden -> residual"),
    "model.layers.*.mask": dropped(),
    "model.last": layer_norm("residual -> normed"),
    "head": linear("normed -> _", optional=True),
}


def spec(rows: Mapping[str, Row] = ROWS, depth: int = 2, **options: Any) -> Spec:
    return Spec(rows, SPACES, {"model.layers": Stack(depth, "residual")}, **{"prefix": "model.", **options})


def names(depth: int = 2) -> list[str]:
    """A complete file."""
    block = ("norm.weight", "norm.bias", "up.weight", "up.bias", "down.weight")
    layers = [f"model.layers.{i}.{tensor}" for i in range(depth) for tensor in block]
    return ["model.embed.weight", "model.token", *layers, "model.last.weight", "model.last.bias", "head.weight"]


def assert_matched(found: Iterable[Matched], name: str, row: str, suffix: str, index: int = 0) -> None:
    hit = next(hit for hit in found if hit.name == name)
    assert (hit.row, hit.suffix, hit.index) == (row, suffix, index)
    assert (hit.stack is not None) == ("*" in row)


def assert_refused(present: Iterable[str], *words: str, of: Spec | None = None) -> None:
    with pytest.raises(BadCheckpoint) as refusal:
        match(of or spec(), present)
    for word in words:
        assert word in str(refusal.value), refusal.value


def test_the_last_block_may_have_a_row_of_its_own() -> None:
    """It goes before the general one, which then needs no tensor there; a single block is the last, too."""
    own = {**ROWS, "model.layers.-1.norm": layer_norm("residual -> residual")}
    for depth in (1, 2, 3):
        found = match(spec(own, depth), names(depth))
        rows = [hit.row for hit in found if hit.suffix == "weight" and "norm" in hit.row]
        assert rows == ["model.layers.*.norm"] * (depth - 1) + ["model.layers.-1.norm"]
    missing = [name for name in names() if name != "model.layers.1.norm.weight"]
    assert_refused(missing, "no tensor for 'model.layers.-1.norm'", of=spec(own))
    extra = [name for name in names() if name != "model.layers.0.norm.weight"]
    assert_refused(extra, "no tensor for 'model.layers.*.norm'", of=spec(own))


def test_what_the_stream_is_behind_a_block() -> None:
    own = spec({**ROWS, "model.layers.-1.norm": layer_norm("residual -> normed")}, 3)
    assert [own.behind("model.layers", i) for i in range(3)] == ["residual", "residual", "normed"]
    assert spec().behind("model.layers", 1) == "residual"


def test_rows_are_in_the_order_of_computation() -> None:
    named = spec()
    assert list(named.order) == list(named.rows) and list(named.order.values()) == [*range(len(named.rows))]
    first, *_, last = named.rows
    assert named.in_order({last, first}) == [first, last]
    assert named.comes_before(first, last) and not named.comes_before(last, first)
    assert not named.comes_before(first, first)
    longer = replace(named, rows={"before": named.rows[first], **named.rows})
    assert longer.comes_before("before", first)  # a spec made from another has an order of its own


def test_tables_and_decoders_that_repeat_a_table() -> None:
    rows = {
        **ROWS,
        "model.again": embedding("5 -> residual", tied="model.embed"),
        "head": linear("normed -> 5", tied="model.embed", own=True),
    }
    found = match(spec(rows), [*names(), "model.again.weight"])
    assert [(hit.name, row) for hit, row in tied_copies(settled(spec(rows), found), found)] == [
        ("model.again.weight", "model.embed")
    ]
    # Without a weight for it the decoder stays tied, and the table need not be there.
    bare = match(spec(rows), [name for name in names() if name != "head.weight"])
    assert settled(spec(rows), bare) == spec(rows)
    # One that must be tied is, whatever the file has.
    strict = spec({**rows, "head": linear("normed -> 5", tied="model.embed")})
    assert ("head.weight", "model.embed") in [
        (hit.name, row) for hit, row in tied_copies(settled(strict, found), found)
    ]


def test_every_tensor_finds_its_row() -> None:
    found = match(spec(), names())
    assert [hit.name for hit in found] == names()
    assert_matched(found, "model.layers.1.up.bias", "model.layers.*.up", "bias", 1)
    assert_matched(found, "model.token", "model.token", "")
    assert_matched(found, "head.weight", "head", "weight")


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 12), st.randoms())
def test_order_does_not_matter(depth: int, random: Any) -> None:
    shuffled = names(depth)
    random.shuffle(shuffled)
    found = match(spec(depth=depth), shuffled)
    assert sorted(hit.name for hit in found) == sorted(names(depth))
    for hit in found:
        assert hit.named(hit.index) == hit.name


# ----------------------------------------------------------------- what is missing or too much


@pytest.mark.parametrize(
    "odd",
    [
        "model.layers.0.attention.weight",
        "model.embed.bias",
        "model.layers.1.up.scale",
        "model.layers.x.up.weight",
        "model.layers.00.up.weight",
        "model.layers.².up.weight",
        "model.layers.up.weight",
        "layers.weight",
        "other.embed.weight",
        "model.model.embed.weight",
        "model.up.weight",
        "",
    ],
)
def test_tensor_without_a_row(odd: str) -> None:
    assert_refused([*names(), odd], "does not know what the tensor", repr(odd))


def test_tensors_without_a_row_are_counted() -> None:
    assert_refused(
        [*names(), "a", "b", "c"],
        "'a' and 2 more",
        "lemonx does not know what",
        "expand the base model without it",
    )


def without(row: str, tensor: str = "") -> list[str]:
    """A file that lacks a row's tensors, or one tensor of it, in every block."""
    gone = re.compile(re.escape(f"{row}.{tensor}".rstrip(".")).replace(r"\*", r"\d+") + r"(\.|$)")
    return [name for name in names() if not gone.match(name)]


@pytest.mark.parametrize("row", ["model.embed", "model.token", "model.last", "model.layers.*.up"])
def test_row_without_a_tensor(row: str) -> None:
    assert_refused(without(row), "no tensor for", repr(row))


@pytest.mark.parametrize("lost", ["layers.1.up", "layers.0.norm", "layers.0.down"])
def test_block_without_a_weight(lost: str) -> None:
    assert_refused([name for name in names() if name != f"model.{lost}.weight"], "lack", lost)


@pytest.mark.parametrize("row", ["model.last", "model.layers.*.up", "head"])
def test_bias_without_its_weight(row: str) -> None:
    """A bias alone is no module: the first tensor of a row is required, optional or not."""
    biases = ["head.bias"] if row == "head" else []
    assert_refused([*without(row, "weight"), *biases], "no tensor for", repr(row))


def test_optional_rows_may_be_absent() -> None:
    assert match(spec(), [name for name in names() if name != "head.weight"])
    with_mask = [*names(), "model.layers.0.mask"]
    assert_matched(match(spec(), with_mask), "model.layers.0.mask", "model.layers.*.mask", "")


def test_optional_bias_is_in_every_block_or_in_none() -> None:
    assert match(spec(), [name for name in names() if not name.endswith("up.bias")])
    assert_refused([n for n in names() if n != "model.layers.1.up.bias"], "lack", "model.layers.1.up.bias")


def test_missing_block() -> None:
    assert_refused(names(1), "2 layers", "'model.layers'", "lack", "model.layers.1.norm.weight")
    gap = [name for name in names(3) if ".1." not in name]
    assert_refused(gap, "3 layers", "lack", "model.layers.1", of=spec(depth=3))


def test_extra_block() -> None:
    assert_refused(names(3), "2 layers", "extra", "model.layers.2.norm.weight")


@pytest.mark.parametrize("again", ["model.last.gamma", "last.weight", "model.layers.0.norm.beta", "layers.1.up.weight"])
def test_one_tensor_under_two_names(again: str) -> None:
    """An old name beside the new one, or with and without prefix: which of the two is the model's?"""
    assert_refused([*names(), again], again)


# ----------------------------------------------------------------- names


def test_prefix_may_be_absent() -> None:
    """A base model's file leaves `model.` out; so do the names of what is written."""
    bare = [name.removeprefix("model.") for name in names() if name != "head.weight"]
    found = match(spec(), bare)
    assert [hit.name for hit in found] == bare
    assert_matched(found, "layers.1.up.bias", "model.layers.*.up", "bias", 1)
    hit = next(hit for hit in found if hit.name == "layers.1.up.bias")
    assert hit.named(7) == "layers.7.up.bias"
    assert_refused([*bare, "layers.2.up.weight"], "extra")


def test_names_in_other_blocks() -> None:
    found = {hit.name: hit for hit in match(spec(depth=12), names(12))}
    assert found["model.layers.1.up.weight"].named(10) == "model.layers.10.up.weight"
    assert found["model.layers.11.up.weight"].named(1) == "model.layers.1.up.weight"
    assert found["model.last.weight"].named(5) == "model.last.weight"
    assert found["model.token"].named(0) == "model.token"


def test_old_names_are_brought_up_to_date() -> None:
    """gamma and beta, as files of 2019 have them, belong to norms only."""
    old = [
        n.replace("norm.weight", "norm.gamma").replace("norm.bias", "norm.beta").replace("last.weight", "last.gamma")
        for n in names()
    ]
    found = {hit.name: hit for hit in match(spec(), old)}
    assert found["model.layers.1.norm.gamma"].suffix == "weight"
    assert found["model.layers.1.norm.gamma"].named(4) == "model.layers.4.norm.weight"
    assert found["model.layers.1.norm.beta"].named(1) == "model.layers.1.norm.bias"
    assert found["model.last.gamma"].named(0) == "model.last.weight"
    assert_refused([*names(), "model.layers.0.up.gamma"], "does not know what the tensor")


# ----------------------------------------------------------------- blocks with rows of their own

STRIDED: Mapping[str, Row] = {
    "stem": conv("3 -> residual"),
    "layers.0.conv": conv("normed -> hidden"),
    "layers.0.shortcut": conv("normed -> residual"),
    "layers.*.conv": conv("residual -> hidden"),
    "layers.*.bn": batch_norm("hidden -> residual"),
}


def strided(depth: int) -> Spec:
    return Spec(STRIDED, SPACES, {"layers": Stack(depth, "residual", pinned=1)})


def strided_names(depth: int) -> list[str]:
    layers = [f"layers.{i}.{tensor}" for i in range(depth) for tensor in ("conv.weight", "bn.weight", "bn.bias")]
    return ["stem.weight", "layers.0.shortcut.weight", *layers]


@pytest.mark.parametrize("depth", [2, 3, 11])
def test_a_blocks_own_row_goes_first(depth: int) -> None:
    found = match(strided(depth), strided_names(depth))
    rows = {hit.name: hit.row for hit in found}
    assert rows["layers.0.conv.weight"] == "layers.0.conv"
    assert rows["layers.1.conv.weight"] == "layers.*.conv"
    assert rows["layers.0.bn.weight"] == "layers.*.bn"
    assert rows["layers.0.shortcut.weight"] == "layers.0.shortcut"


def test_only_block_with_its_own_row() -> None:
    """A stage of one block, which is strided: no block uses the general row, so none is missing."""
    found = match(strided(1), strided_names(1))
    assert {hit.row for hit in found} == {"stem", "layers.0.conv", "layers.0.shortcut", "layers.*.bn"}


def test_own_row_is_needed_in_its_block() -> None:
    lost = [name for name in strided_names(3) if name != "layers.0.conv.weight"]
    assert_refused(lost, "no tensor for", "'layers.0.conv'", of=strided(3))
    assert_refused([n for n in strided_names(3) if n != "layers.2.conv.weight"], "lack layers.2.conv", of=strided(3))
    assert_refused([*strided_names(3), "layers.1.shortcut.weight"], "does not know what the tensor", of=strided(3))


# ----------------------------------------------------------------- tied decoders


def test_tied_copies_are_found() -> None:
    rows: Mapping[str, Row] = {**ROWS, "head": linear("normed -> 5", tied="model.embed")}
    found = match(spec(rows), [*names(), "head.bias"])
    assert [(hit.name, row) for hit, row in tied_copies(spec(rows), found)] == [("head.weight", "model.embed")]
    assert tied_copies(spec(), match(spec(), names())) == []
    absent = match(spec(rows), [name for name in names() if name != "head.weight"])
    assert tied_copies(spec(rows), absent) == []


def test_tied_decoder_may_keep_its_bias_alone() -> None:
    """Its weight is the embedding's, so the file holds the bias only."""
    rows: Mapping[str, Row] = {**ROWS, "head": linear("normed -> 5", tied="model.embed")}
    present = [*(name for name in names() if name != "head.weight"), "head.bias"]
    assert_matched(match(spec(rows), present), "head.bias", "head", "bias")


# ----------------------------------------------------------------- a module for every unit

EXPERTS: Mapping[str, Row] = {
    "model.layers.*.router": linear("normed -> experts"),
    "model.layers.*.experts.{experts}.up": linear("normed -> hidden"),
    "model.layers.*.experts.{experts}.down": linear("hidden -> residual"),
}


def expert_spec() -> Spec:
    spaces = {**SPACES, "experts": circ(3)}
    return Spec(EXPERTS, spaces, {"model.layers": Stack(2, "residual")}, prefix="model.")


def expert_names() -> list[str]:
    modules = ["router", *(f"experts.{e}.{name}" for e in range(3) for name in ("up", "down"))]
    return [f"model.layers.{i}.{module}.weight" for i in range(2) for module in modules]


def test_units_are_found_and_renamed() -> None:
    found = {hit.name: hit for hit in match(expert_spec(), expert_names())}
    hit = found["model.layers.1.experts.1.up.weight"]
    assert (hit.row, hit.suffix, hit.index, hit.unit) == ("model.layers.*.experts.{experts}.up", "weight", 1, 1)
    assert hit.named(4, 7) == "model.layers.4.experts.7.up.weight"
    assert found["model.layers.1.router.weight"].unit is None
    bare = match(expert_spec(), [name.removeprefix("model.") for name in expert_names()])
    assert bare[1].named(5, 2) == "layers.5.experts.2.up.weight"


def test_every_block_has_every_unit() -> None:
    last = "model.layers.1.experts.2.up.weight"
    assert_refused([n for n in expert_names() if n != last], "lack", "experts.2.up", of=expert_spec())
    fewer = [name for name in expert_names() if "experts.2" not in name]
    assert_refused(fewer, "'config.json' says 3 experts", "have 2", of=expert_spec())
    assert_refused([*expert_names(), "model.layers.0.experts.3.up.weight"], "3 experts", of=expert_spec())
    assert_refused(
        [*expert_names(), "model.layers.0.experts.x.up.weight"], "does not know what the tensor", of=expert_spec()
    )
