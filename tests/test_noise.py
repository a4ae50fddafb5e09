"""Noise has the stated law, and belongs to (seed, name, part) alone."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from lemonx.execution import noise

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
SIZE = 1 << 20


@pytest.fixture(autouse=True)
def one_torch_thread(loops: str):
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
    # The statistic of Kolmogorov exceeds 2.3 / sqrt(n) with probability 5e-5; the table is 1e-5 off.
    assert kolmogorov(draw(dtype)) < 2.3 / SIZE**0.5 + 1e-5 + rounding


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lag", [1, 2, 3, 8, 1024])
def test_neighbours_are_uncorrelated(dtype, lag):
    z = draw(dtype).double()
    n = len(z) - lag
    assert abs((z[lag:] * z[:-lag]).mean()) < 5 / n**0.5
    square = (z.square() - 1) / 2**0.5
    assert abs((square[lag:] * square[:-lag]).mean()) < 5 / n**0.5


def test_cuts_are_as_documented():
    cuts = noise.cuts()
    low, high = cuts[:-1], cuts[1:]
    assert torch.equal(cuts, -cuts.flip(0))
    assert (low < high).all()
    assert torch.allclose(torch.special.ndtr(cuts[1:-1]), torch.arange(1, 65536).double() / 65536, rtol=0, atol=1e-14)
    assert abs(cuts[-1] - 4.5793) < 1e-4
    # Moments of a variable that is uniform within each cell.
    assert abs(((high**3 - low**3) / (high - low) / 3).mean() - 1) < 1e-11
    assert abs(((high**5 - low**5) / (high - low) / 5).mean() - 2.9999) < 1e-4
    # Inside a cell the distribution function is a straight line: its distance to the normal one, on a grid.
    for u in torch.linspace(0, 1, 17, dtype=torch.float64):
        off = (torch.arange(65536, dtype=torch.float64) + u) / 65536 - torch.special.ndtr(low + u * (high - low))
        assert off.abs().max() < 2.4e-6


def test_middles_are_as_documented():
    middle = (noise.cuts()[1:] + noise.cuts()[:-1]) / 2
    assert abs(middle.square().mean() - 1) < 6e-7
    assert abs(middle.pow(4).mean() - 2.9998) < 1e-4
    assert abs(middle.max() - 4.3744) < 1e-4
    assert kolmogorov(middle) < 9.2e-6
    for dtype in noise.HALF:
        for table in pairs(dtype, 0.5):
            assert torch.equal(table.sort().values, (middle * 0.5).to(dtype))
            assert abs(table.double().square().mean() * 4 - 1) < 2e-5


def pairs(dtype: torch.dtype, std: float) -> tuple[torch.Tensor, ...]:
    return torch.from_numpy(noise.middles(dtype, std)).view(dtype).view(65536, 2).unbind(1)


def test_the_numbers_of_a_pair_are_as_good_as_independent():
    a, b = (number.double() for number in pairs(torch.float16, 1.0))
    # By how much each joint moment is off, in standard deviations of its product.
    for moment, spread in (
        (a * b, 1),
        (a * b * b, 3**0.5),
        (a * a * b, 3**0.5),
        (a**3 * b, 15**0.5),
        (a * b**3, 15**0.5),
    ):
        assert abs(moment.mean()) / spread < 1e-4
    assert abs(((a * a - 1) * (b * b - 1)).mean()) / 2 < 1e-4


def test_places_are_as_documented():
    """float32: up to half of the narrowest cell from a middle, and evenly so."""
    middle = torch.from_numpy(noise.middles(torch.float32, 1.0)).view(torch.float32).double().unique()
    width = noise.narrowest()
    assert width == pytest.approx(float(noise.cuts().diff().min()), rel=1e-9)
    z = draw(torch.float32).double()
    after = torch.searchsorted(middle, z).clamp(1, len(middle) - 1)
    off = torch.minimum((z - middle[after - 1]).abs(), (z - middle[after]).abs())
    spacing = z.abs() * torch.finfo(torch.float32).eps  # of the sum, and of the middle
    assert (off <= width / 2 + spacing).all()
    # Uniform in (0, width / 2): five standard errors; cells that touch are told apart by the nearer middle.
    assert abs(off.mean() / width - 1 / 4) < 5 / (48 * SIZE) ** 0.5 + 1e-3


def test_float32_is_fine_grained():
    """Unlike the table's 65536 values, nearly all of a million draws are different numbers."""
    z = draw(torch.float32)
    assert len(z.unique()) > 0.97 * SIZE
    assert 4.2 < z.abs().max() < 4.38


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


def test_streams_are_pinned():
    """The files that a seed writes must not change unnoticed, nor from one machine to another."""
    words = noise.generator(0, "model.embed_tokens.weight", 0).bit_generator.random_raw(2)
    assert np.array_equal(words, np.array([13859476426803961854, 626874286205505226], dtype=np.uint64))
    for dtype, pinned in PINNED.items():
        drawn = noise.as_numpy(draw(dtype, 0.02, 100_003))
        assert hashlib.sha256(drawn.tobytes()).hexdigest()[:16] == pinned


PINNED = {torch.bfloat16: "01f5aa3b017bbe01", torch.float16: "05b7a136ff9f3b6f", torch.float32: "a4c9a90acedc0b16"}
