"""THE law, W* E_in = E_out W, for every operator, kind and preset; and the paper's laws for what is free."""

from __future__ import annotations

from dataclasses import replace
from math import sqrt

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lemonx.algebra.expansions import Expansion, expansion, identity, product
from lemonx.algebra.free_parameters import PRESETS, Free, preset
from lemonx.algebra.recipes import CANCEL, KEEP, SILENT, Matrix
from lemonx.algebra.runs import Fill
from lemonx.execution import noise
from lemonx.execution.matrix import Reader, blocks, expand_block, expand_matrix
from lemonx.specs.space_expansions import grouped_expansion

# Examples are small; a busy machine is no reason to fail.
LAW = settings(deadline=None, max_examples=60)
EVEN = Free("even", split=1.0, phi=0.0, depth_type=2)
FREE = (*PRESETS.values(), EVEN)
KINDS = ("avg", "zero", "circ", "rand", "iso")
# What reads arbitrary entries must ignore them, as it must ignore means.
INPUT_KINDS = KINDS
QUIET = replace(EVEN, zeta=0.0, cancel=0.0)


@st.composite
def expansions(draw: st.DrawFn, kinds: tuple[str, ...] = KINDS, weighted: bool = True) -> Expansion:
    """Any kind, up to four whole copies, divisible or not; perhaps with amplitudes and a gain; perhaps fused."""
    kind, n = draw(st.sampled_from(kinds)), draw(st.integers(1, 5))
    bare = expansion(kind, n, draw(st.integers(n, 5 * n - 1)))
    if weighted and draw(st.booleans()):
        rng = np.random.default_rng(draw(st.integers(0, 99)))
        amp = rng.uniform(0.25, 2.0, bare.target_size) * rng.choice([-1.0, 1.0], bare.target_size)
        amp = np.where(bare.source >= 0, amp, 1.0)  # amplitudes belong to copies
        bare = replace(bare, amp=amp, gain=draw(st.sampled_from([1.0, 0.6, 1.7])))
    if kind in ("circ", "zero", "iso") and draw(st.booleans()):
        return product(identity(draw(st.integers(1, 2))), bare, identity(draw(st.integers(1, 3))))
    return bare


@st.composite
def query_heads(draw: st.DrawFn) -> Expansion:
    """Query heads under key-value heads, each three wide."""
    kv = draw(st.integers(1, 3))
    under = expansion("circ", kv, draw(st.integers(kv, 3 * kv)))
    group = draw(st.integers(1, 3))
    return product(grouped_expansion(kv * group, under.target_size * (group + 1), under, "circ"), identity(3))


def weight(rows: int, columns: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=(rows, columns))).to(dtype)


def dense(e: Expansion) -> Tensor:
    """E as a matrix; arbitrary entries are 0."""
    return torch.from_numpy(np.ascontiguousarray(e.expand(np.eye(e.size)).T))


def filled(e: Expansion) -> Tensor:
    """Inputs E x for every unit vector x, with something where E leaves anything open."""
    rng = np.random.default_rng(5)
    fill = rng.normal(size=(e.size, int(e.is_free.sum())))
    return torch.from_numpy(np.ascontiguousarray(e.expand(np.eye(e.size), fill).T))


def assert_close(found: Tensor, wanted: Tensor) -> None:
    assert found.shape == wanted.shape
    assert (found - wanted).abs().max() <= 1e-12 * (1 + wanted.abs().max())


def assert_lossless(grown: Tensor, small: Tensor, rows: Expansion, columns: Expansion) -> None:
    """W* E_in = E_out W, on all rows but those that may be anything."""
    assert grown.shape == (rows.target_size, columns.target_size)
    fixed = torch.from_numpy(~rows.is_free)
    assert_close((grown @ filled(columns))[fixed], (dense(rows) @ small)[fixed])


# ----------------------------------------------------------------- THE law


