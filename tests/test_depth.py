"""Where added blocks stand, and what each row does in them."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

import lemonx
from lemonx.algebra.free_parameters import preset
from lemonx.algebra.recipes import CANCEL, KEEP, SILENT
from lemonx.errors import Refused
from lemonx.planning.depth import arrange, mode
from lemonx.specs.norms import batch_norm, layer_norm, rms_norm
from lemonx.specs.rows import IDENTITY, Row
from lemonx.specs.spec import Block, Stack
from lemonx.specs.weights import linear, parameter
from lemonx.verification.rounding import EXACT_TOLERANCE
from pico import PICO, save

MOST = 20
CASES = [
    (n, target, period, pinned)
    for n, period, pinned in itertools.product(range(1, MOST + 1), (1, 2), (0, 1))
    for target in range(n, MOST + 1)
    if n > pinned or n == target
]


def arranged(n: int, target: int, period: int = 1, pinned: int = 0) -> tuple[Block, ...]:
    return arrange("layers", Stack(n, "residual", period=period, pinned=pinned), target)


def added_counts(blocks: tuple[Block, ...]) -> Counter[int]:
    return Counter(block.source for block in blocks if block.added)


def assert_originals_stay(blocks: tuple[Block, ...], n: int, period: int) -> None:
    """Every source block once, in order, at an index of the same phase."""
    originals = [(i, block.source) for i, block in enumerate(blocks) if not block.added]
    assert [source for _, source in originals] == list(range(n))
    assert all(i % period == source % period for i, source in originals)


def assert_next_to_origin(blocks: tuple[Block, ...], period: int) -> None:
    """Between a block and what was added from it stand only blocks of the same period."""
    origin = {block.source: i for i, block in enumerate(blocks) if not block.added}
    for i, block in enumerate(blocks):
        if block.added:
            assert origin[block.source] < i
            assert all(abs(blocks[j].source - block.source) < period for j in range(origin[block.source], i))


def test_arrangement_for_all_sizes() -> None:
    for n, target, period, pinned in CASES:
        blocks = arranged(n, target, period, pinned)
        assert len(blocks) == target
        assert_originals_stay(blocks, n, period)
        assert_next_to_origin(blocks, period)
        assert all(block.source >= pinned for block in blocks if block.added)


def test_added_blocks_are_spread_evenly() -> None:
    """Counts differ by at most one: between blocks, or between periods, once the odd last block is set aside."""
    for n, target, period, pinned in CASES:
        counts = added_counts(arranged(n, target, period, pinned))
        counts[n - 1] -= (target - n) % period
        first = pinned + (n - pinned) % period if n - pinned >= period else pinned
        if period == 1 or (n - pinned) % period == 0:
            spread = [counts[i] for i in range(first, n)]
            assert max(spread, default=0) - min(spread, default=0) <= 1, (n, target, period, pinned)
        for unit in range(pinned, n - period + 1, period):
            if period == 2 and (n - pinned) % 2 == 0:
                assert counts[unit] == counts[unit + 1]
    # Also along the stack: the first half gets as many as the second, give or take one.
    for n, target in itertools.combinations(range(2, MOST + 1, 2), 2):
        counts = added_counts(arranged(n, target))
        halves = [sum(counts[i] for i in half) for half in (range(n // 2), range(n // 2, n))]
        assert abs(halves[0] - halves[1]) <= 1


def test_same_depth_adds_nothing() -> None:
    for n in range(1, MOST):
        for pinned in (0, 1):
            assert arranged(n, n, pinned=pinned) == tuple(Block(i, added=False, closes=True) for i in range(n))


def test_last_of_a_group_closes_it() -> None:
    """One of each block and its copies closes, and it is the last of them."""
    for n, target, period, pinned in CASES:
        if period == 1:
            blocks = arranged(n, target, period, pinned)
            last = {block.source: i for i, block in enumerate(blocks)}
            assert [i for i, block in enumerate(blocks) if block.closes] == sorted(last.values())


def test_by_hand() -> None:
    assert [block.source for block in arranged(2, 5)] == [0, 0, 1, 1, 1]
    assert [block.source for block in arranged(3, 6)] == [0, 0, 1, 1, 2, 2]
    assert [block.source for block in arranged(4, 8, period=2)] == [0, 1, 0, 1, 2, 3, 2, 3]
    assert [block.source for block in arranged(2, 3, period=2)] == [0, 1, 1]
    assert [block.source for block in arranged(3, 5, pinned=1)] == [0, 1, 1, 2, 2]
    assert [block.added for block in arranged(2, 4)] == [False, True, False, True]


@pytest.mark.parametrize("target", [2, 5])
def test_pinned_blocks_cannot_be_copied(target: int) -> None:
    with pytest.raises(Refused, match=r"every layer of stage changes .*keep its depth at 1"):
        arrange("stage", Stack(1, "residual", pinned=1), target)
    assert len(arrange("stage", Stack(1, "residual", pinned=1), 1)) == 1


# ----------------------------------------------------------------- modes

ORIGINAL, ADDED = Block(0, added=False, closes=True), Block(0, added=True, closes=True)
SILENCED: dict[str, Row] = {
    "linear": linear("hidden -> residual"),
    "fused": linear("hidden -> (2 residual)"),
    "norm after the module": rms_norm("branch -> residual"),
    "last norm of a bottleneck": batch_norm("sum -> residual"),
    "bare parameter": parameter("1 residual"),
    "a branch of one layer": linear("residual -> residual"),
}
KEPT: dict[str, Row] = {
    "linear": linear("normed -> hidden"),
    "reader of the raw stream": linear("residual -> hidden"),
    "norm before the module": layer_norm("residual -> normed"),
    "norm of a branch": rms_norm("queries -> heads"),
}


@pytest.mark.parametrize("name", SILENCED)
def test_what_writes_the_stream_is_silenced_in_added_blocks(name: str) -> None:
    assert mode(SILENCED[name], False, "residual", ADDED, 1) == SILENT
    assert mode(SILENCED[name], False, "residual", ADDED, 2) == CANCEL
    for depth_type in (1, 2):
        assert mode(SILENCED[name], False, "residual", ORIGINAL, depth_type) == KEEP


@pytest.mark.parametrize("name", KEPT)
def test_everything_else_is_kept(name: str) -> None:
    for block, depth_type in itertools.product((ORIGINAL, ADDED), (1, 2)):
        assert mode(KEPT[name], False, "residual", block, depth_type) == KEEP


def post_ln_modes(blocks: tuple[Block, ...]) -> list[tuple[str, str, str]]:
    """(first norm, branches, last norm) of every block of a Post-LN stack."""
    norm, branch = layer_norm("residual -> residual"), linear("hidden -> residual")
    return [
        (
            mode(norm, False, "residual", block, 1),
            mode(branch, False, "residual", block, 1),
            mode(norm, True, "residual", block, 1),
        )
        for block in blocks
    ]


def test_post_ln_modes() -> None:
    """The source block keeps its first norm, added ones have plain norms, the last of the group takes the affine."""
    assert post_ln_modes(arranged(1, 3)) == [
        (KEEP, KEEP, IDENTITY),
        (IDENTITY, SILENT, IDENTITY),
        (IDENTITY, SILENT, KEEP),
    ]
    assert post_ln_modes(arranged(2, 2)) == [(KEEP, KEEP, KEEP)] * 2


def post_ln(x: NDArray, source: int, modes: tuple[str, str, str], eps: float = 1e-14) -> NDArray:
    """A block LN(y + g(y)), y = LN(x + f(x)), with parameters of its own, as these modes leave it."""
    rng = np.random.default_rng(source)
    first, branch, last = modes
    for norm in (first, last):
        w, mu, bias = rng.normal(size=(6, 6)), rng.normal(size=6), rng.normal(size=6)
        x = x + (np.tanh(x @ w) if branch == KEEP else 0)
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + eps)
        x = x * mu + bias if norm == KEEP else x
    return x


@pytest.mark.parametrize(("n", "target"), [(1, 2), (2, 3), (2, 6), (3, 4)])
def test_post_ln_depth_is_lossless_up_to_eps(n: int, target: int) -> None:
    """Erratum 2. The order that the paper prints, identity blocks first, is not lossless."""
    x = np.random.default_rng(9).normal(size=(4, 6))
    blocks = arranged(n, target)
    wanted = grown = printed = x
    for source, count in Counter(block.source for block in blocks).items():
        wanted = post_ln(wanted, source, (KEEP, KEEP, KEEP))
        for _ in range(count - 1):
            printed = post_ln(printed, source, (IDENTITY, SILENT, IDENTITY))
        printed = post_ln(printed, source, (KEEP, KEEP, KEEP))
    for block, modes in zip(blocks, post_ln_modes(blocks), strict=True):
        grown = post_ln(grown, block.source, modes)
    assert np.abs(grown - wanted).max() < 1e-11
    assert np.abs(printed - wanted).max() > 1e-2


@pytest.mark.parametrize("model", ["gpt2-lm", "llama-tied", "vit-cls", "olmo2"])
def test_stacked_blocks_are_lossless_too(tmp_path: Path, model: str) -> None:
    """All that is new on top: silent blocks may stand anywhere."""
    source = save(PICO[model](), tmp_path / "s")
    free = replace(preset("language"), placement="stacked")
    lemonx.expand(source, tmp_path / "t", depth=5, width=72, free=free, verify=False)
    measured = lemonx.verify(source, tmp_path / "t")
    assert measured.outputs.difference <= EXACT_TOLERANCE


def test_post_ln_blocks_cannot_be_stacked(tmp_path: Path) -> None:
    source = save(PICO["bert-mlm"](), tmp_path / "s")
    with pytest.raises(Refused, match="Post-LN"):
        lemonx.plan(source, depth=4, free=replace(preset("language"), placement="stacked"))
