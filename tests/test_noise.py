"""Noise has the stated law, and belongs to (seed, name, part) alone."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from lemonx import noise

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
SIZE = 1 << 20


@pytest.fixture(autouse=True)
def one_torch_thread():
    """Blocks this small lose more to waiting threads than they gain."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def draw(dtype: torch.dtype, std: float = 1.0, size: int = SIZE, key: tuple[int, str, int] = (0, "w", 0)):
    return noise.normal(torch.empty(size, dtype=dtype), std, noise.generator(*key))


def assert_bits_equal(a: torch.Tensor, b: torch.Tensor) -> None:
    assert a.dtype == b.dtype
    assert a.shape == b.shape
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    assert torch.equal(a.contiguous().view(kind), b.contiguous().view(kind))


def kolmogorov(values: torch.Tensor) -> float:
    """sup |F_n - Phi|, at both sides of each jump; ties (rounding) count as one jump."""
    points, counts = values.double().sort().values.unique_consecutive(return_counts=True)
    above = counts.cumsum(0) / counts.sum()
    phi = torch.special.ndtr(points)
    return float(torch.maximum((above - phi).abs(), (above - counts / counts.sum() - phi).abs()).max())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("std", [1.0, 0.02])
def test_normal_moments(dtype, std):
    z = draw(dtype, std).double() / std
    n = len(z)
    # Five standard errors, and 2e-5 for what the table's variance may miss after rounding.
    assert abs(z.mean()) < 5 / n**0.5
    assert abs(z.square().mean() - 1) < 5 * (2 / n) ** 0.5 + 2e-5
    assert abs(z.pow(3).mean()) < 5 * (15 / n) ** 0.5
    assert abs(z.pow(4).mean() - 3) < 5 * (96 / n) ** 0.5 + 1e-3


@pytest.mark.parametrize("dtype", DTYPES)
def test_normal_distribution(dtype):
    # Rounding moves a value by at most half a spacing, |z| eps / 2, and so the law by |z| phi(z) eps / 2.
    rounding = 0.242 * torch.finfo(dtype).eps / 2
    # The statistic of Kolmogorov exceeds 2.3 / sqrt(n) with probability 5e-5; the table is 1.1e-5 off.
    assert kolmogorov(draw(dtype)) < 2.3 / SIZE**0.5 + 1.1e-5 + rounding


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lag", [1, 2, 3, 8, 1024])
def test_neighbours_are_uncorrelated(dtype, lag):
    z = draw(dtype).double()
    n = len(z) - lag
    assert abs((z[lag:] * z[:-lag]).mean()) < 5 / n**0.5
    square = (z.square() - 1) / 2**0.5
    assert abs((square[lag:] * square[:-lag]).mean()) < 5 / n**0.5 + 2.2e-4


def test_table_is_as_documented():
    q = noise.quantiles()
    assert torch.equal(q, -q.flip(0))
    assert abs(q.square().mean() - 1) < 1e-12
    assert 4.3249 < q.max() < 4.3251
    assert abs(q.pow(4).mean() - 2.9992) < 1e-4
    assert kolmogorov(q) < 1.05e-5
    for dtype in noise.HALF:
        pairs = torch.from_numpy(noise.pair_table(dtype, 1.0)).view(dtype).view(-1, 2).double()
        rounded = q.to(dtype).double()
        for side in pairs.unbind(1):
            assert torch.equal(side.sort().values, rounded)
            assert abs(side.square().mean() - 1) < 1e-5
        assert abs(pairs.prod(1).mean()) < 1e-12
        assert abs((pairs.square() - 1).prod(1).mean() / 2) < 2.2e-4


def test_table_is_a_net():
    """Each box of 2^-a x 2^-(16-a) holds one point (i, j), so the pairs fill the square evenly."""
    q = noise.quantiles()
    pairs = torch.from_numpy(noise.pair_table(torch.float16, 1.0)).view(torch.float16).view(-1, 2)
    i = torch.arange(65536)
    j = torch.tensor([int(f"{n:016b}"[::-1], 2) ^ 0x5555 for n in range(65536)])
    assert torch.equal(pairs, torch.stack([q[i], q[j]], 1).half())
    for a in range(17):
        assert len(((i >> (16 - a)) * 2 ** (16 - a) + (j >> a)).unique()) == 65536


@pytest.mark.parametrize("dtype", noise.HALF)
def test_table_does_not_overflow(dtype):
    assert torch.isfinite(draw(dtype, torch.finfo(dtype).max, 4096)).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(7,), (0,), (1, 1), (5, 33), (64, 4096), (3, 140_001), (0, 8), (2, 3, 4, 5)])
def test_strides_do_not_matter(dtype, shape):
    dense = noise.normal(torch.empty(shape, dtype=dtype), 0.5, noise.generator(1, "x", 2))
    assert torch.isfinite(dense).all()
    if len(shape) == 2:
        for start in (0, 1):
            wide = torch.zeros(shape[0], shape[1] + 4, dtype=dtype)
            here = wide[:, start : start + shape[1]]
            noise.normal(here, 0.5, noise.generator(1, "x", 2))
            assert_bits_equal(here, dense)
            assert not wide[:, :start].any()
            assert not wide[:, start + shape[1] :].any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_do_not_matter(dtype):
    keys = [(3, f"layer.{i % 4}", i) for i in range(8)]
    alone = [draw(dtype, 0.1, 150_001, key) for key in keys]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda key: draw(dtype, 0.1, 150_001, key), reversed(keys)))
    for a, b in zip(alone, reversed(together), strict=True):
        assert_bits_equal(a, b)


@pytest.mark.parametrize("other", [(1, "w", 0), (0, "v", 0), (0, "w", 1), (0, "w/0", 0)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_keys_are_independent(dtype, other):
    size = 1 << 18
    a, b = draw(dtype, size=size).double(), draw(dtype, size=size, key=other).double()
    assert abs((a * b).mean()) < 5 / size**0.5


def test_key_parts_are_told_apart():
    keys = [(1, "2/x", 3), (1, "x", 3), (12, "x", 3), (1, "x", 32), (1, "3/x", 2), (1, "", 3), (-1, "x", 3)]
    assert len({noise.generator(*key).bit_generator.random_raw() for key in keys}) == len(keys)


@pytest.mark.parametrize("dtype", DTYPES)
def test_uniform(dtype):
    u = noise.uniform(torch.empty(1 << 16, dtype=dtype), 2.0, noise.generator(0, "norm", 0)).double()
    assert u.abs().max() <= 2
    # Variance bound^2 / 3 = 4/3, that of the square bound^4 * 4 / 45; rounding to bf16 is far below both.
    assert abs(u.mean()) < 5 * (4 / 3 / len(u)) ** 0.5
    assert abs(u.square().mean() - 4 / 3) < 5 * (64 / 45 / len(u)) ** 0.5


def test_zero_std_and_bad_dtype():
    assert not noise.normal(torch.ones(3, 5), 0.0, noise.generator(0, "w", 0)).any()
    with pytest.raises(TypeError, match="int32"):
        noise.normal(torch.ones(3, dtype=torch.int32), 1.0, noise.generator(0, "w", 0))


def test_sfc64_stream_is_pinned():
    """The files that a seed writes must not change unnoticed."""
    words = noise.generator(0, "model.embed_tokens.weight", 0).bit_generator.random_raw(2)
    assert np.array_equal(words, PINNED)


PINNED = np.array([13766890640425175404, 11595123944097376206], dtype=np.uint64)
