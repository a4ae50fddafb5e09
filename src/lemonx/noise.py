"""Seeded noise: N(0, std^2) and U(-bound, bound), written in the dtype of the tensor.

A generator belongs to (seed, tensor name, chunk number), so threads, the order of work and the layout of
shards do not change a result. What a generator writes depends on the shape and dtype of the tensor, not on
its strides.

float64 and float32 take numpy's ziggurat. bf16 and fp16 take a table, for speed: the law is stated in
`quantiles` and `pair_table`, and rests on the raw bits of SFC64 only.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from functools import lru_cache, partial

import numpy as np
import torch

# Normals per call. Smaller pays for the calls, larger leaves the caches: measured, and flat around here.
CHUNK = 1 << 17

HALF = (torch.bfloat16, torch.float16)


class Scratch(threading.local):
    """One growing buffer per thread and slot: fresh memory costs page faults, reused memory does not."""

    def __init__(self) -> None:
        self._buffers: dict[str, np.ndarray] = {}

    def get(self, slot: str, size: int, dtype: type) -> np.ndarray:
        """A vector with undefined contents, valid until its slot is asked for again; one dtype per slot."""
        buffer = self._buffers.get(slot)
        if buffer is None or buffer.size < size or buffer.dtype != dtype:
            buffer = self._buffers[slot] = np.empty(size, dtype)
        return buffer[:size]


_scratch = Scratch()


def generator(seed: int, name: str, part: int) -> np.random.Generator:
    """The generator of chunk `part` of tensor `name`: SFC64 keyed by the SHA-256 of all three.

    >>> int(generator(0, "a", 0).integers(1000)) == int(generator(0, "a", 0).integers(1000))
    True
    """
    key = hashlib.sha256(f"{seed}/{part}/{name}".encode()).digest()
    return np.random.Generator(np.random.SFC64(int.from_bytes(key, "little")))


def normal(out: torch.Tensor, std: float, rng: np.random.Generator) -> torch.Tensor:
    """Fill `out` with N(0, std^2): exact laws in float64 and float32, that of `pair_table` in bf16 and fp16.

    `out` may be a view whose rows are contiguous, such as a block of columns.
    """
    if std == 0.0:
        return out.zero_()
    draw = _draw(out.dtype, std, rng)
    rows = as_numpy(out if out.dim() == 2 else out.view(1, -1))
    count, width = rows.shape
    step = max(1, CHUNK // max(1, width))
    for start in range(0, count, step):
        block = rows[start : start + step]
        if block.flags.c_contiguous:
            draw(block.reshape(-1))
        else:
            dense = _scratch.get("dense", block.size, rows.dtype.type)
            draw(dense)
            block[...] = dense.reshape(block.shape)
    return out


def as_numpy(tensor: torch.Tensor) -> np.ndarray:
    """The memory of the tensor: as int16 for bf16 and fp16. Views and slices are cheaper in numpy."""
    return (tensor.view(torch.int16) if tensor.dtype in HALF else tensor).numpy()


def uniform(out: torch.Tensor, bound: float, rng: np.random.Generator) -> torch.Tensor:
    """Fill `out` with U(-bound, bound), drawn in float64, rounded once. Meant for vectors: not chunked."""
    values = rng.random(tuple(out.shape))
    return out.copy_(torch.from_numpy(np.asarray(values * (2.0 * bound) - bound)))


def _draw(dtype: torch.dtype, std: float, rng: np.random.Generator) -> Callable[[np.ndarray], None]:
    """The function that fills a contiguous vector; bf16 and fp16 are seen as int16."""
    if dtype in HALF:
        return partial(_draw_pairs, table=pair_table(dtype, std), rng=rng)
    if dtype in (torch.float32, torch.float64):
        return partial(_draw_ziggurat, std=std, rng=rng)
    raise TypeError(f"no noise for {dtype}: use bfloat16, float16, float32 or float64")


def _draw_ziggurat(out: np.ndarray, std: float, rng: np.random.Generator) -> None:
    rng.standard_normal(dtype=out.dtype.type, out=out)
    np.multiply(out, std, out=out)


def _draw_pairs(out: np.ndarray, table: np.ndarray, rng: np.random.Generator) -> None:
    for start in range(0, out.size, CHUNK):
        chunk = out[start : start + CHUNK]
        pairs = (chunk.size + 1) // 2
        # Raw words, because Generator.integers is slower and does not promise a stable stream.
        bits = rng.bit_generator.random_raw((pairs + 3) // 4).view(np.uint16)[:pairs]
        index = _scratch.get("index", pairs, np.intp)
        np.copyto(index, bits)
        whole = chunk.size % 2 == 0 and chunk.ctypes.data % 4 == 0
        target = chunk.view(np.int32) if whole else _scratch.get("pairs", pairs, np.int32)
        # The mode is given because the default copies `out`; an index of 16 bits is never clipped.
        table.take(index, out=target, mode="clip")
        if not whole:
            chunk[...] = target.view(np.int16)[: chunk.size]


@lru_cache(maxsize=1)
def quantiles() -> torch.Tensor:
    """65536 equiprobable values: the normal quantiles at (i + 1/2) / 65536, scaled to variance 1.

    The mean is 0, the largest value 4.325, the kurtosis 2.9992, and the distance of Kolmogorov to N(0, 1) is
    1.0e-5: a test of goodness of fit needs about 10^10 samples to see it.
    """
    half = torch.special.ndtri((torch.arange(32768, 65536, dtype=torch.float64) + 0.5) / 65536)
    half /= half.square().mean().sqrt()
    return torch.cat([-half.flip(0), half])


@lru_cache(maxsize=64)
def pair_table(dtype: torch.dtype, std: float) -> np.ndarray:
    """For 16 random bits i two values, std * q[i] and std * q[j(i)], rounded to `dtype`, packed in 32 bits.

    j reverses the bits of i and inverts every second one, so i -> j is a bijection: both values have the law
    of `quantiles`, rounded, whose variance is std^2 within 1e-5 (of itself; as long as std is not near the
    subnormal numbers). The points (i, j) are a net: each of the 2^a x 2^b equal boxes, a + b = 16, holds one,
    and the correlation of a pair is 0 (that of the squares -2e-4). Pairs are independent of one another.

    This is enough for 8 or 11 bits of significand: the quantiles lie closer together than the numbers of the
    dtype for 2^-7 < |z| < 3.4 in bf16 (99.3 % of all) and for 2^-4 < |z| < 2.8 in fp16 (94.5 %).
    """
    q = (quantiles() * std).clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max)
    i = np.arange(65536, dtype=np.uint16)
    j = np.packbits(np.unpackbits(i.byteswap().view(np.uint8)).reshape(-1, 16)[:, ::-1]).view(np.uint16)
    both = torch.stack([q, q[torch.from_numpy((j.byteswap() ^ 0x5555).astype(np.int64))]], dim=1)
    return both.to(dtype).view(torch.int32).flatten().numpy()