@LAW
@pytest.mark.parametrize("free", FREE, ids=lambda free: free.name)
@given(rows=expansions(), columns=expansions(), seed=st.integers(0, 999))
def test_the_law(free: Free, rows: Expansion, columns: Expansion, seed: int) -> None:
    small = weight(rows.size, columns.size, seed)
    grown = expand_matrix(small, Matrix(rows, columns, consumes=True, own=free.is_own), free, seed)
    assert_lossless(grown, small, rows, columns)


@pytest.mark.parametrize("free", FREE, ids=lambda free: free.name)
@pytest.mark.parametrize("kind_in", INPUT_KINDS)
@pytest.mark.parametrize("kind_out", KINDS)
def test_the_law_for_every_pair_of_kinds(kind_in: str, kind_out: str, free: Free) -> None:
    """3 -> 3, 6, 7, 13 columns by 2 -> 2, 3, 4, 9 rows: one to four copies, with and without remainder."""
    small = weight(2, 3)
    for n_in in (3, 6, 7, 13):
        for n_out in (2, 3, 4, 9):
            for gain in (1.0, 0.7):
                rows, columns = expansion(kind_out, 2, n_out), expansion(kind_in, 3, n_in).with_gain(gain)
                grown = expand_matrix(small, Matrix(rows, columns, consumes=True, own=free.is_own), free)
                assert_lossless(grown, small, rows, columns)


@settings(LAW, max_examples=15)
@given(rows=query_heads(), columns=query_heads(), free=st.sampled_from(FREE))
def test_the_law_for_grouped_heads(rows: Expansion, columns: Expansion, free: Free) -> None:
    small = weight(rows.size, columns.size)
    how = Matrix(rows, columns, consumes=True, own=free.is_own)
    assert_lossless(expand_matrix(small, how, free), small, rows, columns)


@LAW
@given(rows=expansions(), columns=expansions(("avg", "zero", "circ", "iso")), free=st.sampled_from(FREE))
def test_tables_are_produced_on_both_axes(rows: Expansion, columns: Expansion, free: Free) -> None:
    """An embedding: what is read is an index, so W* = E_rows W E_columns^T."""
    small = weight(rows.size, columns.size)
    grown = expand_matrix(small, Matrix(rows, columns, consumes=False), free)
    fixed = torch.from_numpy(~rows.is_free)
    assert_close(grown[fixed], (dense(rows) @ small @ dense(columns).T)[fixed])


@LAW
@given(rows=expansions(), free=st.sampled_from(FREE))
def test_bias_is_the_vector_expansion(rows: Expansion, free: Free) -> None:
    """Appendix B.4: the bias of a row expansion is V(b)."""
    bias = weight(rows.size, 1)
    grown = expand_matrix(bias, Matrix(rows, identity(1), consumes=False), free)[:, 0]
    wanted = torch.from_numpy(rows.expand(bias[:, 0].numpy()))
    fixed = torch.from_numpy(~rows.is_free)
    assert_close(grown[fixed], wanted[fixed])


def test_what_reads_means_or_anything_is_zero() -> None:
    """Only zeros may be read with free weights."""
    for kind in ("avg", "rand"):
        grown = expand_matrix(
            weight(4, 3), Matrix(identity(4), expansion(kind, 3, 8), consumes=True), PRESETS["vision"]
        )
        assert not grown[:, 6:].any()


def test_identity_is_bit_exact() -> None:
    small = weight(5, 4, dtype=torch.bfloat16)
    for consumes in (True, False):
        for free in FREE:
            grown = expand_matrix(small, Matrix(identity(5), identity(4), consumes), free)
            assert torch.equal(grown.view(torch.int16), small.view(torch.int16))


# ----------------------------------------------------------------- added blocks


@LAW
@given(rows=expansions(), columns=expansions(), free=st.sampled_from(FREE), consumes=st.booleans())
def test_type_1_writes_zeros(rows: Expansion, columns: Expansion, free: Free, consumes: bool) -> None:
    how = Matrix(rows, columns, consumes, mode=SILENT)
    grown = expand_matrix(weight(rows.size, columns.size), how, free)
    assert grown.shape == (rows.target_size, columns.target_size)
    assert not grown.any()


