"""The packages that training needs beyond those that come with lemonx."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

from lemonx.errors import BadRecipe

NEEDED = ("accelerate", "matplotlib", "sklearn")


def require(what: str = "training", more: Sequence[str] = ()) -> None:
    """BadRecipe where a package is missing that only the end of a run needs: before hours are spent."""
    for package in (*NEEDED, *more):
        if find_spec(package) is None:
            extra = "'lemonx[lab]'" if package in NEEDED else package
            raise BadRecipe(f"{what} needs the package {package}", f"pip install {extra}")
