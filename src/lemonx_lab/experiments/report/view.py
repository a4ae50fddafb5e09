"""The content of the page, in the order in which it is shown; the template lays it out."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from markupsafe import Markup

from lemonx.checkpoints.plain import JsonValue
from lemonx_lab.experiments import verdict, wording
from lemonx_lab.experiments.report import curves
from lemonx_lab.experiments.report.charts import Strip, Style, Text
from lemonx_lab.experiments.result_file import LEMON, SCRATCH, ArmResult, Result
from lemonx_lab.experiments.verdict import ArmComparison

# Colours of the style sheet: the baseline's, LEMON's, and those of all others.
BASELINE, LEMONS, OTHERS = 0, 1, tuple(range(2, 9))
DASHES = 4


@dataclass(frozen=True)
class Place:
    """A value of result.json and its path in the list of results (`0/mark/mean`).

    A number on the page carries its path, so that a test can compare the two.
    """

    value: Any
    path: str

    def __getitem__(self, key: str | int) -> Place:
        return Place(self.value[key], f"{self.path}/{key}")


def number(place: Place, text: Text = str) -> Markup:
    """A number as an element of the page."""
    shown = "" if place.value is None else text(place.value)
    element = Markup('<data value="{}" data-path="{}">{}</data>')
    return element.format(json.dumps(place.value), place.path, shown)


class Row:
    """An arm in every table of the page; `json` are its numbers."""

    def __init__(self, content: Result, arm: ArmResult, json: Place, style: Style) -> None:
        self.arm, self.label, self.json, self.style = arm, arm.label, json, style
        self.is_baseline = content.is_baseline(arm)
        self.has_savings = arm.saved is not None and wording.has_savings(content)
        # The final metric of the source that the first run grew from.
        self.source = None if arm.method == SCRATCH else json["runs"][0]["source"]
        needed, found = verdict.need(content, arm), arm.reach.steps
        seeds = found.by_seed if found and not self.is_baseline else ()
        title = f"{arm.label}: {wording.reach_text(content, arm)}"
        self.strip = Strip(seeds, fmean(needed.steps), content.steps, style, needed.more, title)

    def after(self, steps: int) -> Place | None:
        """The final metric of the runs of this length."""
        places = (n for n, at in enumerate(self.arm.at) if at.steps == steps)
        return next((self.json["at"][n] for n in places), None)


Groups = dict[str, list[tuple[str, ArmComparison]]]


class Section:
    """One result; `lead` is the LEMON arm that the claim is judged by, unless that sets the mark.

    `overall` is the outcome in the summary's words; `saved`, `counted` and `rivals` are the line that answers it. The
    groups hold comparisons, each with the name of a task, by the arm on one side.
    """

    def __init__(self, content: Result, index: int, looks: Mapping[str, Style]) -> None:
        self.key, self.content, self.looks = f"r{index}", content, looks
        self.json = Place(content.as_json(), str(index))
        arms = enumerate(content.arms)
        self.rows = [Row(content, arm, self.json["arms"][n], looks[arm.label]) for n, arm in arms]
        named = [row for row in self.rows if row.label == content.experiment.reference and not row.is_baseline]
        self.lead = next(iter((*named, *(row for row in self.rows if row.style.strong))), None)
        saved = self.lead.arm.saved if self.lead and self.lead.has_savings else None
        self.costs_more = saved is not None and saved.flops_with_source.mean < 0
        compared = verdict.claims(content)
        self.outcome, self.verdict = verdict.answer(content)
        is_told = compared or self.outcome != verdict.OPEN
        self.overall = verdict.OVERALL[self.outcome] if is_told else "variants alone"
        self.saved, self.counted, self.rivals = verdict.answer_line(content)
        self.claims = _grouped((c.arm, ("", c)) for c in compared)
        self.variants = _grouped((c.other, ("", c)) for c in verdict.variants(content))
        self.tuned = _grouped((c.arm, (task, c)) for task, c in verdict.tuned(content))
        self.charts = curves.charts(content, looks, self.key)
        self.recipe = toml(content.recipe)


def sections(results: Sequence[Result]) -> list[Section]:
    """One section per result."""
    others = other_methods(results)
    return [Section(content, index, styles(content, others)) for index, content in enumerate(results)]


def _grouped(found: Iterable[tuple[str, tuple[str, ArmComparison]]]) -> Groups:
    groups: Groups = {}
    for name, one in found:
        groups.setdefault(name, []).append(one)
    return groups


def other_methods(results: Sequence[Result]) -> list[str]:
    """The methods of a page other than LEMON and the baselines, in order of appearance."""
    arms = [arm for content in results for arm in content.arms if not content.is_baseline(arm)]
    return list(dict.fromkeys(arm.method for arm in arms if arm.method != LEMON))


def styles(content: Result, others: Sequence[str]) -> dict[str, Style]:
    """The style of each arm: the same in every chart and table; `others` are the page's methods.

    A method has a colour, and its arms differ by dashes. If most arms belong to few methods, each arm has a colour,
    and only the first LEMON arm is emphasised.
    """
    by_method = len({arm.method for arm in content.arms}) > len(content.arms) / 2
    first = next(iter(verdict.challengers(content)), None)
    keys = list(others)
    if not by_method:
        keys = [arm.label for arm in content.arms if arm is not first and not content.is_baseline(arm)]
    seen: dict[int, int] = {}
    found: dict[str, Style] = {}
    for arm in content.arms:
        is_baseline = content.is_baseline(arm)
        strong = not is_baseline and (arm.method == LEMON if by_method else arm is first)
        if is_baseline or strong:
            colour = BASELINE if is_baseline else LEMONS
        else:
            colour = OTHERS[keys.index(arm.method if by_method else arm.label) % len(OTHERS)]
        found[arm.label] = Style(colour, seen.get(colour, 0) % DASHES, strong, is_baseline or arm is first)
        seen[colour] = seen.get(colour, 0) + 1
    return found


def toml(content: Mapping[str, JsonValue], prefix: str = "") -> str:
    """Settings one per line, with dotted keys; a list of tables as the blocks of a TOML file.

    >>> print(toml({"train": {"steps": 3, "data": {"kind": "digits"}}, "arms": [{"label": "LEMON"}]}))
    train.steps = 3
    train.data.kind = "digits"
    <BLANKLINE>
    [[arms]]
    label = "LEMON"
    """
    lines: list[str] = []
    blocks: list[str] = []
    for key, value in content.items():
        tables = [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []
        if isinstance(value, dict):
            lines += [toml(value, f"{prefix}{key}.")] if value else []
        elif isinstance(value, list) and value and len(tables) == len(value):
            blocks += [f"\n[[{prefix}{key}]]\n{toml(table)}" for table in tables]
        else:
            lines.append(f"{prefix}{key} = {json.dumps(value, ensure_ascii=False)}")
    return "\n".join([*lines, *blocks])
