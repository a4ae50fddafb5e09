"""Vector expansions: the paper's definitions, and what the map says about itself."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from lemonx.algebra.expansions import (
    Expansion,
    Fill,
    Split,
    alibi_expansion,
    alibi_slopes,
    concat,
    expansion,
    identity,
    multiples_near,
    product,
)
from lemonx.errors import Refused
from lemonx.specs.space_expansions import grouped_expansion, padded_expansion
from lemonx.specs.spaces import Grouped, Growth, Rotary, Stream, Units, avg, circ, grouped, iso, key, query, zero

# Examples are small; a busy machine is no reason to fail.
LAW = settings(deadline=None, max_examples=60)
KINDS = ("avg", "zero", "circ", "rand", "iso")


@st.composite
def sizes(draw: st.DrawFn, most: int = 7, copies: int = 4) -> tuple[int, int]:
    """A source size n and a target size N >= n, up to `copies` whole copies and a remainder."""
    n = draw(st.integers(1, most))
    return n, draw(st.integers(n, (copies + 1) * n - 1))


@st.composite
def plain(draw: st.DrawFn, kinds: tuple[str, ...] = KINDS, most: int = 7) -> Expansion:
    """What `expansion` makes."""
    return expansion(draw(st.sampled_from(kinds)), *draw(sizes(most)))


@st.composite
def weighted(draw: st.DrawFn, kinds: tuple[str, ...] = KINDS) -> Expansion:
    """An expansion whose copies have any amplitudes, and with a gain."""
    bare = draw(plain(kinds))
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    amp = rng.uniform(0.25, 2.0, bare.target_size) * rng.choice([-1.0, 1.0], bare.target_size)
    amp = np.where(bare.source >= 0, amp, 1.0)  # amplitudes belong to copies
    return replace(bare, amp=amp, gain=draw(st.sampled_from([1.0, 0.5, 1.7])))


@st.composite
def heads(draw: st.DrawFn, kind: str = "circ") -> Expansion:
    """Query heads under key-value heads, where they fit."""
    kv, kv_target = draw(sizes(4))
    group = draw(st.integers(1, 4))
    least = -(-group // (kv_target // kv))
    under = expansion("circ", kv, kv_target)
    return grouped_expansion(kv * group, kv_target * draw(st.integers(least, least + 4)), under, kind)


@st.composite
def fused(draw: st.DrawFn) -> Expansion:
    """A fused axis as families have them: (3 heads head_dim), (4 stage), heads alone."""
    units = draw(st.one_of(plain(("circ", "zero", "iso"), 4), heads()))
    return product(identity(draw(st.integers(1, 3))), units, identity(draw(st.integers(1, 3))))


def vector(size: int, seed: int = 0) -> NDArray:
    return np.random.default_rng(seed).normal(size=size)


def dense(e: Expansion) -> NDArray:
    """E as a matrix; arbitrary entries are 0."""
    return e.expand(np.eye(e.size)).T


# ----------------------------------------------------------------- the paper's definitions


@LAW
@given(st.sampled_from(KINDS), sizes())
def test_back_undoes_expand(kind: str, size: tuple[int, int]) -> None:
    e, x = expansion(kind, *size), vector(size[0])
    assert np.allclose(e.back(e.expand(x, fill=np.array(7.0))), x, rtol=1e-15, atol=0)
    if kind != "iso":
        assert np.array_equal(e.back(e.expand(x)), e.expand(x)[: size[0]])  # the paper's inverse


@LAW
@given(weighted())
def test_back_undoes_amplitudes_and_gain(e: Expansion) -> None:
    x = vector(e.size)
    assert np.allclose(e.back(e.expand(x)), x, rtol=1e-14, atol=0)


@LAW
@given(sizes(), st.integers(0, 99))
def test_paper_definitions(size: tuple[int, int], seed: int) -> None:
    """Whole copies of x, then the remainder, as appendix B.3 writes them down."""
    n, target = size
    x, rest = vector(n, seed), target % n
    copies, zeta = [x] * (target // n), vector(rest, seed + 1)
    remainder = {"avg": np.full(rest, x.mean()), "zero": np.zeros(rest), "circ": x[:rest], "rand": zeta}
    for kind, end in remainder.items():
        e = expansion(kind, n, target)
        fill = zeta if kind == "rand" else None
        assert np.array_equal(e.expand(x, fill), np.concatenate([*copies, end]))
        assert (e.size, e.target_size) == size
        assert e.is_plain


def test_by_hand() -> None:
    x = np.array([1.0, 2.0, 6.0])
    assert expansion("avg", 3, 8).expand(x).tolist() == [1, 2, 6, 1, 2, 6, 3, 3]
    assert expansion("zero", 3, 8).expand(x).tolist() == [1, 2, 6, 1, 2, 6, 0, 0]
    assert expansion("circ", 3, 8).expand(x).tolist() == [1, 2, 6, 1, 2, 6, 1, 2]
    assert expansion("rand", 3, 8).expand(x, np.array([8.0, 9.0])).tolist() == [1, 2, 6, 1, 2, 6, 8, 9]
    half = 2**-0.5
    assert np.allclose(expansion("iso", 2, 3).expand(np.array([2.0, 3.0])), [2 * half, 3, 2 * half])
    assert expansion("avg", 3, 3).is_identity
    assert not expansion("circ", 3, 4).is_identity
    assert not expansion("circ", 3, 3).with_gain(2.0).is_identity


@LAW
@given(plain())
def test_expand_acts_on_the_last_axis(e: Expansion) -> None:
    x = vector(6 * e.size).reshape(2, 3, e.size)
    assert np.array_equal(e.expand(x)[1, 2], e.expand(x[1, 2]))
    before = x.copy()
    e.expand(x)
    assert np.array_equal(x, before)


@LAW
@given(plain(), st.floats(0.1, 9))
def test_gain_scales_all_but_arbitrary_entries(e: Expansion, gain: float) -> None:
    x = vector(e.size)
    assert np.allclose(e.with_gain(gain).expand(x, np.array(0.0)), gain * e.expand(x), rtol=1e-14)
    assert np.array_equal(e.with_gain(gain).expand(x, np.array(5.0))[e.is_free], np.full(sum(e.is_free), 5))


@LAW
@given(sizes())
def test_iso_energies(size: tuple[int, int]) -> None:
    """Every unit keeps the energy of the whole copies, however many copies it has; whole copies stay plain."""
    e = expansion("iso", *size)
    assert np.allclose(e.energy, size[1] // size[0], rtol=1e-14)
    assert np.array_equal(e.source, expansion("circ", *size).source)
    assert (size[1] % size[0] != 0) or e.is_plain
    x = vector(size[0])
    assert np.isclose((e.expand(x) ** 2).sum(), (size[1] // size[0]) * (x**2).sum(), rtol=1e-14)


# ----------------------------------------------------------------- what the map says of itself


def assert_counts_are_true(e: Expansion) -> None:
    """copies, copy_number, energy, first_copies: counted again, one index at a time."""
    seen: dict[int, list[int]] = {unit: [] for unit in range(e.size)}
    for t, s in enumerate(e.source.tolist()):
        if s >= 0:
            assert e.copy_number[t] == len(seen[s])
            seen[s].append(t)
        else:
            assert e.copy_number[t] == 0
    assert e.copies.tolist() == [len(seen[unit]) for unit in range(e.size)]
    assert np.allclose(e.energy, [sum(e.amp[t] ** 2 for t in seen[unit]) for unit in range(e.size)])
    assert e.first_copies.tolist() == [seen[unit][0] for unit in range(e.size)]


def assert_runs_are_the_map(e: Expansion) -> None:
    """Runs follow one another, give the source map and the copy numbers back, and could not be longer."""
    source, number, at = [], [], 0
    for run in e.runs:
        assert run.target == at
        assert run.length > 0
        at += run.length
        source += range(run.source, run.source + run.length) if run.source >= 0 else [run.source] * run.length
        number += [run.copy] * run.length
    assert source == e.source.tolist()
    assert number == e.copy_number.tolist()
    for one, two in zip(e.runs, e.runs[1:], strict=False):
        goes_on = two.source == (one.source + one.length if one.source >= 0 else one.source)
        assert not goes_on or one.copy != two.copy or (one.source >= 0) != (two.source >= 0)


def assert_every_further_copy_once(e: Expansion, base: int) -> None:
    """Pairs join copies of one unit; each copy after number `base` stands in one pair, and no other index does."""
    covered = []
    for pair in e.further_copies(base):
        assert isinstance(pair, Split)
        here, there = np.arange(pair.target, pair.target + pair.length), np.arange(pair.base, pair.base + pair.length)
        assert np.array_equal(e.source[here], e.source[there])
        assert (e.source[here] >= 0).all()
        assert (e.copy_number[there] == base).all()
        assert (e.copies[e.source[here]] == pair.copies).all()
        # Type 2 treats second copies apart: a pair of blocks must not mix second and third ones.
        assert len(set(e.copy_number[here].tolist())) == 1
        covered += here.tolist()
    wanted = np.flatnonzero((e.source >= 0) & (e.copy_number > base))
    assert sorted(covered) == wanted.tolist()


@LAW
@given(st.one_of(plain(), weighted(), heads(), fused()), st.integers(0, 3))
def test_map_is_described_exactly(e: Expansion, base: int) -> None:
    assert_counts_are_true(e)
    assert_runs_are_the_map(e)
    assert_every_further_copy_once(e, base)
    for fill, asked in ((Fill.AVG, e.is_mean), (Fill.ZERO, e.is_zero), (Fill.RAND, e.is_free)):
        assert asked.tolist() == [at == fill for at in e.source.tolist()]


@LAW
@given(st.permutations(range(9)), st.integers(1, 9))
def test_any_map_is_described_exactly(order: list[int], size: int) -> None:
    """Counts and runs hold for maps in any order too."""
    source = np.concatenate([np.arange(size), np.array([i % (size + 2) for i in order])])
    source = np.where(source >= size, size - 1 - source, source)  # -1 and -2: zeros and means
    e = Expansion(size, source, np.ones(len(source)))
    assert_counts_are_true(e)
    assert_runs_are_the_map(e)


def test_runs_by_hand() -> None:
    assert expansion("circ", 3, 8).runs == ((0, 0, 3, 0), (3, 0, 3, 1), (6, 0, 2, 2))
    assert expansion("zero", 3, 5).runs == ((0, 0, 3, 0), (3, Fill.ZERO, 2, 0))
    # Units 0 and 1 have three copies, unit 2 has two; blocks have one count each.
    assert expansion("circ", 3, 8).further_copies() == ((3, 0, 2, 3), (5, 2, 1, 2), (6, 0, 2, 3))
    assert expansion("circ", 3, 8).further_copies(base=1) == ((6, 3, 2, 3),)
    assert expansion("circ", 3, 3).further_copies() == ()


# ----------------------------------------------------------------- products and duals


@LAW
@given(st.lists(weighted(("zero", "circ", "iso")), min_size=1, max_size=3))
def test_product_is_kron(factors: list[Expansion]) -> None:
    """First axis outermost: E of (a b c) is the Kronecker product of the three."""
    # The first nine entries hold every unit, and keep the matrices small.
    factors = [replace(e, source=e.source[:9], amp=e.amp[:9]) for e in factors]
    wanted = np.eye(1)
    for e in factors:
        wanted = np.kron(wanted, dense(e))
    assert np.allclose(dense(product(*factors)), wanted, rtol=1e-14, atol=0)


@LAW
@given(plain(("avg",), 4), st.integers(1, 3), st.integers(1, 3))
def test_product_with_means_is_kron_or_refused(e: Expansion, outer: int, inner: int) -> None:
    """A mean over one axis of several is not the mean of all: said with a flag, it would be another vector."""
    factors = (identity(outer), e, identity(inner))
    wanted = np.kron(np.kron(np.eye(outer), dense(e)), np.eye(inner))
    try:
        found = dense(product(*factors))
    except (Refused, ValueError):
        assert outer * inner > 1
        assert e.is_mean.any()
    else:
        assert np.allclose(found, wanted, rtol=1e-14, atol=1e-16)


def test_product_by_hand() -> None:
    """(heads head_dim) with 2 heads -> 3 and head_dim 2: whole heads are copied."""
    assert product(expansion("circ", 2, 3), identity(2)).source.tolist() == [0, 1, 2, 3, 0, 1]
    assert product(identity(2), expansion("circ", 2, 3)).source.tolist() == [0, 1, 0, 2, 3, 2]
    assert product(identity(2), expansion("zero", 2, 3)).source.tolist() == [0, 1, Fill.ZERO, 2, 3, Fill.ZERO]
    assert product().is_identity
    assert product(identity(2), identity(3)).is_identity
    assert product(identity(2).with_gain(2.0), identity(1).with_gain(3.0)).gain == 6.0


def holding(fill: Fill) -> Expansion:
    """One copied entry, and one with this fill."""
    return Expansion(1, np.array([0, fill]), np.ones(2))


@pytest.mark.parametrize("outer", Fill)
@pytest.mark.parametrize("inner", Fill)
def test_of_two_fills_the_later_holds(outer: Fill, inner: Fill) -> None:
    """ZERO, AVG, RAND, PART, WEIGHED, DENSE, SPARE: a fused entry holds the one that fewer modules can handle."""
    order = [Fill.ZERO, Fill.AVG, Fill.RAND, Fill.PART, Fill.WEIGHED, Fill.DENSE, Fill.SPARE]
    assert list(Fill) == order and all(fill < 0 for fill in Fill)
    later = order[max(order.index(outer), order.index(inner))]
    assert product(holding(outer), holding(inner)).source.tolist() == [0, inner, outer, later]


@pytest.mark.parametrize("mean", [Fill.AVG, Fill.WEIGHED])
def test_a_mean_along_one_of_several_axes_is_a_mean_of_a_part(mean: Fill) -> None:
    for fused in (product(holding(mean), identity(2)), product(identity(2), holding(mean))):
        assert fused.has_partial_means and not (fused.is_mean | fused.is_weighed_mean).any()


@pytest.mark.parametrize(("fill", "calm", "passes"), [
    (Fill.ZERO, True, True), (Fill.ZERO, False, False), (Fill.RAND, False, True), (Fill.SPARE, False, True),
    (Fill.AVG, True, False), (Fill.PART, True, False), (Fill.WEIGHED, True, False), (Fill.DENSE, True, False),
])  # fmt: skip
def test_what_a_nonlinearity_leaves_as_it_is(fill: Fill, calm: bool, passes: bool) -> None:
    assert holding(fill).passes_nonlinearity(calm=calm) == passes
    assert not holding(fill).with_gain(2.0).passes_nonlinearity(calm=calm)
    assert not replace(holding(fill), amp=np.array([0.5, 1.0])).passes_nonlinearity(calm=calm)


@LAW
@given(weighted(("avg", "zero", "circ", "iso")), st.integers(0, 99))
def test_dual_pairing(e: Expansion, seed: int) -> None:
    """sum_t (E x)[t] (D y)[t] = x . y, with amplitudes and gain: the logits of a tied decoder."""
    x, y = vector(e.size, seed), vector(e.size, seed + 1)
    paired = float(e.expand(x) @ e.dual().expand(y))
    assert abs(paired - float(x @ y)) <= 1e-13 * float(np.abs(x) @ np.abs(y))


@LAW
@given(plain(("zero",)))
def test_dual_splits_evenly(e: Expansion) -> None:
    """The paper's rule: the final norm is divided by the number of copies."""
    copied = e.source >= 0
    assert np.allclose(e.dual().amp[copied], 1.0 / (e.target_size // e.size))
    assert np.array_equal(e.dual().source, e.source)


# ----------------------------------------------------------------- query heads under key-value heads


def fits(q: int, kv: int, q_target: int, kv_target: int) -> bool:
    """The rule: copies * gT >= gS for every key-value head, and whole groups."""
    least_copies = kv_target // kv
    return q_target % kv_target == 0 and least_copies * (q_target // kv_target) >= q // kv


def assert_under_their_own(q: int, kv: int, q_target: int, kv_target: int) -> None:
    """Every target head stands under a copy of its source's key-value head, and every source head stands."""
    under = expansion("circ", kv, kv_target)
    e = grouped_expansion(q, q_target, under, "circ")
    group, target_group = q // kv, q_target // kv_target
    assert e.target_size == q_target
    for t, s in enumerate(e.source.tolist()):
        assert under.source[t // target_group] == s // group
    assert set(e.source.tolist()) == set(range(q))
    assert e.is_plain
    energies = grouped_expansion(q, q_target, under, "iso").energy
    assert np.allclose(energies, energies[0], rtol=1e-14)


@LAW
@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 12), st.integers(1, 24))
def test_grouped_heads(kv: int, group: int, kv_target: int, q_target: int) -> None:
    q, kv_target = kv * group, max(kv, kv_target)
    if fits(q, kv, q_target, kv_target):
        if q_target >= q:
            assert_under_their_own(q, kv, q_target, kv_target)
        return
    with pytest.raises(Refused, match=rf"^{q_target} query heads do not fit {kv_target} key-value heads") as refusal:
        grouped_expansion(q, q_target, expansion("circ", kv, kv_target), "circ")
    advice = re.search(r"try (\d+)\b.*multiple of (\d+)", str(refusal.value))
    assert advice
    for times in range(3):
        assert_under_their_own(q, kv, int(advice[1]) + times * int(advice[2]), kv_target)


@pytest.mark.parametrize("target", ["8/4", "8/2", "6/2", "4/4", "8/8", "16/4", "12/4"])
def test_grouped_heads_in_the_list_of_math(target: str) -> None:
    q_target, kv_target = map(int, target.split("/"))
    assert_under_their_own(4, 2, q_target, kv_target)


def test_grouped_heads_by_hand() -> None:
    """4 query heads under 2 key-value heads; GQA -> MHA gives each copy of a head half of the group."""
    two = expansion("circ", 2, 2)
    assert grouped_expansion(4, 6, two, "circ").source.tolist() == [0, 1, 0, 2, 3, 2]
    assert grouped_expansion(4, 4, expansion("circ", 2, 4), "circ").source.tolist() == [0, 2, 1, 3]
    for target in (3, 6):  # MATH.md: 6/2 -> 6/3 is not possible by copying, for head 1 has one copy
        with pytest.raises(Refused, match=rf"{target} query heads do not fit 3 key-value heads.*try 9 "):
            grouped_expansion(6, target, expansion("circ", 2, 3), "circ")


def test_same_heads_are_the_identity() -> None:
    for kind in ("circ", "iso"):
        assert grouped_expansion(6, 6, identity(2), kind).is_identity


# ----------------------------------------------------------------- spaces and advice


def test_spaces() -> None:
    assert (avg(3), zero(3)) == (Stream(3, "avg"), Stream(3, "zero"))
    assert (circ(3), iso(3)) == (Units(3, "circ"), Units(3, "iso"))
    assert circ(3, positions=49).positions == 49
    assert grouped(4, under="kv", kind="iso") == Grouped(4, "iso", under="kv")


@LAW
@given(sizes(12))
def test_multiples_near_are_whole_multiples(size: tuple[int, int]) -> None:
    n, target = size
    advised = [int(words.split()[0]) for words in multiples_near(n, target).split(" or ")]
    assert advised
    for value in advised:
        assert value % n == 0
        assert value > n
        assert abs(value - target) <= n


# ----------------------------------------------------------------- side by side, turning pairs, slopes


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 4)), min_size=2, max_size=4), st.integers(1, 3))
def test_side_by_side(sizes: list[tuple[int, int]], seed: int) -> None:
    """Expanding the parts of a vector and joining them is expanding the joined vector."""
    parts = [expansion("circ", n, n + more).with_gain(1.0 + n) for n, more in sizes]
    xs = [np.random.default_rng(seed + i).normal(size=part.size) for i, part in enumerate(parts)]
    together = concat(*parts).expand(np.concatenate(xs))
    assert np.allclose(together, np.concatenate([part.expand(x) for part, x in zip(parts, xs, strict=True)]))