@LAW
@given(rows=expansions(("avg", "zero", "circ")), columns=expansions(), free=st.sampled_from(FREE))
def test_type_2_cancels(rows: Expansion, columns: Expansion, free: Free) -> None:
    """W* E_in = 0, with weights on every unit that has copies and none on those that have not."""
    how = Matrix(rows, columns, consumes=True, mode=CANCEL)
    grown = expand_matrix(weight(rows.size, columns.size), how, free)
    assert_close(grown @ filled(columns), torch.zeros(rows.target_size, columns.size, dtype=torch.float64))
    copied = columns.source >= 0
    count = np.where(copied, columns.copies[np.maximum(columns.source, 0)], 0)
    assert not grown[:, count == 1].any()
    # Third copies take phi and a share of what the second has: nothing, if neither is asked for.
    told_apart = (count > 1) & ((columns.copy_number < 2) | (free.phi > 0) | (free.split > 0))
    assert (grown[:, told_apart] != 0).all()
    assert (grown[:, columns.is_zero] != 0).all()
    assert not grown[:, columns.is_mean | columns.is_free].any()


@pytest.mark.parametrize("name", PRESETS)
def test_type_2_noise_is_the_papers(name: str) -> None:
    """D.4: what cancels replicated neurons follows N(0, 0.02^2)."""
    columns = expansion("circ", 64, 96)
    how = Matrix(identity(256), columns, consumes=True, mode=CANCEL)
    grown = expand_matrix(weight(256, 64), how, PRESETS[name])
    assert_normal(grown[:, 64:], 0.02)
    assert torch.equal(grown[:, :32], -grown[:, 64:])
    assert not grown[:, 32:64].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("target", [8, 12, 14, 19])
def test_type_2_cancels_exactly_in_half_precision(dtype: torch.dtype, target: int) -> None:
    columns = expansion("circ", 4, target)
    how = Matrix(identity(64), columns, consumes=True, mode=CANCEL)
    grown = expand_matrix(weight(64, 4, dtype=dtype), how, PRESETS["vision"])
    assert not (grown.double() @ dense(columns)).any()
    assert grown.any()


# ----------------------------------------------------------------- the paper's examples by hand

M = [[1.0, 2.0], [3.0, 6.0]]


@pytest.mark.parametrize(
    ("kind", "rule", "wanted"),
    [
        ("avg", "row-avg", [[1, 2], [3, 6], [1, 2], [3, 6], [2, 4]]),
        ("zero", "row-zero", [[1, 2], [3, 6], [1, 2], [3, 6], [0, 0]]),
        ("circ", "row-circ", [[1, 2], [3, 6], [1, 2], [3, 6], [1, 2]]),
    ],
)
@pytest.mark.parametrize("free", FREE, ids=lambda free: free.name)
def test_row_expansions_by_hand(kind: str, rule: str, wanted: list[list[float]], free: Free) -> None:
    how = Matrix(expansion(kind, 2, 5), identity(2), consumes=True)
    assert how.rule == rule
    assert expand_matrix(torch.tensor(M, dtype=torch.float64), how, free).tolist() == wanted


@pytest.mark.parametrize("free", FREE, ids=lambda free: free.name)
def test_column_random_by_hand(free: Free) -> None:
    """M*_col,rand = [M1 M2 zeta] with M1 + M2 = M."""
    how = Matrix(identity(2), expansion("zero", 2, 5), consumes=True)
    assert how.rule == "col-rand"
    grown, m = expand_matrix(torch.tensor(M).double(), how, free), torch.tensor(M).double()
    assert_close(grown[:, 0:2] + grown[:, 2:4], m)
    assert (grown[:, 4] != 0).all()
    if free is EVEN:
        assert grown[:, :4].tolist() == [[0.5, 1.0, 0.5, 1.0], [1.5, 3.0, 1.5, 3.0]]


