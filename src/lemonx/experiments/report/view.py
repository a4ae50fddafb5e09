"""What the page shows of results, in the order in which it shows it; the template only sets it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from lemonx.checkpoints.plain import parse_json
from lemonx.experiments import verdict, wording
from lemonx.experiments.report import curves
from lemonx.experiments.report.charts import Style, strip
from lemonx.experiments.report.numbers import Mean, Number, Numbers
from lemonx.experiments.report.styles import other_methods, styles
from lemonx.experiments.verdict import Comparison
from lemonx.planning.summary import human

SAVED = ("steps", "flops", "flops_with_source")


def page(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """All of it: a summary, then a section a result."""
    others = other_methods(results)
    sections = [_Section(content, index, styles(content, others)).view() for index, content in enumerate(results)]
    title = sections[0]["title"] if len(sections) == 1 else f"{len(sections)} experiments"
    return {"title": title, "sections": sections, "versions": results[0]["versions"]["lemonx"] if results else ""}


class _Section:
    """One result; `looks` are the styles of its arms by label."""

    def __init__(self, content: dict[str, Any], index: int, looks: dict[str, Style]) -> None:
        self.content, self.looks = content, looks
        self.take = Numbers(content, index)
        self.key = f"r{index}"

    def view(self) -> dict[str, Any]:
        content, experiment = self.content, self.content["experiment"]
        compared = verdict.claims(content)
        outcome, sentence = verdict.headline(compared)
        rows = self.rows()
        lead = next((row for row in rows if row["strong"]), None)
        return {
            "key": self.key,
            **{name: experiment[name] for name in ("name", "title", "claim", "cost", "command", "paper", "baseline")},
            "metric": wording.name(experiment["metric"]),
            "better": experiment["better"],
            "seeds": wording.seeds_text(content),
            "quick": content["quick"],
            "mark": self.take.mean("mark", text=wording.metric),
            "steps": self.take.one("steps", text=wording.steps),
            "outcome": outcome,
            "verdict": sentence,
            "overall": verdict.OVERALL[outcome],
            "lead": lead,
            "costs_more": bool(
                lead and lead["saved"] and parse_json(lead["saved"]["flops_with_source"].mean.value) < 0
            ),
            "rows": rows,
            "claims": self.compared([("", c) for c in compared], verdict.CLAIM),
            "variants": self.compared([("", c) for c in verdict.variants(content)], verdict.VARIANT, by_other=True),
            "finals": self.finals(),
            "downstream": self.downstream(),
            "tuned": self.compared(verdict.tuned(content), verdict.TUNED),
            "charts": curves.charts(content, self.looks, self.key),
            "curves": self.curve_values(),
            "runs": self.runs(),
            "certificate": self.certificate(),
            "plan": self.plan(),
            "recipe": toml(content["recipe"]),
            "sources": self.sources(),
            "versions": content["versions"],
        }

    def _arm(self, arm: dict[str, Any]) -> dict[str, Any]:
        look = self.looks[arm["label"]]
        return {"label": arm["label"], "look": look.classes, "strong": look.strong}

    def rows(self) -> list[dict[str, Any]]:
        """The answer: a row an arm."""
        return [self._answer(index, arm) for index, arm in enumerate(self.content["arms"])]

    def _answer(self, index: int, arm: dict[str, Any]) -> dict[str, Any]:
        baseline = wording.is_baseline(self.content, arm)
        reach: Mean | Number | str
        if baseline:
            reach = self.take.one("steps", text=wording.steps)
        elif arm["reach"]["steps"] is None:
            reach = wording.not_reached(arm)
        else:
            reach = self.take.mean("arms", index, "reach", "steps", text=wording.steps, before=wording.bound(arm))
        saved = None
        if arm["saved"] is not None:
            words = {"text": wording.percent, "before": wording.saved_bound(arm), "unit": " %"}
            saved = {what: self.take.mean("arms", index, "saved", what, **words) for what in SAVED}
        return {**self._arm(arm), "baseline": baseline, "reach": reach, "saved": saved, "strip": self._strip(arm)}

    def _strip(self, arm: dict[str, Any]) -> str:
        needed = verdict.need(self.content, arm)
        found = arm["reach"]["steps"]
        return strip(
            found["by_seed"] if found and not wording.is_baseline(self.content, arm) else (),
            fmean(needed.steps),
            full=self.content["steps"],
            style=self.looks[arm["label"]],
            open_end=needed.more,
            title=f"{arm['label']}: {wording.reach_text(self.content, arm)}",
        )

    def compared(
        self, found: Sequence[tuple[str, Comparison]], words: Mapping[str, str], *, by_other: bool = False
    ) -> list[dict[str, Any]]:
        """Comparisons, those of one arm together, or those with one arm."""
        groups: dict[str, list[dict[str, Any]]] = {}
        for task, c in found:
            group, label = (c.other, c.arm) if by_other else (c.arm, c.other)
            row = {"task": task, "label": label, "look": self.looks[label].classes, "word": words[c.outcome]}
            groups.setdefault(group, []).append({**row, **_lead(c)})
        return [{"label": label, "look": self.looks[label].classes, "rows": rows} for label, rows in groups.items()]

    def finals(self) -> dict[str, Any]:
        """Final quality by length of the schedule, and where each arm starts."""
        arms = self.content["arms"]
        lengths = sorted({at["steps"] for arm in arms for at in arm["at"]})
        rows = []
        for index, arm in enumerate(arms):
            places = {at["steps"]: number for number, at in enumerate(arm["at"])}
            cells = [
                self.take.mean("arms", index, "at", places[n], text=wording.metric) if n in places else None
                for n in lengths
            ]
            start = self.take.one("arms", index, "runs", 0, "start", text=wording.metric)
            source = None
            if arm["method"] != "scratch":
                source = self.take.one("arms", index, "runs", 0, "source", text=wording.metric)
            rows.append({**self._arm(arm), "start": start, "source": source, "cells": cells})
        return {"lengths": [wording.steps(n) for n in lengths], "rows": rows}

    def downstream(self) -> dict[str, Any] | None:
        arms = self.content["arms"]
        tasks = list(dict.fromkeys(task for arm in arms for task in arm["downstream"]))
        if not tasks:
            return None
        metrics = {
            task: next(a["downstream"][task]["metric"] for a in arms if task in a["downstream"]) for task in tasks
        }
        rows = [
            {
                **self._arm(arm),
                "cells": [
                    self.take.mean("arms", index, "downstream", task, text=wording.metric)
                    if task in arm["downstream"]
                    else None
                    for task in tasks
                ],
            }
            for index, arm in enumerate(arms)
        ]
        return {"tasks": [{"name": task, "metric": wording.name(metrics[task])} for task in tasks], "rows": rows}

    def curve_values(self) -> list[dict[str, Any]]:
        """The numbers behind the curves, for those who cannot see or hover."""
        found = []
        for index, curve in enumerate(self.content["curves"]):
            if curve["arm"] not in self.looks:
                continue
            columns = (
                ("step", wording.steps),
                ("validation_loss", wording.metric),
                ("learning_rate", curves.rate),
                ("flops", human),
                ("seconds", curves.seconds),
            )
            rows = [
                [self.take.one("curves", index, name, i, text=text) for name, text in columns]
                for i in range(len(curve["step"]))
            ]
            look = self.looks[curve["arm"]].classes
            found.append({"label": curve["arm"], "look": look, "steps": wording.steps(curve["steps"]), "rows": rows})
        return found

    def runs(self) -> list[dict[str, Any]]:
        columns = (
            ("seed", str),
            ("steps", wording.steps),
            ("start", wording.metric),
            ("final", wording.metric),
            ("flops", human),
            ("seconds", curves.seconds),
        )
        return [
            {
                **self._arm(arm),
                "cells": [self.take.one("arms", index, "runs", i, name, text=text) for name, text in columns],
            }
            for index, arm in enumerate(self.content["arms"])
            for i in range(len(arm["runs"]))
        ]

    def sources(self) -> list[dict[str, Any]]:
        return [
            {
                "name": name,
                "steps": self.take.one("sources", name, "steps", text=wording.steps),
                "final": self.take.mean("sources", name, "final", text=wording.metric),
                "flops": self.take.one("sources", name, "flops", text=human),
            }
            for name, source in self.content["sources"].items()
            if source
        ]

    def certificate(self) -> dict[str, Any] | None:
        content = self.content["certificate"]
        if content is None:
            return None
        verified = content["verified"]
        outputs, symmetry = verified["outputs"], verified["symmetry"]

        def one(*path: Any, text: Any = str) -> Number:
            return self.take.one("certificate", *path, text=text)

        return {
            "arm": content.get("arm", "LEMON"),
            "lossless": content["lossless"],
            "notes": content["notes"],
            "source": content["source"],
            "parameters": [one(side, "parameters", text=lambda n: f"{n:,}") for side in ("source", "target")],
            "sizes": [
                {"name": name, "cells": [one("sizes", name, side) for side in ("source", "target")]}
                for name in content["sizes"]
            ],
            "exactness": [{"name": name, "count": one("exactness", name)} for name in content["exactness"]],
            "outputs": outputs and {
                "passed": outputs["passed"],
                "inputs": outputs["inputs"],
                "difference": one("verified", "outputs", "difference", text=_power),
                "tolerance": one("verified", "outputs", "tolerance", text=_power),
                "tokens_equal": outputs["tokens_equal"],
            },
            "symmetry": symmetry and {name: one("verified", "symmetry", name) for name in ("copies", "twins")},
            "skipped": verified["skipped"],
            "free": ", ".join(f"{name} {_word(value)}" for name, value in content["free"].items()),
            "seed": content["seed"],
        }  # fmt: skip

    def plan(self) -> list[dict[str, Any]]:
        lines = self.content.get("plan") or []
        return [{**line, "count": self.take.one("plan", i, "count")} for i, line in enumerate(lines)]


def _lead(c: Comparison) -> dict[str, Any]:
    """How far an arm is ahead of another, in words."""
    text = wording.steps if c.basis == verdict.STEPS else wording.metric
    where = "" if c.length is None else f"at {wording.steps(c.length)} steps"
    notes = ["steps" if c.basis == verdict.STEPS else where, "one seed" if c.noise is None else ""]
    return {
        "outcome": c.outcome,
        "before": c.bound and f"{c.bound} ",
        "lead": ("+" if c.advantage > 0 else "") + text(c.advantage),
        "noise": "" if c.noise is None else f"± {text(c.noise)}",
        "note": ", ".join(filter(None, notes)),
    }


def _power(value: float) -> str:
    return "0" if value == 0 else f"{value:.1e}"


def _word(value: Any) -> str:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def toml(content: Mapping[str, Any], prefix: str = "") -> str:
    """Settings one a line, with dotted keys; a list of tables as the blocks of experiment.toml.

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
        if isinstance(value, Mapping):
            lines += [toml(value, f"{prefix}{key}.")] if value else []
        elif isinstance(value, (list, tuple)) and value and all(isinstance(entry, Mapping) for entry in value):
            blocks += [f"\n[[{prefix}{key}]]\n{toml(entry)}" for entry in value]
        else:
            lines.append(f"{prefix}{key} = {json.dumps(value, ensure_ascii=False)}")
    return "\n".join([*lines, *blocks])