@given(st.integers(1, 4), st.integers(0, 5), st.integers(1, 3), st.integers(1, 3))
def test_side_by_side_in_turn(heads: int, more: int, a: int, b: int) -> None:
    """A slice of each part for every head: as two products would be, cut in slices."""
    over = expansion("circ", heads, heads + more)
    first, second = product(over, identity(a)), product(over, identity(b))
    x, y = np.arange(heads * a) + 0.0, np.arange(heads * b) + 100.0

    def in_turn(x: np.ndarray, y: np.ndarray, slices: int) -> np.ndarray:
        return np.concatenate([x.reshape(slices, -1), y.reshape(slices, -1)], 1).reshape(-1)

    expanded = concat(first, second, by=over).expand(in_turn(x, y, heads))
    assert np.array_equal(expanded, in_turn(first.expand(x), second.expand(y), heads + more))


def test_a_mean_of_a_part_is_no_mean() -> None:
    assert concat(expansion("avg", 2, 3), identity(1)).has_partial_means


@pytest.mark.parametrize("adjacent", [False, True])
@given(half=st.integers(1, 6), times=st.integers(1, 4), rest=st.integers(0, 3), more=st.integers(0, 3))
def test_turning_pairs_keep_their_speed(adjacent: bool, half: int, times: int, rest: int, more: int) -> None:
    """Scores of turned queries and keys are the same at every distance, whatever new keys hold."""
    small, large = 2 * half, 2 * half * times
    turns = Rotary(small, adjacent), Rotary(large, adjacent)
    sizes = small + rest, large + rest + more
    before, after = (query(n, turn, scale=1.0) for n, turn in zip(sizes, turns, strict=True))
    queries = before.expand_to(after, Growth())
    before, after = (key(n, turn) for n, turn in zip(sizes, turns, strict=True))
    keys = before.expand_to(after, Growth())
    rng = np.random.default_rng(half)
    q, k = rng.normal(size=sizes[0]), rng.normal(size=sizes[0])
    fill = rng.normal(size=int((keys.source < 0).sum()))
    for distance in (0, 1, 5):
        before = turned(q, small, adjacent, distance) @ k
        after = turned(queries.expand(q), large, adjacent, distance) @ keys.expand(k, fill)
        assert np.isclose(before, after, rtol=1e-12)


