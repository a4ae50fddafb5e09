"""Norms, MLPs, attention and convolutions: what rows make of real torch modules is (V_in, V_out)-lossless."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from lemonx.algebra.expansions import Expansion, expansion, identity, product
from lemonx.algebra.free_parameters import PRESETS, Free
from lemonx.algebra.recipes import CANCEL, KEEP, SILENT, Matrix, Vector
from lemonx.errors import Refused
from lemonx.execution.matrix import expand_matrix
from lemonx.specs.norms import LayerNorm, Norm, RMSNorm, batch_norm, layer_norm, rms_norm
from lemonx.specs.rows import IDENTITY, UNBIASED, Row, Typed
from lemonx.specs.signature import Side, parse, side
from lemonx.specs.space_expansions import grouped_expansion
from lemonx.specs.weights import conv, dropped, embedding, linear, parameter

# Examples are small; a busy machine is no reason to fail.
LAW = settings(deadline=None, max_examples=30)
EPS = 1e-2  # not small, so that a wrong eps shows
LN, RMS = layer_norm("residual -> normed"), rms_norm("residual -> normed")


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.from_numpy(np.random.default_rng([seed, *shape]).normal(size=shape))


def spread(e: Expansion, x: Tensor, dim: int = -1) -> Tensor:
    """E x along one axis."""
    moved = e.expand(x.movedim(dim, -1).numpy())
    return torch.from_numpy(np.ascontiguousarray(moved)).movedim(-1, dim)


def assert_close(found: Tensor, wanted: Tensor) -> None:
    assert found.shape == wanted.shape
    assert (found - wanted).abs().max() <= 1e-12 * (1 + wanted.abs().max())


def vector(recipe: object, values: Tensor, seed: int = 7) -> Tensor:
    """A norm's parameters by their recipe; where anything is allowed, something is."""
    assert isinstance(recipe, Vector)
    if recipe.constant is not None:
        values = torch.full_like(values, recipe.constant)
    source = torch.from_numpy(recipe.expansion.source)
    result = values[source.clamp(min=0)] * torch.from_numpy(recipe.factor)
    if recipe.fill:
        zeta = torch.from_numpy(np.random.default_rng(seed).uniform(-recipe.fill, recipe.fill, len(result)))
        result = torch.where(source < 0, zeta, result)
    return result


def grow(row: Row, suffix: str, tensor: Tensor, spaces: dict[str, Expansion], free: Free, mode: str = KEEP) -> Tensor:
    """A weight or bias as planning and the runner expand it: as a matrix, turned round if it is kept so."""
    axes = row.tensors()[suffix]
    per_axis = tuple(
        product(*(spaces[a] if a in spaces else identity(n if a == "_" else int(a)) for a in axis.side.axes))
        for axis, n in zip(axes, tensor.shape, strict=True)
    )
    how = row.recipe(suffix, Typed(identity(1), identity(1), per_axis), mode)
    assert isinstance(how, Matrix)
    flat = tensor.reshape(how.columns.size, how.rows.size).T if how.transposed else tensor.reshape(how.rows.size, -1)
    grown = expand_matrix(flat.contiguous(), how, free, name=suffix)
    shape = tuple(e.target_size for e in per_axis)
    return (grown.T if how.transposed else grown).reshape(shape)


# ----------------------------------------------------------------- LayerNorm and RMSNorm