@pytest.mark.parametrize("free", FREE, ids=lambda free: free.name)
def test_column_circular_by_hand(free: Free) -> None:
    """M*_col,circ = [M1 M2 M_res]: M_res + (M1 + M2)[:, :r] = M[:, :r], (M1 + M2)[:, r:] = M[:, r:]."""
    how = Matrix(identity(2), expansion("circ", 2, 5), consumes=True)
    assert how.rule == "col-circ"
    grown, m = expand_matrix(torch.tensor(M).double(), how, free), torch.tensor(M).double()
    assert_close(grown[:, 4] + grown[:, 0] + grown[:, 2], m[:, 0])
    assert_close(grown[:, 1] + grown[:, 3], m[:, 1])
    if free is EVEN:
        third = pytest.approx(1 / 3)
        assert grown[0].tolist() == [third, 1.0, third, 1.0, third]


def test_rules_are_named() -> None:
    both = Matrix(expansion("avg", 2, 3), expansion("circ", 2, 3), consumes=True)
    assert both.rule == "col-circ ∘ row-avg"
    assert replace(both, mode=SILENT).rule.endswith(": zero")
    assert replace(both, mode=CANCEL).rule == "type 2: cancelling copies"
    assert Matrix(identity(2), identity(2), consumes=True).rule == "copied"
    assert Matrix(identity(2), expansion("avg", 2, 3), consumes=False).rule == "row-avg"
    assert Matrix(expansion("rand", 2, 3), identity(2), consumes=True).rule == "row-rand"


# ----------------------------------------------------------------- distributions: appendix D.4


def assert_normal(sample: Tensor, std: float) -> None:
    """N(0, std^2) by its first four moments, each within 5 deviations of its own estimate.

    For n independent standard normals the mean, the mean square, the mean cube and the mean fourth power have
    variances 1/n, 2/n, 15/n and 96/n.
    """
    z, n = sample.double().flatten() / std, sample.numel()
    assert abs(z.mean()) < 5 * sqrt(1 / n)
    assert abs(z.square().mean() - 1) < 5 * sqrt(2 / n)
    assert abs((z**3).mean()) < 5 * sqrt(15 / n)
    assert abs((z**4).mean() - 3) < 5 * sqrt(96 / n)


def test_presets_are_the_papers() -> None:
    vision, language = PRESETS["vision"], PRESETS["language"]
    assert (vision.split, vision.phi, vision.depth_type, vision.append_next) == (1.0, 0.02, 2, False)
    assert (language.split, language.phi, language.depth_type, language.append_next) == (0.0, 0.002, 1, True)
    for free in (vision, language):
        assert (free.zeta, free.norm_zeta, free.cancel) == (0.02, 1.0, 0.02)
        assert preset(free.name) is free
    assert [vision.share(k) for k in (2, 4)] == [1 / 2, 1 / 4]
    assert [language.share(k) for k in (2, 4)] == [0, 0]


@pytest.mark.parametrize(("size", "target"), [(64, 128), (64, 96)], ids=["W_2", "W_res"])
def test_vision_copies_follow_the_paper(size: int, target: int) -> None:
    """W_2 (divisible) and W_res (not) are W/2 + Phi, Phi ~ N(0, 0.02^2): the rest of W stays with the first."""
    columns, w = expansion("circ", size, target), weight(512, size)
    grown = expand_matrix(w, Matrix(identity(512), columns, consumes=True), PRESETS["vision"])
    further = target - size
    assert_normal(grown[:, size:] - w[:, :further] / 2, 0.02)
    assert_normal(grown[:, :further] - w[:, :further] / 2, 0.02)
    assert torch.equal(grown[:, further:size], w[:, further:])


@pytest.mark.parametrize(("size", "target"), [(64, 128), (64, 96)], ids=["W_2", "W_res"])
def test_language_copies_follow_the_paper(size: int, target: int) -> None:
    """W_2 (divisible) and W_res (not) are Phi ~ N(0, 0.002^2)."""
    columns, w = expansion("circ", size, target), weight(512, size)
    grown = expand_matrix(w, Matrix(identity(512), columns, consumes=True), PRESETS["language"])
    assert_normal(grown[:, size:], 0.002)
    # Nothing of W goes there: the noise does not correlate with it.
    further, n = target - size, 512 * (target - size)
    assert abs((grown[:, size:] / 0.002 * w[:, :further]).mean()) < 5 / sqrt(n)