def turned(x: np.ndarray, rotary: int, adjacent: bool, distance: int) -> np.ndarray:
    """Pair i of the first `rotary` entries, turned by distance * theta^(-2i/rotary)."""
    angle = distance * 10000.0 ** (-2 * np.arange(rotary // 2) / rotary)
    one = np.arange(rotary // 2) * 2 if adjacent else np.arange(rotary // 2)
    two = one + (1 if adjacent else rotary // 2)
    y = x.copy()
    y[one] = x[one] * np.cos(angle) - x[two] * np.sin(angle)
    y[two] = x[one] * np.sin(angle) + x[two] * np.cos(angle)
    return y


def test_pairs_that_would_turn_at_other_speeds_are_refused() -> None:
    with pytest.raises(Refused, match=r"12 rotary entries of a head turn.*try heads of 24"):
        key(12, Rotary(12)).expand_to(key(20, Rotary(20)), Growth())


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 6, 8, 12, 16, 24, 71])
def test_slopes_are_those_of_transformers(heads: int) -> None:
    import torch
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    theirs = build_alibi_tensor(torch.ones(1, 2), heads, torch.float64)[:, 0, 1].numpy()
    assert np.allclose(alibi_slopes(heads), theirs, rtol=1e-6)


@pytest.mark.parametrize(("size", "target"), [(4, 6), (4, 8), (4, 12), (8, 12), (6, 12), (12, 16), (16, 40)])
def test_heads_keep_their_slopes(size: int, target: int) -> None:
    grown = alibi_expansion(size, target)
    kept = grown.source >= 0
    assert (grown.copies == 1).all()
    assert np.allclose(alibi_slopes(target)[kept], alibi_slopes(size)[grown.source[kept]])


# ----------------------------------------------------------------- a narrower space between zeros


@LAW
@given(inner=plain(("circ",)), edges=st.integers(1, 7), more=st.integers(0, 9), seed=st.integers(0, 99))
def test_a_narrower_space_between_zeros_is_added_where_its_copies_are(
    inner: Expansion, edges: int, more: int, seed: int
) -> None:
    """E (y + pad x) = E y + pad (E_inner x): a shortcut without parameters is right, whatever the widths."""

    def pad(x: NDArray, size: int) -> NDArray:
        before = (size - len(x)) // 2
        return np.pad(x, (before, size - len(x) - before))

    size, target = inner.size + edges, inner.target_size + edges + more
    wide = padded_expansion(size, target, inner)
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=inner.size), rng.normal(size=size)
    np.testing.assert_array_equal(wide.expand(y + pad(x, size)), wide.expand(y) + pad(inner.expand(x), target))
    assert wide.copies.min() >= 1


@pytest.mark.parametrize(("size", "target"), [(6, 9), (4, 9), (6, 7)])
def test_a_narrower_space_needs_its_zeros(size: int, target: int) -> None:
    with pytest.raises(Refused, match="every new zero must duplicate an old one"):
        padded_expansion(size, target, expansion("circ", 4, 8))