def layer(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def rms(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, eps)


Call = Callable[[Tensor, Tensor, Tensor | None, float], Tensor]


def normed(norm: Norm, call: Call, reads: Expansion, writes: Expansion, eps: float, mode: str = KEEP) -> Tensor:
    """N*(E x), with eps the one of the target."""
    x, mu, bias = randn(5, reads.size), randn(reads.size, seed=1), randn(reads.size, seed=2)
    typed = Typed(reads, writes, (writes,))
    weight = vector(norm.recipe("weight", typed, mode), mu)
    return call(spread(reads, x), weight, vector(norm.recipe("bias", typed, mode), bias), eps)


def small_norm(call: Call, size: int) -> Tensor:
    return call(randn(5, size), randn(size, seed=1), randn(size, seed=2), EPS)


def target_eps(norm: Norm, reads: Expansion) -> float:
    """eps* = (gain eta)^2 eps."""
    return (reads.gain * norm.eta(reads)) ** 2 * EPS


def assert_norm_law(norm: Norm, call: Call, reads: Expansion, writes: Expansion) -> None:
    """N*(E x) = E_out N(x) for random mu, b, x."""
    norm.require(reads, writes)
    found = normed(norm, call, reads, writes, target_eps(norm, reads))
    assert_close(found, spread(writes, small_norm(call, reads.size)))


@st.composite
def sizes(draw: st.DrawFn) -> tuple[int, int]:
    n = draw(st.integers(2, 9))
    return n, draw(st.integers(n, 4 * n))


GAINS = st.sampled_from([1.0, 0.5, 1.3])


@LAW
@given(sizes(), GAINS, GAINS)
def test_layer_norm_is_avg_to_zero(size: tuple[int, int], gain: float, gain_out: float) -> None:
    """Appendix D.1, with a gain on the stream that is read and on the one that is written."""
    reads, writes = expansion("avg", *size).with_gain(gain), expansion("zero", *size).with_gain(gain_out)
    assert_norm_law(LN, layer, reads, writes)


@LAW
@given(sizes(), GAINS, GAINS)
def test_rms_norm_is_zero_to_zero(size: tuple[int, int], gain: float, gain_out: float) -> None:
    """Appendix E.3."""
    reads, writes = expansion("zero", *size).with_gain(gain), expansion("zero", *size).with_gain(gain_out)
    assert_norm_law(RMS, rms, reads, writes)


@LAW
@given(sizes(), st.sampled_from(["circ", "iso"]), GAINS)
def test_rms_norm_reads_iso(size: tuple[int, int], kind: str, gain: float) -> None:
    """Copies of equal energy, at any size; what is written may be plain copies again."""
    assert_norm_law(RMS, rms, expansion("iso", *size).with_gain(gain), expansion(kind, *size))


@LAW
@given(sizes(), st.sampled_from([(LN, layer, "avg"), (RMS, rms, "zero")]), GAINS)
def test_norm_in_front_of_a_tied_decoder(size: tuple[int, int], which: tuple[Norm, Call, str], gain: float) -> None:
    """The final norm writes the dual of the stream, weight and bias: logits = embedding . final are unchanged."""
    norm, call, kind = which
    stream = expansion(kind, *size).with_gain(gain)
    assert_norm_law(norm, call, stream, stream.dual())
    table = randn(11, size[0], seed=3)
    final = normed(norm, call, stream, stream.dual(), target_eps(norm, stream))
    assert_close(final @ spread(stream, table).T, small_norm(call, size[0]) @ table.T)


@pytest.mark.parametrize(("norm", "call", "kind"), [(LN, layer, "avg"), (RMS, rms, "zero")])
@pytest.mark.parametrize("target", [6, 9])
def test_eta_is_the_square_root(norm: Norm, call: Call, kind: str, target: int) -> None:
    """Erratum 1: eta = sqrt(k n / N). The printed floor(N/n) n/N, without the root, is not lossless."""
    reads, writes = expansion(kind, 4, target), expansion("zero", 4, target)
    assert norm.eta(reads) == math.sqrt(target // 4 * 4 / target)

    class Printed(type(norm)):  # type: ignore[misc]
        def eta(self, reads: Expansion) -> float:
            return reads.target_size // reads.size * reads.size / reads.target_size

    printed = Printed(norm.reads, norm.writes)
    found = normed(printed, call, reads, writes, target_eps(printed, reads))
    assert (found - spread(writes, small_norm(call, 4))).abs().max() > 1e-2


@pytest.mark.parametrize(("norm", "call", "kind"), [(LN, layer, "avg"), (RMS, rms, "zero")])
def test_eps_must_follow(norm: Norm, call: Call, kind: str) -> None:
    """The old eps is wrong at indivisible width, and right with the stream gain 1/eta."""
    reads, writes = expansion(kind, 4, 6), expansion("zero", 4, 6)
    wanted = spread(writes, small_norm(call, 4))
    assert (normed(norm, call, reads, writes, EPS) - wanted).abs().max() > 1e-4
    gained = reads.with_gain(1 / norm.eta(reads))
    assert math.isclose(target_eps(norm, gained), EPS, rel_tol=1e-15)
    assert_close(normed(norm, call, gained, writes, EPS), wanted)


@LAW
@given(sizes())
def test_eps_stays_at_whole_multiples(size: tuple[int, int]) -> None:
    n, target = size
    for norm, kind in ((LN, "avg"), (RMS, "zero")):
        eta = norm.eta(expansion(kind, n, target))
        assert (eta == 1.0) == (target % n == 0)
        assert 0.5 < eta**2 <= 1


@LAW
@given(sizes(), st.sampled_from([(LN, layer, "avg"), (RMS, rms, "zero")]))
def test_identity_mode_drops_the_affine_part(size: tuple[int, int], which: tuple[Norm, Call, str]) -> None:
    """Added Post-LN blocks: weight 1 and bias 0, in the source's terms."""
    norm, call, kind = which
    reads, writes = expansion(kind, *size), expansion("zero", *size)
    found = normed(norm, call, reads, writes, target_eps(norm, reads), mode=IDENTITY)
    bare = call(randn(5, size[0]), torch.ones(size[0]).double(), torch.zeros(size[0]).double(), EPS)
    assert_close(found, spread(writes, bare))


@pytest.mark.parametrize("mode", [SILENT, CANCEL])
@pytest.mark.parametrize(("norm", "kind"), [(LN, "avg"), (RMS, "zero")])
def test_silent_mode_writes_zeros(norm: Norm, kind: str, mode: str) -> None:
    """Res-Post-Norm: the norm that writes the stream is silenced, weight and bias, remainder too."""
    for target in (4, 6, 8):
        typed = Typed(expansion(kind, 4, target), expansion("zero", 4, target), (expansion("zero", 4, target),))
        for suffix in ("weight", "bias"):
            assert not vector(norm.recipe(suffix, typed, mode), randn(4)).any()


def test_remainder_of_a_norm_is_free_and_of_its_bias_zero() -> None:
    """D.4: zeta ~ U(-1, 1) on the weight; the bias is V_zero(b)."""
    typed = Typed(expansion("avg", 4, 7), expansion("zero", 4, 7), (expansion("zero", 4, 7),))
    weight, bias = LN.recipe("weight", typed, KEEP), LN.recipe("bias", typed, KEEP)
    assert isinstance(weight, Vector)
    assert isinstance(bias, Vector)
    assert (weight.fill, bias.fill) == (1.0, 0.0)
    assert bias.factor.tolist() == [1, 1, 1, 1, 0, 0, 0]
    assert weight.factor[4:].tolist() == [0, 0, 0]


@LAW
@given(sizes(), st.sampled_from(["zero", "circ", "rand", "iso"]))
def test_layer_norm_reads_only_whole_copies_and_means(size: tuple[int, int], kind: str) -> None:
    n, target = size
    reads = expansion(kind, n, target)
    if target % n == 0:
        assert_norm_law(LN, layer, reads, expansion("zero", n, target))
        return
    with pytest.raises(Refused, match=rf"LayerNorm reads residual.*from {n} to {target}: .*{(target // n + 1) * n}\b"):
        LN.require(reads, expansion("zero", n, target))


@LAW
@given(sizes(), st.sampled_from(["avg", "circ", "rand"]))
def test_rms_norm_reads_only_equal_energy_and_zeros(size: tuple[int, int], kind: str) -> None:
    n, target = size
    reads = expansion(kind, n, target)
    if target % n == 0:
        assert_norm_law(RMS, rms, reads, expansion("zero", n, target))
        return
    with pytest.raises(Refused, match=rf"RMSNorm reads residual.*from {n} to {target}"):
        RMS.require(reads, expansion("zero", n, target))


def test_layer_norm_refuses_amplitudes() -> None:
    reads = replace(expansion("circ", 2, 4), amp=np.array([1.0, 1.0, 0.5, 0.5]))
    with pytest.raises(Refused, match=r"LayerNorm.*copies, all as often, or the mean"):
        LN.require(reads, expansion("zero", 2, 4))


@pytest.mark.parametrize("kind", ["avg", "circ", "rand"])
def test_norm_writes_zeros_beside_copies(kind: str) -> None:
    """A LayerNorm cannot write means: its remainder is 0, so at 4 -> 6 it cannot feed an avg stream."""
    with pytest.raises(
        Refused, match=r"6 is not a multiple of 4, which the size of normed must be, .*LayerNorm.*: try 8"
    ):
        LN.require(expansion("avg", 4, 6), expansion(kind, 4, 6))
    LN.require(expansion("avg", 4, 8), expansion(kind, 4, 8))


# ----------------------------------------------------------------- BatchNorm


@LAW
@given(sizes(), st.booleans())
def test_batch_norm(size: tuple[int, int], training: bool) -> None:
    """Per channel, so copies give copies: outputs, and the running statistics after a step in train mode."""
    channels, row = expansion("circ", *size), batch_norm("inner -> inner")
    row.require(channels, channels)
    typed = Typed(channels, channels, (channels,))
    n, names = size[0], ("running_mean", "running_var", "weight", "bias")
    assert {*names, "num_batches_tracked"} == set(row.tensors())
    small = {name: randn(n, seed=i) for i, name in enumerate(names)}
    small["running_var"] = small["running_var"] ** 2 + 0.5
    large = {name: vector(row.recipe(name, typed, KEEP), small[name]) for name in names}
    x = randn(4, n, 3, 3, seed=9)
    wanted = F.batch_norm(x, **small, training=training, eps=EPS)
    assert_close(F.batch_norm(spread(channels, x, 1), **large, training=training, eps=EPS), spread(channels, wanted, 1))
    for name in ("running_mean", "running_var"):
        assert_close(large[name], spread(channels, small[name]))


def test_batch_norm_modes_and_refusal() -> None:
    channels, row = expansion("circ", 4, 6), batch_norm("inner -> sum")
    typed = Typed(channels, channels, (channels,))
    for mode in (SILENT, CANCEL):
        for suffix in ("weight", "bias"):
            assert not vector(row.recipe(suffix, typed, mode), randn(4)).any()
        assert_close(vector(row.recipe("running_var", typed, mode), randn(4)), spread(channels, randn(4)))
    count = row.recipe("num_batches_tracked", typed, KEEP)
    assert isinstance(count, Vector)
    assert count.expansion.is_identity
    with pytest.raises(Refused, match="inner and sum would grow differently"):
        row.require(channels, expansion("circ", 4, 7))


# ----------------------------------------------------------------- compositions

PRESET = st.sampled_from(list(PRESETS.values()))
KIND = st.sampled_from(["avg", "zero", "circ", "iso"])


def affine(row: Row, spaces: dict[str, Expansion], free: Free, seed: int) -> tuple[tuple[Tensor, Tensor], ...]:
    """Weight and bias of a linear row, small and expanded."""
    one = {name: identity(e.size) for name, e in spaces.items()}
    shape = [product(*(one[a] for a in s.axes)).size for s in (row.writes, row.reads)]
    weight, bias = randn(*shape, seed=seed), randn(shape[0], seed=seed + 1)
    return (weight, bias), (grow(row, "weight", weight, spaces, free), grow(row, "bias", bias, spaces, free))


ACTS = {"gelu": F.gelu, "silu": F.silu, "relu": F.relu}


@LAW
@pytest.mark.parametrize("act", ACTS)
@given(reads=sizes(), hidden=sizes(), writes=KIND, free=PRESET, gain=GAINS)
def test_mlp(act: str, reads: tuple[int, int], hidden: tuple[int, int], writes: str, free: Free, gain: float) -> None:
    """Proposition: (zero, avg), or any other stream: fc2(act(fc1(x)))."""
    spaces = {
        "normed": expansion("zero", *reads),
        "hidden": expansion("circ", *hidden),
        "residual": expansion(writes, *reads).with_gain(gain),
    }
    small1, large1 = affine(linear("normed -> hidden"), spaces, free, 1)
    small2, large2 = affine(linear("hidden -> residual"), spaces, free, 3)
    x = randn(5, reads[0])
    wanted = F.linear(ACTS[act](F.linear(x, *small1)), *small2)
    found = F.linear(ACTS[act](F.linear(spread(spaces["normed"], x), *large1)), *large2)
    assert_close(found, spread(spaces["residual"], wanted))


@LAW
@given(reads=sizes(), hidden=sizes(), free=PRESET)
def test_gated_mlp(reads: tuple[int, int], hidden: tuple[int, int], free: Free) -> None:
    """down(silu(gate x) * up x): the product of copies is a copy."""
    spaces = {"stream": expansion("zero", *reads), "hidden": expansion("circ", *hidden)}
    gate, gate_ = affine(linear("stream -> hidden"), spaces, free, 1)
    up, up_ = affine(linear("stream -> hidden"), spaces, free, 3)
    down, down_ = affine(linear("hidden -> stream"), spaces, free, 5)

    def mlp(x: Tensor, *layers: tuple[Tensor, Tensor]) -> Tensor:
        return F.linear(F.silu(F.linear(x, *layers[0])) * F.linear(x, *layers[1]), *layers[2])

    x = randn(5, reads[0])
    assert_close(mlp(spread(spaces["stream"], x), gate_, up_, down_), spread(spaces["stream"], mlp(x, gate, up, down)))


def test_means_do_not_pass_a_nonlinearity() -> None:
    """Why the check keeps means from nonlinearities: act(mean) is not the mean of act."""
    spaces = {"stream": expansion("zero", 4, 4), "hidden": expansion("avg", 4, 6)}
    small1, large1 = affine(linear("stream -> hidden"), spaces, PRESETS["vision"], 1)
    x = randn(5, 4)
    found = F.gelu(F.linear(x, *large1))
    assert (found - spread(spaces["hidden"], F.gelu(F.linear(x, *small1)))).abs().max() > 1e-2


def attention(x: Tensor, layers: list[tuple[Tensor, Tensor]], head_dim: int) -> Tensor:
    """Multi-head attention as models call it: projections, heads, torch's kernel, output projection."""
    q, k, v = (F.linear(x, *layer).unflatten(-1, (-1, head_dim)).transpose(1, 2) for layer in layers[:3])
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return F.linear(mixed.transpose(1, 2).flatten(2), *layers[3])


@LAW
@given(
    width=sizes(),
    kv=st.integers(1, 3),
    more_kv=st.integers(0, 5),
    group=st.integers(1, 3),
    more_group=st.integers(0, 2),
    writes=KIND,
    free=PRESET,
)
def test_attention(
    width: tuple[int, int], kv: int, more_kv: int, group: int, more_group: int, writes: str, free: Free
) -> None:
    """Proposition: (zero, avg); also grouped, where queries stand under copies of their own key-value head."""
    keys = expansion("circ", kv, kv + more_kv)
    least = -(-group // int(keys.copies.min()))
    queries = grouped_expansion(kv * group, keys.target_size * (least + more_group), keys, "circ")
    spaces = {
        "normed": expansion("zero", *width),
        "queries": queries,
        "keys": keys,
        "dim": identity(4),
        "residual": expansion(writes, *width),
    }
    rows = ["normed -> (queries dim)", "normed -> (keys dim)", "normed -> (keys dim)", "(queries dim) -> residual"]
    pairs = [affine(linear(row), spaces, free, 2 * i) for i, row in enumerate(rows)]
    x = randn(2, 5, width[0])
    wanted = attention(x, [small for small, _ in pairs], 4)
    found = attention(spread(spaces["normed"], x), [large for _, large in pairs], 4)
    assert_close(found, spread(spaces["residual"], wanted))


@LAW
@given(reads=sizes(), writes=sizes(), kinds=st.tuples(KIND, KIND), free=PRESET, kernel=st.sampled_from([1, 3]))
def test_convolution(
    reads: tuple[int, int], writes: tuple[int, int], kinds: tuple[str, str], free: Free, kernel: int
) -> None:
    """Appendix E.4: the sum over copies runs over input channels, at every offset of the kernel."""
    spaces = {"inner": expansion(kinds[0], *reads), "sum": expansion(kinds[1], *writes)}
    row, weight, bias = conv("inner -> sum"), randn(writes[0], reads[0], kernel, kernel), randn(writes[0])
    grown, grown_bias = grow(row, "weight", weight, spaces, free), grow(row, "bias", bias, spaces, free)
    assert grown.shape == (writes[1], reads[1], kernel, kernel)
    x = randn(2, reads[0], 5, 5)
    wanted = F.conv2d(x, weight, bias, padding=1)
    assert_close(
        F.conv2d(spread(spaces["inner"], x, 1), grown, grown_bias, padding=1), spread(spaces["sum"], wanted, 1)
    )


@LAW
@given(reads=sizes(), writes=sizes(), kinds=st.tuples(KIND, KIND), free=PRESET)
def test_transposed_weights(
    reads: tuple[int, int], writes: tuple[int, int], kinds: tuple[str, str], free: Free
) -> None:
    """A Conv1D keeps (in, out): the same recipe as the Linear, marked to be turned round."""
    spaces = {"a": expansion(kinds[0], *reads), "b": expansion(kinds[1], *writes)}
    row, weight = linear("a -> b", transposed=True), randn(reads[0], writes[0])
    typed = Typed(spaces["a"], spaces["b"], (spaces["a"], spaces["b"]))
    how = row.recipe("weight", typed, KEEP)
    assert isinstance(how, Matrix)
    assert how.transposed
    assert how.consumes
    assert (how.rows.target_size, how.columns.target_size) == (writes[1], reads[1])
    grown = grow(row, "weight", weight, spaces, free)
    assert grown.shape == (reads[1], writes[1])
    x = randn(5, reads[0])
    assert_close(spread(spaces["a"], x) @ grown, spread(spaces["b"], x @ weight))


@LAW
@given(size=sizes(), kind=KIND, free=PRESET)
def test_tables_and_tokens(size: tuple[int, int], kind: str, free: Free) -> None:
    """Embeddings, position tables, class tokens: every vector in them is V(x)."""
    spaces = {"residual": expansion(kind, *size)}
    table = randn(6, size[0])
    assert_close(grow(embedding("6 -> residual"), "weight", table, spaces, free), spread(spaces["residual"], table))
    tokens = randn(1, 6, size[0])
    row = parameter("1 _ residual")
    assert_close(grow(row, "", tokens, spaces, free), spread(spaces["residual"], tokens))
    per_unit = randn(size[0], 1, 1)
    grown = grow(parameter("residual 1 1"), "", per_unit, spaces, free)
    assert_close(grown, spread(spaces["residual"], per_unit, 0))


def test_fused_query_key_value() -> None:
    """(3 heads head_dim): three blocks of whole heads, each expanded."""
    spaces = {"normed": identity(4), "heads": expansion("circ", 2, 3)}
    weight = torch.arange(12.0).double()[:, None].expand(12, 4).contiguous()
    grown = grow(linear("normed -> (3 heads 2)"), "weight", weight, spaces, PRESETS["vision"])
    assert grown[:, 0].tolist() == [0, 1, 2, 3, 0, 1, 4, 5, 6, 7, 4, 5, 8, 9, 10, 11, 8, 9]


@pytest.mark.parametrize("suffix", ["weight", "bias"])
def test_added_blocks_write_nothing(suffix: str) -> None:
    """Erratum 10: in an added block the bias of what writes the stream is zero too, of either type."""
    spaces = {"hidden": expansion("circ", 4, 6), "residual": expansion("avg", 4, 6)}
    row = linear("hidden -> residual")
    tensor = randn(4, 4) if suffix == "weight" else randn(4)
    assert not grow(row, suffix, tensor, spaces, PRESETS["vision"], SILENT).any()
    cancelled = grow(row, suffix, tensor, spaces, PRESETS["vision"], CANCEL)
    assert cancelled.any() == (suffix == "weight")
    if suffix == "weight":
        assert not (cancelled @ spread(spaces["hidden"], torch.eye(4).double()).T).any()


def test_unbiased_modules_keep_their_weights() -> None:
    """A module that is given zeros and must write zeros: the weights stay, what is added goes."""
    spaces = {"hidden": expansion("circ", 4, 6), "residual": expansion("avg", 4, 6)}
    row, weight, free = linear("hidden -> residual"), randn(4, 4), PRESETS["vision"]
    assert torch.equal(grow(row, "weight", weight, spaces, free, UNBIASED), grow(row, "weight", weight, spaces, free))
    assert not grow(row, "bias", randn(4), spaces, free, UNBIASED).any()
    typed = Typed(expansion("avg", 4, 6), expansion("zero", 4, 6), (expansion("zero", 4, 6),))
    kept, plain = (vector(LN.recipe("weight", typed, mode), randn(4)) for mode in (UNBIASED, KEEP))
    assert torch.equal(kept, plain)
    assert not vector(LN.recipe("bias", typed, UNBIASED), randn(4)).any()


def test_norm_of_an_unchecked_method_is_copied() -> None:
    """Where nothing was proved there is no eta: the weight is copied as it is."""
    typed = Typed(expansion("circ", 4, 6), expansion("circ", 4, 6), (expansion("circ", 4, 6),), exact=False)
    assert torch.equal(vector(LN.recipe("weight", typed, KEEP), randn(4)), spread(expansion("circ", 4, 6), randn(4)))


# ----------------------------------------------------------------- rows and signatures


def test_signatures() -> None:
    assert parse("a -> (3 b c)") == (Side((("a",),)), Side((("3", "b", "c"),)))
    assert side("(a b) + c by d") == Side((("a", "b"), ("c",)), by=("d",))
    assert side("a + a").axes == ("a", "a")
    assert str(side("(a b) + c by d")) == "(a b) + c by d"
    for wrong in ("a +", "a + b by", "a by", "a + b by c d", "+", "(a + b)"):
        with pytest.raises(ValueError, match="not a side"):
            side(wrong)
    assert str(side("(a b)")) == "(a b)"
    assert str(side("a")) == "a"
    for wrong in ("a", "a -> b -> c", "-> b", "a -> (b", "a b -> c", "a -> ()", "a -> b,c"):
        with pytest.raises(ValueError, match="not a"):
            parse(wrong)


def test_rows_say_what_is_on_disk() -> None:
    assert list(linear("a -> b").tensors()) == ["weight", "bias"]
    assert [axis.role for axis in linear("a -> b").tensors()["weight"]] == ["w", "r"]
    assert [axis.role for axis in linear("a -> b", transposed=True).tensors()["weight"]] == ["r", "w"]
    assert [axis.role for axis in conv("a -> b").tensors()["weight"]] == ["w", "r", ".", "."]
    assert [axis.role for axis in conv("a -> b", kernel=1).tensors()["weight"]] == ["w", "r", "."]
    assert list(LN.tensors()) == ["weight", "bias"]
    assert linear("a -> b", tied="e").optional
    assert not linear("a -> b").optional
    assert dropped().optional
    assert isinstance(LN, LayerNorm)
    assert isinstance(RMS, RMSNorm)
