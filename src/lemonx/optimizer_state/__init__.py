"""Grows the optimizer state with the weights, so that a run can continue: see docs/optimizer-state.md."""

from __future__ import annotations

from lemonx.optimizer_state.duals import duals
from lemonx.optimizer_state.grow import grow_optimizer
from lemonx.optimizer_state.moments import EXACT, EXPECTED, FRESH, Moments, moments

__all__ = ["grow_optimizer", "moments", "duals", "Moments", "EXACT", "EXPECTED", "FRESH"]
