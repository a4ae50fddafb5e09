"""Compares installed packages with the releases that pyproject.toml allows."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, requires, version


@cache
def too_old(package: str, purpose: str = "") -> tuple[str, str] | None:
    """Return what is wrong and what to do if the installed release is older than lemonx needs, else None."""
    from packaging.requirements import Requirement

    try:
        needs, installed = requires("lemonx") or (), version(package)
    except PackageNotFoundError:  # a source tree that is not installed
        return None
    declared = {known.name: known.specifier for known in map(Requirement, needs)}[package]
    if declared.contains(installed, prereleases=True):
        return None
    floor = next(bound.version for bound in declared if bound.operator == ">=")
    needed = " ".join(("lemonx needs", package, floor, "or newer", purpose)).strip()
    return f"{needed}, this is {installed}", f"pip install '{package}>={floor}'"
