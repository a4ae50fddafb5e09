"""Lossless model expansion: a trained checkpoint in, a larger one that computes the same function out."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lemonx.algebra.free_parameters import Free
    from lemonx.api import expand, fsck, grow, infer, plan, shapes, shrink, verify
    from lemonx.diagnostics.fsck_report import Finding, Report
    from lemonx.errors import (
        BadCheckpoint,
        BadData,
        BadOutput,
        BadRecipe,
        BadTarget,
        CannotVerify,
        LemonxError,
        NotVerified,
        Refused,
        Stopped,
        UnknownArchitecture,
    )
    from lemonx.in_place import grow_in_place
    from lemonx.in_place.growing import GrownInPlace
    from lemonx.methods import Lessons
    from lemonx.planning.plan import Plan
    from lemonx.verification.certificate import Certificate
    from lemonx.verification.verify import Verified
    from lemonx.workflows.budget import Shape
    from lemonx.workflows.expanding import Expanded
    from lemonx.workflows.growing import Grown
    from lemonx.workflows.shrinking import Shrunk

# Where each public name lives. Imported when asked for, so that `lemonx --help` does not wait for torch.
_HOME = {
    **dict.fromkeys(("plan", "shapes", "expand", "shrink", "verify", "fsck", "grow", "infer"), "lemonx.api"),
    "grow_in_place": "lemonx.in_place",
    "GrownInPlace": "lemonx.in_place.growing",
    "Plan": "lemonx.planning.plan",
    "Expanded": "lemonx.workflows.expanding",
    "Shape": "lemonx.workflows.budget",
    "Grown": "lemonx.workflows.growing",
    "Shrunk": "lemonx.workflows.shrinking",
    "Certificate": "lemonx.verification.certificate",
    "Verified": "lemonx.verification.verify",
    **dict.fromkeys(("Report", "Finding"), "lemonx.diagnostics.fsck_report"),
    "Free": "lemonx.algebra.free_parameters",
    "Lessons": "lemonx.methods",
    **dict.fromkeys(
        ("LemonxError", "BadTarget", "BadCheckpoint", "BadOutput", "BadRecipe", "BadData"), "lemonx.errors"
    ),
    **dict.fromkeys(("Refused", "UnknownArchitecture", "NotVerified", "CannotVerify", "Stopped"), "lemonx.errors"),
}
__version__: str
__all__ = [
    "BadCheckpoint",
    "BadData",
    "BadOutput",
    "BadRecipe",
    "BadTarget",
    "CannotVerify",
    "Certificate",
    "Expanded",
    "Finding",
    "Free",
    "Grown",
    "GrownInPlace",
    "LemonxError",
    "Lessons",
    "NotVerified",
    "Plan",
    "Refused",
    "Report",
    "Shape",
    "Shrunk",
    "Stopped",
    "UnknownArchitecture",
    "Verified",
    "expand",
    "fsck",
    "grow",
    "grow_in_place",
    "infer",
    "plan",
    "shapes",
    "shrink",
    "verify",
]


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import version

        return version("lemonx")
    if name not in _HOME:
        raise AttributeError(f"module 'lemonx' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return ["__version__", *__all__]
