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

from lemonx.execution import noise

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
    weight, low = out, 0
    if share and _overlap(runs):
        low = min(first for _, first, _ in runs)
        weight = out[:, low : max(first + length for _, first, length in runs)]
        weight = _scratch.tensor("weight", out.dtype, *weight.shape).copy_(weight)
    take = _take_exactly if out.dtype in noise.HALF else _take
    for target, first, length in runs:
        step = max(1, min(len(out), BLOCK // length))
        wanted = _scratch.tensor("wanted", out.dtype, step, length)
        for copy, rest, w in zip(
            out[:, target : target + length].split(step),
            out[:, first : first + length].split(step),
            weight[:, first - low : first - low + length].split(step),
            strict=True,
        ):
            v = wanted[: len(rest)]
            noise.normal(v, std, rng)
            if share:
                v.add_(w, alpha=share)
            take(copy, rest, v, std)
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


def _take(copy: torch.Tensor, rest: torch.Tensor, v: torch.Tensor, std: float) -> None:
    copy.copy_(v)
    rest.sub_(v)


def _take_exactly(copy: torch.Tensor, rest: torch.Tensor, v: torch.Tensor, std: float) -> None:
    """Move about v from rest to copy: rest + copy is the old rest, exactly. v is overwritten."""
    after = _scratch.tensor("after", v.dtype, *v.shape)
    _cut(v, rest, after, std)
    torch.sub(rest, v, out=after)
    torch.sub(rest, after, out=copy)
    rest.copy_(after)


def _cut(v: torch.Tensor, rest: torch.Tensor, bound: torch.Tensor, std: float) -> None:
    """Cut v to |v| <= |rest|; `bound` is scratch. Magnitudes order as integers, which compare faster."""
    bits, limit = noise.as_numpy(v), noise.as_numpy(bound)
    sign = _scratch.get("sign", bits.size, np.int16).reshape(bits.shape)
    np.bitwise_and(noise.as_numpy(rest), _MAGNITUDE, out=limit)
    kind = torch.finfo(rest.dtype)
    # Only noise of half a spacing of the largest number can take a sum beyond it; it is at most 5 std.
    if 5 * std >= kind.max * kind.eps / 4:
        torch.minimum(bound, kind.max - bound, out=bound)
    np.bitwise_and(bits, _SIGN, out=sign)
    np.bitwise_and(bits, _MAGNITUDE, out=bits)
    np.minimum(bits, limit, out=bits)
    np.bitwise_or(bits, sign, out=bits)
