"""Splitting a weight among the copies of a unit, so that the copies sum to the weight.

The first copy holds what remains, r, at first the whole weight w. Each further copy takes v, and r -= v.

bf16 and fp16: the copies are representable and their exact sum is w. One step, with RN the rounding of the
dtype, p = 8 or 11 its precision, u(x) the spacing of its numbers at x:

    v := RN(share * w + phi),  cut to |v| <= |r|;    s := RN(r - v);    the copy takes t = r - s,  r := s.

Claim (Dekker's Fast2Sum): t is representable, so nothing is lost.  Proof: if r - v is representable, t = v.
Otherwise, since r - v is a multiple of u(v) (u grows with |x|, and |v| <= |r|), |r - v| > 2^p u(v), so
u(s) >= 2 u(v). Now t is a multiple of min(u(r), u(s)), and |t| <= |v| + u(s)/2. (a) u(s) < u(r): |v| < 2^p
u(v) <= 2^(p-1) u(s), so |t| < 2^p u(s). (b) u(s) >= u(r): |r - v| <= 2 |r|, so u(s)/2 <= u(r), and |v| <=
|r| <= (2^p - 1) u(r), so |t| <= 2^p u(r). Multiples of a spacing up to 2^p times it are representable. []
Sums are rounded to float32 first, which is inexact only for |v| < 2^-12 |r|, where the claim is plain.

The cut leaves the law of phi as it is wherever |phi| < |w|, is symmetric, and gives zeros to a zero weight
(the sum of zeros may differ in sign). |phi| below u(w)/2 rounds to 0 where share is 0: no exact split of w
can hold it. Subnormal numbers need no special case: their spacing is constant.

float32 and float64: v = share * w + phi and r -= v, rounded as usual, and phi is not cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch

from lemonx.execution import kernels, noise

# Elements per step. With fewer, calls cost more; with more, the data leave the caches. Measured; flat around here.
BLOCK = 1 << 18

_MAGNITUDE, _SIGN = np.int16(0x7FFF), np.int16(-0x8000)
_scratch = noise.Scratch()


def split_columns(
    out: torch.Tensor,
    runs: Sequence[tuple[int, int, int]],
    share: float,
    std: float,
    rng: np.random.Generator,
) -> torch.Tensor:
    """Give each run (target, first, length) of further copies share * w + N(0, std^2), first copies the rest.

    `out` is rows x columns with contiguous rows. Columns `first..` hold the weight w of the first copies on
    entry and what remains of it on return; columns `target..` are overwritten. Several runs may have the same
    first columns: w is what these held on entry. No target column may be a first column.
    """
    bits = whole = noise.as_numpy(out)
    if share and _overlap(runs):
        whole = _scratch.get("weight", bits.size, bits.dtype.type).reshape(bits.shape)
        whole[...] = bits
    take = _take_exactly if out.dtype in noise.HALF else _take
    for target, first, length in runs:
        step = max(1, min(len(bits), BLOCK // length))
        for start in range(0, len(bits), step):
            block = bits[start : start + step]
            v = _scratch.get("wanted", len(block) * length, bits.dtype.type).reshape(-1, length)
            noise.draw_into(v, out.dtype, std, rng)
            if share:
                weight = whole[start : start + step, first : first + length]
                _tensor(v, out.dtype).add_(_tensor(weight, out.dtype), alpha=share)
            take(block, target, first, v, out.dtype, std)
    return out


def within(phi: torch.Tensor, weight: torch.Tensor, copies: int) -> torch.Tensor:
    """Round noise so that it can be added to a weight, and subtracted for that many copies, exactly in bf16 and fp16.

    It becomes a multiple of the spacing in the weight's binade, and the sum stays inside that binade: such numbers are
    representable. In float32 and float64 the noise is left unchanged.
    """
    if weight.dtype not in noise.HALF:
        return phi
    kind = torch.finfo(weight.dtype)
    magnitude, exponent = torch.frexp(weight.float())
    top = torch.ldexp(torch.ones_like(magnitude), exponent)
    spacing = (top * (kind.eps / 2)).clamp(min=kind.smallest_normal * kind.eps)
    room = torch.floor((top - weight.float().abs()) / spacing / (copies - 1)) * spacing
    wanted = torch.round(phi.float() / spacing) * spacing
    return torch.minimum(torch.maximum(wanted, -room), room).to(weight.dtype)


def _overlap(runs: Sequence[tuple[int, int, int]]) -> bool:
    spans = sorted((first, first + length) for _, first, length in runs)
    return any(left[1] > right[0] for left, right in pairwise(spans))


def _tensor(bits: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(bits).view(dtype)


def _take(out: np.ndarray, target: int, first: int, v: np.ndarray, dtype: torch.dtype, std: float) -> None:
    out[:, target : target + v.shape[1]] = v
    out[:, first : first + v.shape[1]] -= v


def _take_exactly(out: np.ndarray, target: int, first: int, v: np.ndarray, dtype: torch.dtype, std: float) -> None:
    """Move about v from the columns `first..` to `target..`, so that their sum stays exact. v is overwritten."""
    compiled = kernels.loaded()
    if compiled and dtype == torch.bfloat16 and out.flags.c_contiguous and not _may_overflow(dtype, std):
        compiled.take_exactly(v, out, target, first)
        return
    rest, copy = out[:, first : first + v.shape[1]], out[:, target : target + v.shape[1]]
    after = _scratch.get("after", v.size, np.int16).reshape(v.shape)
    _cut(v, rest, after, dtype, std)
    torch.sub(_tensor(rest, dtype), _tensor(v, dtype), out=_tensor(after, dtype))
    torch.sub(_tensor(rest, dtype), _tensor(after, dtype), out=_tensor(copy, dtype))
    rest[...] = after


def _cut(bits: np.ndarray, rest: np.ndarray, limit: np.ndarray, dtype: torch.dtype, std: float) -> None:
    """Cut to the magnitudes of the rest; `limit` is scratch. Magnitudes order as integers, which compare faster."""
    sign = _scratch.get("sign", bits.size, np.int16).reshape(bits.shape)
    np.bitwise_and(rest, _MAGNITUDE, out=limit)
    if _may_overflow(dtype, std):
        bound = _tensor(limit, dtype)
        torch.minimum(bound, torch.finfo(dtype).max - bound, out=bound)
    np.bitwise_and(bits, _SIGN, out=sign)
    np.bitwise_and(bits, _MAGNITUDE, out=bits)
    np.minimum(bits, limit, out=bits)
    np.bitwise_or(bits, sign, out=bits)


def _may_overflow(dtype: torch.dtype, std: float) -> bool:
    """Only noise of half a spacing of the largest number can take a sum beyond it; it is at most 5 std."""
    kind = torch.finfo(dtype)
    return 5 * std >= kind.max * kind.eps / 4
