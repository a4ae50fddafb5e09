"""The wording of a result's figures, in the terminal and on the page: how many digits, which signs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

from lemonx_lab.experiments.answer import (
    AT_LEAST,
    AT_MOST,
    NOT_REACHED,
    HeadStart,
    forgettings,
    measured_head_starts,
)
from lemonx_lab.experiments.result_file import ArmResult, Figure, Result

Text = Callable[[float], str]
Saving = Literal["steps", "flops", "flops_with_source"]


def steps(value: float) -> str:
    """
    >>> steps(1234.5)
    '1,234'
    """
    return _signed(f"{value:,.0f}")


def metric(value: float) -> str:
    """
    >>> metric(1.52345)
    '1.5234'
    """
    return _signed(f"{value:.4f}")


def percent(value: float) -> str:
    """A fraction in percent; the percent sign stands once, after the spread.

    >>> percent(0.5671), percent(-0.02)
    ('56.7', '−2.0')
    """
    return _signed(f"{100 * value:.1f}")


def rate(value: float) -> str:
    """A learning rate.

    >>> rate(0.002), rate(0.000025)
    ('0.002', '2.5e-05')
    """
    return f"{value:.3g}"


def seconds(value: float) -> str:
    """
    >>> seconds(41.52), seconds(0.4)
    ('41.5', '0.4')
    """
    return f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"


def power(value: float) -> str:
    return "0" if value == 0 else f"{value:.1e}"


def _signed(text: str) -> str:
    return text.replace("-", "−")


def name(key: str) -> str:
    """validation_loss -> validation loss."""
    return key.replace("_", " ")


def plus_minus(spread: float | None, text: Text) -> str:
    """The spread over seeds behind a mean, in the mean's own wording; nothing for a single seed."""
    return "" if spread is None else f" ± {text(spread)}"


def figure(found: Figure, text: Text = metric, unit: str = "") -> str:
    """A mean with its spread over seeds."""
    return f"{text(found.mean)}{plus_minus(found.spread, text)}{unit}"


def bound(arm: ArmResult) -> str:
    """The words before the steps to the mark: `at most ` where the shortest run had passed it already."""
    return f"{AT_MOST} " if arm.reach.bound == AT_MOST else ""


def saved_bound(arm: ArmResult) -> str:
    """The words before a saving: if the steps are an upper bound, the saving is a lower bound."""
    return f"{AT_LEAST} " if bound(arm) else ""


def not_reached(arm: ArmResult) -> str:
    """The distance of the best run of an arm from a mark that not every seed reaches."""
    reach = arm.reach
    # Where some seeds reach it, the mean of the best runs may lie on either side of the mark.
    if reach.reached or reach.short_of is None:
        return f"{NOT_REACHED} by {reach.seeds - reach.reached} of {reach.seeds} seeds"
    return f"{NOT_REACHED} ({metric(reach.short_of)} short)"


def reach_text(content: Result, arm: ArmResult) -> str:
    """Steps to the mark, or how far the best run stays from it; the baseline sets the mark with its longest run."""
    if content.is_baseline(arm):
        return f"{steps(content.steps)} (sets the mark)"
    found = arm.reach.steps
    return not_reached(arm) if found is None else f"{bound(arm)}{figure(found, steps)}"


def has_savings(content: Result) -> bool:
    """True if training from scratch sets the mark and some run is shorter; otherwise no run can save anything."""
    return any(map(content.is_baseline, content.scratch)) and set(content.lengths) != {content.steps}


def saved_text(arm: ArmResult, what: Saving) -> str:
    """The part of the baseline's cost that is saved, in percent."""
    return "" if arm.saved is None else saved_bound(arm) + figure(getattr(arm.saved, what), percent, " %")


def mark_text(content: Result) -> str:
    """The mark that every arm is to reach."""
    asked, count = content.experiment, len(content.scratch)
    is_best = count > 1 and any(map(content.is_baseline, content.scratch))
    return (
        f"{name(asked.metric)} {figure(content.mark)}, which {asked.baseline} reaches in {steps(content.steps)} steps"
        + (f" (the best of {count} from scratch)" if is_best else "")
    )


def seeds_text(content: Result) -> str:
    count = len(content.experiment.seeds)
    return "1 seed" if count == 1 else f"{count} seeds"


# Tables as rows of text, the names of the columns first.


def table(content: Result, saved: Mapping[Saving, str]) -> list[list[str]]:
    """The answer; `saved` is which savings to show, and their names."""
    lengths, tasks = content.lengths, list(content.arms[0].downstream)
    saved = saved if has_savings(content) else {}
    rows = [["method", *(f"{steps(n)} steps" for n in lengths), *tasks, "steps to the mark", *saved.values()]]
    for arm in content.arms:
        finals = [figure(arm.after(n)) if n in arm.lengths else "" for n in lengths]
        tuned = [figure(arm.downstream[task]) for task in tasks]
        rows.append([arm.label, *finals, *tuned, reach_text(content, arm), *(saved_text(arm, what) for what in saved)])
    return rows


def forgetting_table(content: Result) -> list[list[str]]:
    """The change of each arm's loss on other examples than those that it trained on."""
    rows = [["method", f"loss against {content.experiment.baseline}", "beside", "change of the loss there"]]
    shown = forgettings(content)
    return rows + [[f.arm, figure(f.new, percent, " %"), f.beside, figure(f.old, percent, " %")] for f in shown]


def head_start_table(content: Result) -> list[list[str]]:
    """The worth of each source in steps from scratch, and net of its own cost."""
    rows = [["method", "source", "steps", "head start (steps)", "net of the source"]]
    for one in measured_head_starts(content):
        rows.append([one.arm, one.source, steps(one.steps), _bounded(one, one.ahead, steps), net_text(one)])
    return rows


def net_text(one: HeadStart) -> str:
    """The saving of a whole run, its source counted."""
    return _bounded(one, one.net, percent, " %")


def _bounded(one: HeadStart, found: Figure, text: Text, unit: str = "") -> str:
    return (f"{one.bound} " if one.bound else "") + figure(found, text, unit)
