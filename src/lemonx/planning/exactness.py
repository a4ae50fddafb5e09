"""How exact a tensor is in the dtype that it is stored in."""

from __future__ import annotations

import numpy as np

from lemonx.algebra.free_parameters import Free
from lemonx.algebra.recipes import CANCEL, HALF, SILENT, Matrix, TensorRecipe, Vector

BIT_EXACT, EXACT_SUM, ROUNDED = "bit-exact", "exact-sum", "rounding-limited"
# A norm that an added Post-LN block applies again: exact but for eps, in any dtype.
UP_TO_EPS = "up to eps"
# A tensor that a method computes itself: what of the source it holds, and how exactly, the method alone knows.
MADE = "made by the method"
# From exact to not.
WEAKER = (BIT_EXACT, EXACT_SUM, ROUNDED, UP_TO_EPS, MADE)
# The dtypes that can be expanded: significand bits, to tell whether a cast rounds.
BITS = {"F64": 53, "F32": 24, "F16": 11, "BF16": 8}
# The exponents of their smallest numbers: a cast to fewer loses small ones, even where there are bits enough.
SMALLEST = {"F64": -1074, "F32": -149, "F16": -24, "BF16": -133}


def exactness(recipe: TensorRecipe, source: str, target: str, free: Free) -> str:
    """How exact a tensor is as it is stored: every entry, the sum over copies, or to one rounding."""
    if isinstance(recipe, Matrix) and recipe.mode in (SILENT, HALF) and not recipe.spare:
        return BIT_EXACT
    if BITS.get(target, 64) < BITS.get(source, 64) or SMALLEST.get(target, 0) > SMALLEST.get(source, 0):
        return ROUNDED
    axes = (recipe.expansion,) if isinstance(recipe, Vector) else (recipe.rows, recipe.columns)
    if any(axis.is_dense for axis in axes):
        return ROUNDED
    if isinstance(recipe, Vector):
        if recipe.levelled and target != "F64" and not recipe.expansion.is_copy.all():
            return ROUNDED  # the level of new entries is a root, which the mean of the rows in front of it goes by
        factor = recipe.factor[recipe.factor != 0]
        return BIT_EXACT if (factor == 1).all() or (not recipe.offset and powers_of_two(factor)) else ROUNDED
    rows, columns = recipe.rows, recipe.columns
    most = int(columns.copies.max())
    if recipe.mode == CANCEL:
        # Pairs cancel exactly; a third copy takes a share of the second's, which rounds unless the split is exact.
        return EXACT_SUM if most <= 2 or target in ("BF16", "F16") else ROUNDED
    apart = recipe.copied is not None and max(recipe.copied.copies) > 1 and free.phi > 0
    if apart and target not in ("BF16", "F16"):
        return ROUNDED
    scales = np.concatenate([rows.amp * rows.gain, columns.amp * columns.gain])
    means = (rows.is_mean | rows.is_weighed_mean).any() or (columns.is_mean.any() and not recipe.consumes)
    if means or not powers_of_two(scales):
        return ROUNDED
    if most == 1 or not recipe.consumes:
        return EXACT_SUM if apart else BIT_EXACT
    if target in ("BF16", "F16"):
        return EXACT_SUM
    exact_share = all(
        powers_of_two(np.array([free.share(k)])) or free.share(k) == 0 for k in set(columns.copies.tolist())
    )
    return EXACT_SUM if free.phi == 0 and exact_share and most <= 2 else ROUNDED


def powers_of_two(values: np.ndarray) -> bool:
    """Whether multiplying by these rounds nothing, but for what becomes subnormal."""
    return bool((np.frexp(np.abs(values))[0] == 0.5).all())
