"""The content of the page, in the order in which it is shown; the template only lays it out."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from statistics import fmean

from lemonx.checkpoints.plain import JsonValue
from lemonx.planning.summary import human
from lemonx_lab.experiments import verdict, wording
from lemonx_lab.experiments.report import curves
from lemonx_lab.experiments.report.charts import Style, Text, strip
from lemonx_lab.experiments.report.numbers import Mean, Number, Numbers
from lemonx_lab.experiments.report.parts import (
    AnswerRow,
    CertificateShown,
    ComparisonGroup,
    ComparisonRow,
    CurveTable,
    ExactnessCount,
    Finals,
    FinalsRow,
    FineTuning,
    MeansRow,
    MeansSaved,
    OutputsShown,
    Page,
    PlanRow,
    RunRow,
    Section,
    SizeRow,
    SourceRow,
    SymmetryShown,
    TaskName,
)
from lemonx_lab.experiments.report.styles import other_methods, styles
from lemonx_lab.experiments.result_file import ArmResult, Result
from lemonx_lab.experiments.rivals import answer_line
from lemonx_lab.experiments.verdict import ArmComparison


def page(results: Sequence[Result]) -> Page:
    """The whole page: a summary, then one section per result."""
    others = other_methods(results)
    sections = [_Viewer(content, index, styles(content, others)).view() for index, content in enumerate(results)]
    title = sections[0].title if len(sections) == 1 else f"{len(sections)} experiments"
    return Page(title, sections, results[0]["versions"]["lemonx"] if results else "")


class _Viewer:
    """Looks at one result; `looks` are the styles of its arms by label."""

    def __init__(self, content: Result, index: int, looks: Mapping[str, Style]) -> None:
        self.content, self.looks = content, looks
        self.take = Numbers(content, index)
        self.key = f"r{index}"

    def view(self) -> Section:
        content, experiment = self.content, self.content["experiment"]
        compared = verdict.claims(content)
        outcome, sentence = verdict.answer(content)
        saved, counted, against = answer_line(content)
        rows = self.rows()
        # The arm that the claim is judged by, unless that sets the mark.
        named = [row for row in rows if row.label == experiment.get("reference") != experiment["baseline"]]
        lead = next(iter((*named, *(row for row in rows if row.strong))), None)
        return Section(
            key=self.key,
            name=experiment["name"],
            title=experiment["title"],
            claim=experiment["claim"],
            cost=experiment["cost"],
            command=experiment["command"],
            paper=experiment["paper"],
            baseline=experiment["baseline"],
            metric=wording.name(experiment["metric"]),
            better=experiment["better"],
            seeds=wording.seeds_text(content),
            quick=content["quick"],
            mark=self.take.mean("mark", text=wording.metric),
            steps=self.take.one("steps", text=wording.steps),
            outcome=outcome,
            verdict=sentence,
            overall=verdict.OVERALL[outcome] if compared or outcome != verdict.OPEN else "variants alone",
            saved=saved,
            counted=counted,
            rivals=against,
            lead=lead,
            costs_more=bool(lead and lead.saved and float(lead.saved.flops_with_source.mean.value) < 0),
            rows=rows,
            claims=self.compared([("", c) for c in compared], verdict.CLAIM),
            variants=self.compared([("", c) for c in verdict.variants(content)], verdict.VARIANT, by_other=True),
            finals=self.finals(),
            head_starts=wording.head_start_table(content),
            forgettings=wording.forgetting_table(content),
            downstream=self.downstream(),
            tuned=self.compared(verdict.tuned(content), verdict.TUNED),
            charts=curves.charts(content, self.looks, self.key),
            curves=self.curve_tables(),
            runs=self.runs(),
            certificate=self.certificate(),
            plan=self.plan(),
            recipe=toml(content["recipe"]),
            sources=self.sources(),
            versions=content["versions"],
        )

    def rows(self) -> list[AnswerRow]:
        """The answer: one row per arm."""
        return [self._answer(index, arm) for index, arm in enumerate(self.content["arms"])]

    def _answer(self, index: int, arm: ArmResult) -> AnswerRow:
        baseline = wording.is_baseline(self.content, arm)
        reach: Mean | Number | str
        if baseline:
            reach = self.take.one("steps", text=wording.steps)
        elif arm["reach"]["steps"] is None:
            reach = wording.not_reached(arm)
        else:
            reach = self.take.mean("arms", index, "reach", "steps", text=wording.steps, before=wording.bound(arm))
        return AnswerRow(
            arm["label"], self.looks[arm["label"]], baseline, reach, self._saved(index, arm), self._strip(arm)
        )

    def _saved(self, index: int, arm: ArmResult) -> MeansSaved | None:
        if arm["saved"] is None or not wording.has_savings(self.content):
            return None

        def part(what: wording.Saving) -> Mean:
            before = wording.saved_bound(arm)
            return self.take.mean("arms", index, "saved", what, text=wording.percent, before=before, unit=" %")

        return MeansSaved(part("steps"), part("flops"), part("flops_with_source"))

    def _strip(self, arm: ArmResult) -> str:
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
        self, found: Sequence[tuple[str, ArmComparison]], words: Mapping[str, str], *, by_other: bool = False
    ) -> list[ComparisonGroup]:
        """Comparisons, those of one arm together, or those with one arm."""
        groups: dict[str, list[ComparisonRow]] = {}
        for task, c in found:
            group, label = (c.other, c.arm) if by_other else (c.arm, c.other)
            groups.setdefault(group, []).append(_row(c, task, label, self.looks[label].classes, words[c.outcome]))
        return [ComparisonGroup(label, self.looks[label].classes, rows) for label, rows in groups.items()]

    def finals(self) -> Finals:
        """Final quality by length of the schedule, and where each arm starts."""
        arms = self.content["arms"]
        lengths = sorted({at["steps"] for arm in arms for at in arm["at"]})
        rows: list[FinalsRow] = []
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
            rows.append(FinalsRow(arm["label"], self.looks[arm["label"]], start, source, cells))
        return Finals([wording.steps(n) for n in lengths], rows)

    def downstream(self) -> FineTuning | None:
        arms = self.content["arms"]
        tasks = list(dict.fromkeys(task for arm in arms for task in arm["downstream"]))
        if not tasks:
            return None
        metrics = [next(a["downstream"][task]["metric"] for a in arms if task in a["downstream"]) for task in tasks]
        rows = [
            MeansRow(
                arm["label"],
                self.looks[arm["label"]],
                [
                    self.take.mean("arms", index, "downstream", task, text=wording.metric)
                    if task in arm["downstream"]
                    else None
                    for task in tasks
                ],
            )
            for index, arm in enumerate(arms)
        ]
        return FineTuning([TaskName(*both) for both in zip(tasks, map(wording.name, metrics), strict=True)], rows)

    def curve_tables(self) -> list[CurveTable]:
        found: list[CurveTable] = []
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
            found.append(CurveTable(curve["arm"], look, wording.steps(curve["steps"]), rows))
        return found

    def runs(self) -> list[RunRow]:
        columns = (
            ("seed", str),
            ("steps", wording.steps),
            ("start", wording.metric),
            ("final", wording.metric),
            ("flops", human),
            ("seconds", curves.seconds),
        )
        return [
            RunRow(
                arm["label"],
                self.looks[arm["label"]],
                [self.take.one("arms", index, "runs", i, name, text=text) for name, text in columns],
            )
            for index, arm in enumerate(self.content["arms"])
            for i in range(len(arm["runs"]))
        ]

    def sources(self) -> list[SourceRow]:
        return [
            SourceRow(
                name,
                self.take.one("sources", name, "steps", text=wording.steps),
                self.take.mean("sources", name, "final", text=wording.metric),
                self.take.one("sources", name, "flops", text=human),
            )
            for name, source in self.content["sources"].items()
            if source
        ]

    def certificate(self) -> CertificateShown | None:
        content = self.content["certificate"]
        if content is None:
            return None

        def one(*path: str, text: Text = str) -> Number:
            return self.take.one("certificate", *path, text=text)

        measured, symmetry = content["verified"]["outputs"], content["verified"]["symmetry"]
        outputs = measured and OutputsShown(
            measured["passed"],
            measured["inputs"],
            one("verified", "outputs", "difference", text=_power),
            one("verified", "outputs", "tolerance", text=_power),
            measured["tokens_equal"],
        )
        sides = ("source", "target")
        return CertificateShown(
            arm=content.get("arm", "LEMON"),
            lossless=content["lossless"],
            notes=content["notes"],
            source=content["source"],
            parameters=[one(side, "parameters", text=lambda n: f"{n:,}") for side in sides],
            sizes=[SizeRow(name, [one("sizes", name, side) for side in sides]) for name in content["sizes"]],
            exactness=[ExactnessCount(name, one("exactness", name)) for name in content["exactness"]],
            outputs=outputs,
            symmetry=symmetry and SymmetryShown(*(one("verified", "symmetry", name) for name in ("copies", "twins"))),
            skipped=content["verified"]["skipped"],
            free=", ".join(f"{name} {_word(value)}" for name, value in content["free"].items()),
            seed=content["seed"],
        )

    def plan(self) -> list[PlanRow]:
        lines = self.content.get("plan") or []
        return [
            PlanRow(line["tensor"], line["rule"], line["exactness"], self.take.one("plan", i, "count"))
            for i, line in enumerate(lines)
        ]


def _row(c: ArmComparison, task: str, label: str, look: str, word: str) -> ComparisonRow:
    """How far an arm is ahead of another, in words."""
    text = wording.steps if c.basis == verdict.STEPS else wording.metric
    where = "" if c.length is None else f"at {wording.steps(c.length)} steps"
    notes = ["steps" if c.basis == verdict.STEPS else where, "one seed" if c.noise is None else ""]
    return ComparisonRow(
        task,
        label,
        look,
        word,
        outcome=c.outcome,
        before=c.bound and f"{c.bound} ",
        lead=("+" if c.advantage > 0 else "") + text(c.advantage),
        noise="" if c.noise is None else f"± {text(c.noise)}",
        note=", ".join(filter(None, notes)),
    )


def _power(value: float) -> str:
    return "0" if value == 0 else f"{value:.1e}"


def _word(value: bool | float | str) -> str:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


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
