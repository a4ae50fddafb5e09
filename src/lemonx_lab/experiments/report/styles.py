"""Which colour and dash an arm has: the same in every chart and table of a result."""

from __future__ import annotations

from collections.abc import Sequence

from lemonx_lab.experiments.report.charts import Style
from lemonx_lab.experiments.result_file import Result
from lemonx_lab.experiments.verdict import LEMON, lemons
from lemonx_lab.experiments.wording import is_baseline

# Colours of the style sheet: the baseline's, LEMON's, and those of all others.
BASELINE, LEMONS, OTHERS = 0, 1, tuple(range(2, 9))
DASHES = 4


def other_methods(results: Sequence[Result]) -> list[str]:
    """The methods of a page other than LEMON and the baselines, in order of appearance."""
    arms = [arm for content in results for arm in content["arms"] if not is_baseline(content, arm)]
    return list(dict.fromkeys(arm["method"] for arm in arms if arm["method"] != LEMON))


def styles(content: Result, others: Sequence[str]) -> dict[str, Style]:
    """Label -> style; `others` are the page's methods.

    A method has a colour, and its arms differ by dashes. If most arms belong to few methods, each arm has a colour,
    and only the first LEMON arm is emphasised.
    """
    arms = content["arms"]
    methods = {arm["method"] for arm in arms}
    by_method = len(methods) > len(arms) / 2
    first = next((arm for arm in lemons(content) if not is_baseline(content, arm)), None)
    keys = list(others) if by_method else [a["label"] for a in arms if a is not first and not is_baseline(content, a)]
    seen: dict[int, int] = {}
    found: dict[str, Style] = {}
    for arm in arms:
        emphasised = arm["method"] == LEMON if by_method else arm is first
        if is_baseline(content, arm):
            colour = BASELINE
        elif emphasised:
            colour = LEMONS
        else:
            key = arm["method"] if by_method else arm["label"]
            colour = OTHERS[keys.index(key) % len(OTHERS)]
        dash = seen.get(colour, 0) % DASHES
        seen[colour] = seen.get(colour, 0) + 1
        labelled = is_baseline(content, arm) or arm is first
        found[arm["label"]] = Style(colour, dash, emphasised and not is_baseline(content, arm), labelled)
    return found
