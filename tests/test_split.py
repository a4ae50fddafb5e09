"""The copies of a weight sum to the weight: exactly in bf16 and fp16."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from lemonx.execution import compiled, kernels, noise
from lemonx.execution.exact_split import split_columns

HALF = [torch.bfloat16, torch.float16]
WIDTH = 256


@pytest.fixture(autouse=True)
def seeded_and_one_torch_thread(loops: str):
    """Blocks this small lose more to waiting threads than they gain."""
    torch.manual_seed(0)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def every_finite(dtype: torch.dtype) -> torch.Tensor:
    """All finite numbers of the dtype, both zeros and the subnormal ones among them, as rows of 256."""
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    return values[torch.isfinite(values)].view(-1, WIDTH)


def copies(w: torch.Tensor, k: int, share: float, std: float, part: int = 0) -> torch.Tensor:
    """The k copies of w, as k x rows x columns."""
    rows, width = w.shape
    out = torch.full((rows, k * width), float("nan"), dtype=w.dtype)
    out[:, :width] = w
    runs = [(c * width, 0, width) for c in range(1, k)]
    split_columns(out, runs, share, std, noise.generator(0, "w", part))
    return out.view(rows, k, width).transpose(0, 1)


def assert_exact_sum(parts: torch.Tensor, w: torch.Tensor) -> None:
    assert torch.isfinite(parts).all()
    wide = parts.double()
    # Copies within a factor of 2^40 of one another have 11 bits each, so float64 adds them exactly.
    large, small = wide.abs().amax(0), wide.abs().where(wide != 0, torch.inf).amin(0)
    assert (large <= 2.0**40 * small).all()
    assert torch.equal(wide.sum(0), w.double())


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("k", [2, 3, 4])
@pytest.mark.parametrize("even", [False, True])
def test_every_number_is_split_exactly(dtype, k, even):
    w = every_finite(dtype)
    # From below the subnormal numbers to the largest: nothing may overflow.
    for part, std in enumerate([0.0, 1e-39, 1e-7, 1e-3, 0.02, 1.0, 20.0, 6e4, float(torch.finfo(dtype).max)]):
        assert_exact_sum(copies(w, k, 1 / k if even else 0.0, std, part), w)


@pytest.mark.parametrize("dtype", HALF)
def test_adversarial_phi(dtype):
    """For one weight of each binade and all its significands, phi of nearly its size, both signs."""
    for exponent in (-14, -3, 0, 9, 15):
        binade = 2.0**exponent * (1 + torch.arange(0, 1, torch.finfo(dtype).eps, dtype=torch.float64))
        w = torch.cat([binade, -binade]).to(dtype).repeat(16).view(-1, WIDTH)
        for part, std in enumerate([0.3, 0.7, 1.0, 3.0]):
            assert_exact_sum(copies(w, 2, 0.5, std * 2.0**exponent, part), w)
            assert_exact_sum(copies(w, 3, 0.0, std * 2.0**exponent, part), w)


@pytest.mark.parametrize("dtype", HALF)
def test_zero_gives_zeros(dtype):
    w = torch.tensor([[0.0, -0.0] * 8], dtype=dtype)
    assert not copies(w, 3, 1 / 3, 0.02).any()


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(("k", "even"), [(2, False), (2, True), (4, False), (4, True)])
def test_copies_are_what_was_wanted(dtype, k, even):
    """Where |phi| < |w|, copies are share * w + phi within the spacing of w, and phi has its variance."""
    share, std, size = 1 / k if even else 0.0, 0.01, 1 << 16
    w = (torch.rand(64, size // 64) * 0.5 + 0.5).mul_(4).to(dtype)
    phi = copies(w, k, share, std)[1:].double() - share * w.double()
    phi_rounded = std**2 + (2 * torch.finfo(dtype).eps) ** 2  # w < 4, so a spacing is at most 2 eps
    assert phi.abs().max() < 4.4 * std + 4 * torch.finfo(dtype).eps
    assert phi.mean().abs() < 5 * (phi_rounded / phi.numel()) ** 0.5
    assert std**2 * 0.98 < phi.square().mean() < phi_rounded
    assert abs((phi[0] * phi[-1]).mean()) < 5 * phi_rounded / size**0.5 or k == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("share", [0.0, 1 / 3])
def test_plain_dtypes(dtype, share):
    w, std = torch.randn(32, 512, dtype=dtype), 0.02
    parts = copies(w, 3, share, std)
    bound = 4 * torch.finfo(dtype).eps * (w.abs().max() + 1)
    assert (parts.sum(0) - w).abs().max() < bound
    for v in parts[1:]:
        phi = (v - share * w).double()
        assert abs(phi.square().mean() / std**2 - 1) < 5 * (2 / phi.numel()) ** 0.5


@pytest.mark.parametrize("dtype", HALF)
def test_runs(dtype):
    """Units with two and three copies in one weight: other columns stay, rows need not be contiguous."""
    whole = torch.randn(37, 64).to(dtype)
    out, before = whole[:, 2:62], whole[:, 2:62].clone()
    split_columns(out, [(20, 4, 10), (33, 7, 7), (40, 4, 3)], 0.25, 0.05, noise.generator(0, "w", 0))
    total = out[:, 4:14].double() + out[:, 20:30].double()
    total[:, 3:] += out[:, 33:40].double()
    total[:, :3] += out[:, 40:43].double()
    assert torch.equal(total, before[:, 4:14].double())
    untouched = [c for c in range(60) if not (4 <= c < 14 or 20 <= c < 30 or 33 <= c < 43)]
    assert torch.equal(out[:, untouched], before[:, untouched])
    assert not torch.equal(out[:, 4:14], before[:, 4:14])


@pytest.mark.parametrize("dtype", [*HALF, torch.float32])
def test_threads_do_not_matter(dtype):
    w = torch.randn(40, 9001).to(dtype)
    alone = [copies(w, 3, 1 / 3, 0.02, part) for part in range(4)]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda part: copies(w, 3, 1 / 3, 0.02, part), range(4)))
    for a, b in zip(alone, together, strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(alone[0], alone[1])


def test_nothing_to_do():
    out = torch.ones(3, 4)
    assert torch.equal(split_columns(out, [], 0.5, 0.1, noise.generator(0, "w", 0)), torch.ones(3, 4))
    empty = torch.ones(0, 4, dtype=torch.bfloat16)
    assert split_columns(empty, [(2, 0, 2)], 0.5, 0.1, noise.generator(0, "w", 0)).shape == (0, 4)


@pytest.mark.parametrize("width", [1, 7, 256, 1001])
@pytest.mark.parametrize("std", [0.0, 1e-39, 0.02, 1e30])
def test_compiled_loops_write_the_same_bytes(width: int, std: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers of all sizes, both zeros and subnormal ones; the noise next to them too."""
    values = every_finite(torch.bfloat16).view(-1)
    rows = values[: len(values) // width * width].view(-1, width)
    found = []
    for loops in (None, compiled):
        monkeypatch.setattr(kernels, "_loaded", loops)
        found.append(copies(rows, 3, 0.0, std).contiguous().view(torch.int16))
    assert torch.equal(*found)
