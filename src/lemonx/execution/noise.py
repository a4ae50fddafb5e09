"""Seeded noise: N(0, std^2) and U(-bound, bound), written in the dtype of the tensor.

There is one generator per (seed, tensor name, chunk number), so threads, the order of work and the layout of shards do
not change a result. What a generator writes depends on the shape and dtype of the tensor, not on its strides.

float64 uses numpy's ziggurat, 0.1 G numbers per second and core. The others use a table: 1 G in bf16 and fp16, 0.5 G in
float32. They take the raw bits of SFC64, one look-up for two numbers, and in float32 a product and a sum, each rounded
as IEEE 754 says. There is no logarithm or cosine, whose last bit differs between processors.

The distribution of the table. Cut the line at the quantiles i / 65536 of N(0, 1) into 65536 cells, and end the two
outer ones, beyond 4.1696, at 4.5793, which makes the variance exactly 1 for numbers that lie anywhere in their cell.
Each 16 bits draw two cells, and the numbers are the middles of these cells, rounded. One byte chooses one of 256 groups
of cells for the first number and, shuffled, the cell within its group for the second; the other byte does the reverse.
So each number takes all 65536 cells, every group meets every group, and the joint moments of a pair up to order 4 are
those of independent numbers to 1e-4. Before rounding, the distribution function is off by at most 9.2e-6; the mean is
0, the variance 1 - 6e-7, the kurtosis 2.9998, the largest number 4.3744.
    bf16, fp16 The cells are narrower than the spacing of the dtype for 2^-7 < |z| < 3.4 in bf16 (99.3 % of all), and
               for 2^-4 < |z| < 2.8 in fp16 (94.5 %).
    float32    16 more bits choose one of 65536 even places around the middle, on the width of the narrowest cell.
Different pairs are independent of one another. A test of goodness of fit needs 10^10 numbers to see the difference.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lemonx.execution import kernels

# Normals per call. Smaller pays for the calls, larger leaves the caches: measured, and flat around here.
CHUNK = 1 << 18

HALF = (torch.bfloat16, torch.float16)

# The most that the spread of a weight may be, in squared mean roots of its sizes: it is 1.5 of them if they are normal,
# 1.8 if they are Laplace's, and up to 3.3 in weights that were grown by own copies before.
TAIL = 4.0


class Scratch(threading.local):
    """One growing buffer per thread and slot: fresh memory costs page faults, reused memory does not."""

    def __init__(self) -> None:
        self._buffers: dict[str, np.ndarray] = {}
        self._tensors: dict[tuple[str, torch.dtype, tuple[int, ...]], torch.Tensor] = {}

    def get(self, slot: str, size: int, dtype: type) -> np.ndarray:
        """A vector with undefined contents, valid until its slot is asked for again; one dtype per slot."""
        buffer = self._buffers.get(slot)
        if buffer is None or buffer.size < size or buffer.dtype != dtype:
            buffer = self._buffers[slot] = np.empty(size, dtype)
            self._tensors.clear()  # they hold on to buffers
        return buffer[:size]

    def tensor(self, slot: str, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        """The same as a tensor. Most blocks have the shape of the one before, and making a view takes the GIL."""
        key = (slot, dtype, shape)
        found = self._tensors.get(key)
        if found is None:
            size = math.prod(shape) * dtype.itemsize
            # At least one byte more than nothing: torch cannot view an empty vector of numpy's as another dtype.
            found = torch.from_numpy(self.get(slot, size + 8, np.uint8))[:size].view(dtype).view(shape)
            self._tensors[key] = found
        return found


_scratch = Scratch()


def generator(seed: int, name: str, part: int) -> np.random.Generator:
    """The generator of chunk `part` of tensor `name`: SFC64 whose state is the SHA-256 of all three.

    >>> int(generator(0, "a", 0).integers(1000)) == int(generator(0, "a", 0).integers(1000))
    True
    """
    return np.random.Generator(np.random.SFC64(_Key(f"{seed}/{part}/{name}")))  # pyright: ignore[reportArgumentType]


class _Key(np.random.bit_generator.ISeedSequence):
    """A digest as a generator's state: numpy's own seed sequence would mix the bits again, at 50 us per block."""

    def __init__(self, key: str) -> None:
        self._digest = hashlib.sha256(key.encode()).digest()

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> NDArray[Any]:
        return np.frombuffer(self._digest, "<u8")[:n_words].astype(dtype, copy=False)


def normal(out: torch.Tensor, std: float, rng: np.random.Generator) -> torch.Tensor:
    """Fill `out` with N(0, std^2): the module's docstring states the distribution in each dtype.

    `out` may be a view whose rows are contiguous, such as a block of columns.
    """
    draw_into(as_numpy(out if out.dim() == 2 else out.view(1, -1)), out.dtype, std, rng)
    return out


def draw_into(rows: np.ndarray, dtype: torch.dtype, std: float, rng: np.random.Generator) -> None:
    """The same for memory of two axes that holds numbers of this dtype, as `as_numpy` shows it."""
    if std == 0.0:
        rows[...] = 0
        return
    draw = _draw(dtype, std, rng)
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


def spread(pieces: Iterable[torch.Tensor]) -> float:
    """The root of the mean square of all these numbers, to 8 bits, so that no order of sums shows; 1 if all are 0.

    It is at most `TAIL` times the squared mean root of the sizes of those that are not 0. Where a few numbers are far
    larger than the rest, the mean square is that of these few, and noise in its units would drown all the others.

    >>> spread([torch.full((3,), 0.3), torch.full((5,), -0.3)])
    0.30078125
    >>> spread([torch.full((9999,), 0.3), torch.tensor([3e4])])
    1.2734375
    """
    squares, roots, count, present = 0.0, 0.0, 0, 0
    for piece in pieces:
        squares += float(torch.linalg.vector_norm(piece, dtype=torch.float64)) ** 2
        roots += float(piece.abs().sqrt_().sum(dtype=torch.float64))
        count, present = count + piece.numel(), present + int(piece.count_nonzero())
    root = min(math.sqrt(squares / max(count, 1)), TAIL * (roots / max(present, 1)) ** 2)
    return float(torch.tensor(root, dtype=torch.bfloat16)) or 1.0


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
        return partial(_draw_pairs, pairs=middles(dtype, std), rng=rng)
    if dtype == torch.float32:
        return partial(_draw_single, pairs=middles(dtype, std), step=np.float32(narrowest() * std / 65536), rng=rng)
    if dtype == torch.float64:
        return partial(_draw_ziggurat, std=std, rng=rng)
    raise TypeError(f"no noise for {dtype}: use bfloat16, float16, float32 or float64")


def _draw_ziggurat(out: np.ndarray, std: float, rng: np.random.Generator) -> None:
    rng.standard_normal(out=out)
    np.multiply(out, std, out=out)


def _draw_pairs(out: np.ndarray, pairs: np.ndarray, rng: np.random.Generator) -> None:
    for start in range(0, out.size, CHUNK):
        chunk = out[start : start + CHUNK]
        if chunk.size % 2 == 0:
            _look_up(pairs, chunk.view(pairs.dtype), rng)
        else:
            drawn = _scratch.get("pairs", (chunk.size + 1) // 2, pairs.dtype.type)
            _look_up(pairs, drawn, rng)
            chunk[:] = drawn.view(chunk.dtype)[: chunk.size]


def _draw_single(out: np.ndarray, pairs: np.ndarray, step: np.float32, rng: np.random.Generator) -> None:
    for start in range(0, out.size, CHUNK):
        chunk = out[start : start + CHUNK]
        _draw_pairs(chunk, pairs, rng)
        if compiled := kernels.loaded():
            with _state(rng) as state:
                compiled.add_places(state, chunk, step)
        else:
            place = _scratch.get("place", chunk.size, np.float32)
            np.multiply(_words(chunk.size, rng).view(np.int16), step, out=place)
            np.add(chunk, place, out=chunk)


def _words(count: int, rng: np.random.Generator) -> np.ndarray:
    """Random words of 16 bits. Raw, because Generator.integers is slower and promises no stable stream."""
    return rng.bit_generator.random_raw((count + 3) // 4).view(np.uint16)[:count]


def _look_up(table: np.ndarray, out: np.ndarray, rng: np.random.Generator) -> None:
    """An entry of the table for each random word."""
    if compiled := kernels.loaded():
        with _state(rng) as state:
            compiled.look_up(state, table, out)
        return
    cells = _scratch.get("cells", out.size, np.intp)
    np.copyto(cells, _words(out.size, rng))
    # The default mode copies `out`, "clip" takes half as long again; no index of 16 bits is ever wrapped.
    table.take(cells, out=out, mode="wrap")


@contextmanager
def _state(rng: np.random.Generator) -> Iterator[np.ndarray]:
    """The four words of SFC64's state; the generator goes on from what they are at the end."""
    found = rng.bit_generator.state
    yield found["state"]["state"]
    rng.bit_generator.state = found


