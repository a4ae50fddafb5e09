"""Grow without forgetting: what an arm loses on the old examples, and how near it comes to the baseline on the new."""

from __future__ import annotations

from dataclasses import dataclass

from lemonx_lab.experiments.answer import figure
from lemonx_lab.experiments.result_file import Figure, Result

# Nothing is forgotten where the old loss rises by at most so much, and the new text is learned where the loss on it is
# at most so much above that of full fine-tuning.
OLD, NEW = 0.005, 0.02


@dataclass(frozen=True)
class Forgetting:
    """One arm at its longest: `new` is its final loss relative to the baseline's, `old` the change of the old loss.

    Both are fractions, seed by seed: 0.02 is two percent worse.
    """

    arm: str
    beside: str
    new: Figure
    old: Figure

    @property
    def learns_and_keeps(self) -> bool:
        return self.new["mean"] <= NEW and self.old["mean"] <= OLD


def forgettings(content: Result) -> list[Forgetting]:
    """Every arm of a result whose runs were evaluated beside their own examples."""
    marks = content["mark"]["by_seed"]
    found = []
    for arm in content["arms"]:
        longest = max(at["steps"] for at in arm["at"])
        runs = sorted((run for run in arm["runs"] if run["steps"] == longest), key=lambda run: run["seed"])
        for name in runs[0].get("beside", {}):
            pairs = [run.get("beside", {})[name] for run in runs]
            new = figure([run["final"] / mark - 1 for run, mark in zip(runs, marks, strict=True)])
            found.append(Forgetting(arm["label"], name, new, figure([after / before - 1 for before, after in pairs])))
    return found
