"""How the figures of a result are worded, in the terminal and on the page: how many digits, which signs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

from lemonx_lab.experiments.answer import AT_MOST, NOT_REACHED
from lemonx_lab.experiments.forgetting import forgettings
from lemonx_lab.experiments.head_start import HeadStart, measured_head_starts
from lemonx_lab.experiments.result_file import ArmResult, Figure, Result

AT_LEAST = "at least"
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


def _signed(text: str) -> str:
    return text.replace("-", "−")


def name(key: str) -> str:
    """validation_loss -> validation loss."""
    return key.replace("_", " ")


def plus_minus(spread: float | None, text: Callable[[float], str]) -> str:
    """The spread over seeds behind a mean, in the mean's own wording; nothing for a single seed."""
    return "" if spread is None else f" ± {text(spread)}"


def figure(found: Figure) -> str:
    """A metric's mean with its spread over seeds."""
    return f"{metric(found['mean'])}{plus_minus(found['spread'], metric)}"


def is_baseline(content: Result, arm: ArmResult) -> bool:
    return arm["label"] == content["experiment"]["baseline"]


def bound(arm: ArmResult) -> str:
    """What stands before the steps to the mark: `at most ` where the shortest run had passed it already."""
    return f"{AT_MOST} " if arm["reach"]["bound"] == AT_MOST else ""


def saved_bound(arm: ArmResult) -> str:
    """What stands before a saving: if the steps are an upper bound, the saving is a lower bound."""
    return f"{AT_LEAST} " if bound(arm) else ""


def not_reached(arm: ArmResult) -> str:
    """How far the best run of an arm stays from a mark that not every seed reaches."""
    reach = arm["reach"]
    if (
        reach["reached"] or reach["short_of"] is None
    ):  # the mean of the best runs may lie on either side of the mark then
        return f"{NOT_REACHED} by {reach['seeds'] - reach['reached']} of {reach['seeds']} seeds"
    return f"{NOT_REACHED} ({metric(reach['short_of'])} short)"


def reach_text(content: Result, arm: ArmResult) -> str:
    """Steps to the mark, or how far the best run stays from it; the baseline sets the mark with its longest run."""
    if is_baseline(content, arm):
        return f"{steps(content['steps'])} (sets the mark)"
    found = arm["reach"]["steps"]
    if found is None:
        return not_reached(arm)
    return f"{bound(arm)}{steps(found['mean'])}{plus_minus(found['spread'], steps)}"


def has_savings(content: Result) -> bool:
    """Whether the mark is that of training from scratch, and some run is shorter: else nothing is saved or spent."""
    from_scratch = any(arm["method"] == "scratch" and is_baseline(content, arm) for arm in content["arms"])
    return from_scratch and any(at["steps"] != content["steps"] for arm in content["arms"] for at in arm["at"])


def saved_text(arm: ArmResult, what: Saving) -> str:
    """The part of the baseline's cost that is saved, in percent."""
    if arm["saved"] is None:
        return ""
    value = arm["saved"][what]
    return f"{saved_bound(arm)}{percent(value['mean'])}{plus_minus(value['spread'], percent)} %"


def mark_text(content: Result) -> str:
    """The mark that every arm is to reach."""
    experiment, mark = content["experiment"], content["mark"]
    return (
        f"{name(experiment['metric'])} {metric(mark['mean'])}{plus_minus(mark['spread'], metric)}, which "
        f"{experiment['baseline']} reaches in {steps(content['steps'])} steps{_best_of(content)}"
    )


def _best_of(content: Result) -> str:
    """Where the mark is that of the best of several ways to train from scratch, how many there are."""
    baseline = next(arm for arm in content["arms"] if is_baseline(content, arm))
    rivals = [arm for arm in content["arms"] if arm["method"] == baseline["method"] == "scratch"]
    return f" (the best of {len(rivals)} from scratch)" if len(rivals) > 1 else ""


def seeds_text(content: Result) -> str:
    count = len(content["experiment"]["seeds"])
    return "1 seed" if count == 1 else f"{count} seeds"


def table(content: Result, saved: Mapping[Saving, str]) -> list[list[str]]:
    """The answer as rows of text, the names of the columns first; `saved`: which savings, and their names."""
    lengths = sorted({at["steps"] for arm in content["arms"] for at in arm["at"]})
    tasks = list(content["arms"][0]["downstream"])
    saved = saved if has_savings(content) else {}
    rows = [["method", *(f"{steps(n)} steps" for n in lengths), *tasks, "steps to the mark", *saved.values()]]
    for arm in content["arms"]:
        at = {entry["steps"]: entry for entry in arm["at"]}
        finals = [figure(at[n]) if n in at else "" for n in lengths]
        tuned = [figure(arm["downstream"][task]) for task in tasks]
        rows.append(
            [arm["label"], *finals, *tuned, reach_text(content, arm), *(saved_text(arm, what) for what in saved)]
        )
    return rows


def _percents(found: Figure) -> str:
    return f"{percent(found['mean'])}{plus_minus(found['spread'], percent)} %"


def forgetting_table(content: Result) -> list[list[str]]:
    """What each arm loses on other examples than those it trained on, the names of the columns first."""
    baseline = content["experiment"]["baseline"]
    rows = [["method", f"loss against {baseline}", "beside", "change of the loss there"]]
    return rows + [[f.arm, _percents(f.new), f.beside, _percents(f.old)] for f in forgettings(content)]


def head_start_table(content: Result) -> list[list[str]]:
    """What each source is worth in steps from scratch, and net of its own cost, the names of the columns first."""
    rows = [["method", "source", "steps", "head start (steps)", "net of the source"]]
    for one in measured_head_starts(content):
        ahead = f"{_bounded(one)}{steps(one.ahead['mean'])}{plus_minus(one.ahead['spread'], steps)}"
        rows.append([one.arm, one.source, steps(one.steps), ahead, net_text(one)])
    return rows


def net_text(one: HeadStart) -> str:
    """What a whole run saves, its source counted."""
    return f"{_bounded(one)}{_percents(one.net)}"


def _bounded(one: HeadStart) -> str:
    return f"{one.bound} " if one.bound else ""