@lru_cache(maxsize=1)
def cuts() -> torch.Tensor:
    """The 65537 cuts between the cells: quantiles, and at both ends what makes the variance 1.

    Processors differ in the last bit of these float64 numbers; rounded to float32 or less, they agree.

    >>> [round(float(cuts()[i]), 4) for i in (0, 1, 32768, 65535, 65536)]
    [-4.5793, -4.1696, 0.0, 4.1696, 4.5793]
    """
    half = torch.special.ndtri(torch.arange(32768, 65536, dtype=torch.float64) / 65536)
    low, high, last = half[:-1], half[1:], half[-1]
    # Uniform in (a, b) the mean square is (a^2 + ab + b^2) / 3, and over the 32768 cells of a half it is 1.
    rest = 3 * 32768 - (low * low + low * high + high * high).sum() - last * last
    half = torch.cat([half, (((last * last + 4 * rest).sqrt() - last) / 2).view(1)])
    return torch.cat([-half[1:].flip(0), half])


def narrowest() -> float:
    """The width of the narrowest cells, which are those at 0."""
    return float(cuts()[32769] - cuts()[32768])


@lru_cache(maxsize=64)
def middles(dtype: torch.dtype, std: float) -> np.ndarray:
    """For each 16 bits the middles of two cells, times std, rounded; a pair is stored as one integer."""
    middle = (cuts()[1:] + cuts()[:-1]) * (std / 2)
    middle = as_numpy(middle.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max).to(dtype))
    high, low = np.divmod(np.arange(65536), 256)
    # Of the shuffles 256 -> 256 of the form a x + b, one with the least joint moments.
    cells = np.stack([high * 256 + (107 * low + 128) % 256, low * 256 + (107 * high + 128) % 256], axis=1)
    return np.ascontiguousarray(middle[cells]).view(f"i{2 * middle.itemsize}")[:, 0]
