"""The parts of the page, as page.html reads them: texts and numbers, in the order in which they are shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lemonx_lab.experiments.report.charts import Style
from lemonx_lab.experiments.report.numbers import Mean, Number
from lemonx_lab.experiments.result_file import PaperFinding, SourceModel


@dataclass(frozen=True)
class Keyed:
    """The name of an arm, beside the classes of its line in the charts."""

    label: str
    look: str


@dataclass(frozen=True)
class ArmRow:
    """A row of a table about an arm; `strong` rows are emphasised."""

    label: str
    style: Style

    @property
    def look(self) -> str:
        return self.style.classes

    @property
    def strong(self) -> bool:
        return self.style.strong


@dataclass(frozen=True)
class MeansSaved:
    steps: Mean
    flops: Mean
    flops_with_source: Mean


@dataclass(frozen=True)
class AnswerRow(ArmRow):
    """Steps to the mark, or words where it is not reached; `strip` draws them."""

    baseline: bool
    reach: Mean | Number | str
    saved: MeansSaved | None
    strip: str


@dataclass(frozen=True)
class ComparisonRow:
    """One comparison of two arms: the lead, what stands before and behind it, and the verdict in a word."""

    task: str
    label: str
    look: str
    word: str
    outcome: str
    before: str
    lead: str
    noise: str
    note: str


@dataclass(frozen=True)
class ComparisonGroup:
    label: str
    look: str
    rows: Sequence[ComparisonRow]


@dataclass(frozen=True)
class FinalsRow(ArmRow):
    """Where an arm starts, where its source ended, and its final metric by length."""

    start: Number
    source: Number | None
    cells: Sequence[Mean | None]


@dataclass(frozen=True)
class Finals:
    lengths: Sequence[str]
    rows: Sequence[FinalsRow]


@dataclass(frozen=True)
class TaskName:
    name: str
    metric: str


@dataclass(frozen=True)
class MeansRow(ArmRow):
    cells: Sequence[Mean | None]


@dataclass(frozen=True)
class FineTuning:
    tasks: Sequence[TaskName]
    rows: Sequence[MeansRow]


@dataclass(frozen=True)
class Charts:
    """Drawings as SVG, empty where there is nothing to draw; `seed` is that of the runs in all but the first."""

    finals: str
    steps: str
    flops: str
    time: str
    rate: str
    legend: Sequence[Keyed]
    seed: int | None


@dataclass(frozen=True)
class CurveTable:
    """The numbers behind a curve, for those who cannot see or hover."""

    label: str
    look: str
    steps: str
    rows: Sequence[Sequence[Number]]


@dataclass(frozen=True)
class RunRow(ArmRow):
    cells: Sequence[Number]


@dataclass(frozen=True)
class SourceRow:
    name: str
    steps: Number
    final: Mean
    flops: Number


@dataclass(frozen=True)
class SizeRow:
    name: str
    cells: Sequence[Number]


@dataclass(frozen=True)
class ExactnessCount:
    name: str
    count: Number


@dataclass(frozen=True)
class OutputsShown:
    passed: bool
    inputs: str
    difference: Number
    tolerance: Number
    tokens_equal: bool | None


@dataclass(frozen=True)
class SymmetryShown:
    copies: Number
    twins: Number


@dataclass(frozen=True)
class CertificateShown:
    """The certificate of the first LEMON target."""

    arm: str
    lossless: bool
    notes: Sequence[str]
    source: SourceModel
    parameters: Sequence[Number]
    sizes: Sequence[SizeRow]
    exactness: Sequence[ExactnessCount]
    outputs: OutputsShown | None
    symmetry: SymmetryShown | None
    skipped: str | None
    free: str
    seed: int


@dataclass(frozen=True)
class PlanRow:
    tensor: str
    rule: str
    exactness: str
    count: Number


@dataclass(frozen=True)
class Section:
    """One result; `lead` is the LEMON arm that is judged, and `overall` its outcome in the words of the summary.

    `saved`, `counted`, `rivals`: the line that answers it.
    """

    key: str
    name: str
    title: str
    claim: str
    cost: str
    command: str
    paper: PaperFinding
    baseline: str
    metric: str
    better: str
    seeds: str
    quick: bool
    mark: Mean
    steps: Number
    outcome: str
    verdict: str
    overall: str
    saved: str
    counted: str
    rivals: str
    lead: AnswerRow | None
    costs_more: bool
    rows: Sequence[AnswerRow]
    claims: Sequence[ComparisonGroup]
    variants: Sequence[ComparisonGroup]
    finals: Finals
    head_starts: Sequence[Sequence[str]]
    forgettings: Sequence[Sequence[str]]
    downstream: FineTuning | None
    tuned: Sequence[ComparisonGroup]
    charts: Charts
    curves: Sequence[CurveTable]
    runs: Sequence[RunRow]
    certificate: CertificateShown | None
    plan: Sequence[PlanRow]
    recipe: str
    sources: Sequence[SourceRow]
    versions: Mapping[str, str]


@dataclass(frozen=True)
class Page:
    title: str
    sections: Sequence[Section]
    versions: str