# Rows that hold the source's own numbers give nothing away: these are all such rows under `inside`.
@pytest.mark.parametrize("name", [name for name, free in PRESETS.items() if not free.is_inside])
@pytest.mark.parametrize("copies", [3, 4])
def test_further_copies_share_one_law(name: str, copies: int) -> None:
    """Beyond the paper's two copies: each further one is W/k + Phi or Phi, independently."""
    free, w = PRESETS[name], weight(512, 32)
    grown = expand_matrix(w, Matrix(identity(512), expansion("circ", 32, 32 * copies), consumes=True), free)
    parts = [part - free.share(copies) * w for part in grown.split(32, 1)[1:]]
    for phi in parts:
        assert_normal(phi, free.phi)
    n = parts[0].numel()
    assert abs((parts[0] * parts[1]).mean()) < 5 * free.phi**2 / sqrt(n)


@pytest.mark.parametrize("name", PRESETS)
def test_zeta_follows_the_paper(name: str) -> None:
    """Col-rand: what reads zeros is N(0, 0.02^2) for both presets."""
    how = Matrix(identity(512), expansion("zero", 64, 112), consumes=True)
    grown = expand_matrix(weight(512, 64), how, PRESETS[name])
    assert_normal(grown[:, 64:], 0.02)
    assert torch.equal(grown[:, :64], weight(512, 64))


@pytest.mark.parametrize("name", PRESETS)
def test_rows_get_noise_of_their_own(name: str) -> None:
    """Copies of rows are split independently, or twins would stay twins."""
    how = Matrix(expansion("circ", 128, 256), expansion("circ", 64, 128), consumes=True)
    phi = expand_matrix(torch.zeros(128, 64).double(), how, PRESETS[name])[:, 64:] / PRESETS[name].phi
    assert abs((phi[:128] * phi[128:]).mean()) < 5 / sqrt(phi[:128].numel())


def test_jitter_tells_further_units_apart() -> None:
    """In a type 1 block the fan-in of copies from a number on gets N(0, phi^2); earlier ones and means stay."""
    w, free = weight(128, 64), PRESETS["vision"]
    for first in (1, 2):
        how = Matrix(expansion("circ", 128, 384), identity(64), consumes=True, jitter=first)
        grown = expand_matrix(w, how, free)
        assert torch.equal(grown[: 128 * first], w.repeat(first, 1))
        assert_normal(grown[128 * first :] - w.repeat(3 - first, 1), free.phi)
    means = Matrix(expansion("avg", 128, 130), identity(64), consumes=True, jitter=1)
    assert torch.equal(expand_matrix(w, means, free), expand_matrix(w, replace(means, jitter=0), free))


def test_seed_and_name_decide() -> None:
    how, w = Matrix(identity(8), expansion("circ", 4, 7), consumes=True), weight(8, 4)
    one = expand_matrix(w, how, PRESETS["vision"], seed=1, name="a")
    assert torch.equal(one, expand_matrix(w, how, PRESETS["vision"], seed=1, name="a"))
    assert not torch.equal(one, expand_matrix(w, how, PRESETS["vision"], seed=2, name="a"))
    assert not torch.equal(one, expand_matrix(w, how, PRESETS["vision"], seed=1, name="b"))


# ----------------------------------------------------------------- by blocks, and in half precision


def by_blocks(small: Tensor, how: Matrix, free: Free, limit: int) -> Tensor:
    """What the runner does: at most `limit` rows at a time, a generator for each."""
    mean, spread = lambda: small.double().mean(0).to(small.dtype), lambda: noise.spread([small])
    read = Reader(lambda start, stop: small[start:stop], mean, spread=spread)
    pieces = [
        expand_block(run, how, read, free, noise.generator(0, "weight", part)) for part, run in blocks(how.rows, limit)
    ]
    return torch.cat(pieces)


