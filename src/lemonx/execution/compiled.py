"""The inner loops of random numbers and exact splits, each in one pass, compiled by numba.

They write the bytes that the calls of numpy and torch beside them write (noise.py, exact_split.py); a test compares the
two. They take less than half of the time, and do not hold the interpreter's lock, so that threads run side by side.
Import this module through kernels.py: numba is an extra, and costs a quarter of a second to import.

Compiled code is kept beside this file, or in the user's cache of numba where that folder cannot be written to.
"""

from __future__ import annotations

import numpy as np
from numba import njit

_BELOW, _HALF, _ONE = np.uint32(16), np.uint32(0x7FFF), np.uint32(1)
_MAGNITUDE, _SIGN, _WORD = np.int16(0x7FFF), np.int16(-0x8000), np.uint64(0xFFFF)


@njit(nogil=True, inline="always")
def _step(a, b, c, count):
    """SFC64: the next 64 bits, and the state after them."""
    word = a + b + count
    rotated = (c << np.uint64(24)) | (c >> np.uint64(40))
    return word, b ^ (b >> np.uint64(11)), c + (c << np.uint64(3)), rotated + word, count + np.uint64(1)


@njit(["(uint64[::1], int32[::1], int32[::1])", "(uint64[::1], int64[::1], int64[::1])"], nogil=True, cache=True)
def look_up(state, table, out):
    """For each 16 bits of the generator, from the lowest on, the entry of the table; bits left over are dropped."""
    a, b, c, count = state[0], state[1], state[2], state[3]
    whole = out.size // 4 * 4
    for i in range(0, whole, 4):
        word, a, b, c, count = _step(a, b, c, count)
        out[i] = table[word & _WORD]
        out[i + 1] = table[(word >> np.uint64(16)) & _WORD]
        out[i + 2] = table[(word >> np.uint64(32)) & _WORD]
        out[i + 3] = table[word >> np.uint64(48)]
    if whole < out.size:
        word, a, b, c, count = _step(a, b, c, count)
        for i in range(whole, out.size):
            out[i] = table[word & _WORD]
            word >>= np.uint64(16)
    state[0], state[1], state[2], state[3] = a, b, c, count


@njit("(uint64[::1], float32[::1], float32)", nogil=True, cache=True)
def add_places(state, out, step):
    """Add to each number 16 bits of the generator, as a signed integer, times `step`."""
    a, b, c, count = state[0], state[1], state[2], state[3]
    for start in range(0, out.size, 4):
        word, a, b, c, count = _step(a, b, c, count)
        for i in range(start, min(start + 4, out.size)):
            place = np.float32(np.int16(word & _WORD)) * step
            out[i] += place
            word >>= np.uint64(16)
    state[0], state[1], state[2], state[3] = a, b, c, count


@njit(nogil=True, inline="always")
def _float(bits):
    """The number that 16 bits of bfloat16 stand for."""
    return np.uint32(np.uint32(np.uint16(bits)) << _BELOW).view(np.float32)


@njit(nogil=True, inline="always")
def _rounded(value):
    """The nearest bfloat16, and of two the even one, as 16 bits; finite numbers only."""
    bits = value.view(np.uint32)
    return np.int16((bits + _HALF + ((bits >> _BELOW) & _ONE)) >> _BELOW)


@njit("(int16[:, ::1], int16[:, ::1], int64, int64)", nogil=True, cache=True)
def take_exactly(wanted, out, target, first):
    """Move about `wanted` from the columns `first..` to the columns `target..`, in bfloat16, so that sums stay exact.

    Wanted numbers are cut to the magnitude of what they are taken from.
    """
    length = wanted.shape[1]
    for i in range(wanted.shape[0]):
        v, row = wanted[i], out[i]
        rest, copy = row[first : first + length], row[target : target + length]
        for j in range(length):
            old = rest[j]
            cut = np.int16(min(v[j] & _MAGNITUDE, old & _MAGNITUDE) | (v[j] & _SIGN))
            before = _float(old)
            after = _rounded(np.float32(before - _float(cut)))
            copy[j] = _rounded(np.float32(before - _float(after)))
            rest[j] = after