@LAW
@given(rows=expansions(), limit=st.integers(1, 30))
def test_blocks_are_the_rows_in_order(rows: Expansion, limit: int) -> None:
    at, source = 0, []
    for _, run in blocks(rows, limit):
        assert run.target == at
        assert 1 <= run.length <= limit
        assert (rows.copy_number[at : at + run.length] == run.copy).all()
        at += run.length
        source += range(run.source, run.source + run.length) if run.source >= 0 else [run.source] * run.length
    assert source == rows.source.tolist()


@LAW
@given(rows=expansions(), limit=st.integers(1, 30), ends=st.tuples(st.integers(0, 99), st.integers(0, 99)))
def test_wanted_blocks_keep_their_numbers(rows: Expansion, limit: int, ends: tuple[int, int]) -> None:
    wanted = range(*sorted(ends))
    every = enumerate(run for _, run in blocks(rows, limit))
    hold = [(n, run) for n, run in every if run.target < wanted.stop and wanted.start < run.target + run.length]
    assert list(blocks(rows, limit, wanted)) == (hold if wanted else [])


@LAW
@given(
    rows=expansions(("avg", "zero", "circ", "iso")),
    columns=expansions(),
    limit=st.integers(1, 30),
    mode=st.sampled_from([KEEP, SILENT, CANCEL]),
    consumes=st.booleans(),
)
def test_blocks_change_nothing_but_the_noise(
    rows: Expansion, columns: Expansion, limit: int, mode: str, consumes: bool
) -> None:
    """Noise is seeded by the block's number, so it depends on the limit; without noise nothing does."""
    small = weight(rows.size, columns.size)
    how = Matrix(rows, columns, consumes or mode == CANCEL, mode=mode)
    if not how.consumes:
        how = replace(how, columns=replace(columns, source=np.where(columns.is_free, Fill.ZERO, columns.source)))
    assert torch.equal(by_blocks(small, how, QUIET, limit), expand_matrix(small, how, QUIET))


@LAW
@given(rows=expansions(), columns=expansions(), limit=st.integers(1, 30), free=st.sampled_from(FREE))
def test_the_law_holds_by_blocks(rows: Expansion, columns: Expansion, limit: int, free: Free) -> None:
    small = weight(rows.size, columns.size)
    how = Matrix(rows, columns, consumes=True, own=free.is_own)
    assert_lossless(by_blocks(small, how, free, limit), small, rows, columns)
    if limit >= rows.size:  # then blocks are runs, as in expand_matrix, and so is the noise
        assert torch.equal(by_blocks(small, how, free, limit), by_blocks(small, how, free, 10**6))


@LAW
@given(
    kind=st.sampled_from(["zero", "circ"]),
    n=st.integers(1, 9),
    more=st.integers(0, 30),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
    free=st.sampled_from(FREE),
    rows=expansions(weighted=False),
)
def test_copies_sum_exactly_in_half_precision(
    kind: str, n: int, more: int, dtype: torch.dtype, free: Free, rows: Expansion
) -> None:
    """In float64, the columns of a unit's copies add up to the weight as stored, not nearly but exactly."""
    columns = expansion(kind, n, min(n + more, 4 * n))
    small = weight(rows.size, n, dtype=dtype)
    grown = expand_matrix(small, Matrix(rows, columns, consumes=True, own=free.is_own), free)
    assert grown.dtype == dtype
    produced = expand_matrix(small, Matrix(rows, identity(n), consumes=True), free).double()
    fixed = torch.from_numpy(~rows.is_free)
    copied = torch.from_numpy((columns.source >= 0).astype(np.float64))
    assert torch.equal(((grown.double() * copied) @ dense(columns))[fixed], produced[fixed])


def test_source_is_left_alone() -> None:
    small = weight(4, 3)
    before = small.clone()
    for rows in (identity(4), expansion("avg", 4, 7).with_gain(2.0)):
        for columns in (identity(3), expansion("circ", 3, 8)):
            for mode in (KEEP, SILENT, CANCEL):
                expand_matrix(small, Matrix(rows, columns, consumes=True, mode=mode, jitter=1), PRESETS["vision"])
    assert torch.equal(small, before)
