"""What fsck found in a folder or a file: errors, warnings and notes."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path

from lemonx.checkpoints.plain import JsonValue
from lemonx.errors import LemonxError
from lemonx.guards.limits import MOST_FINDINGS
from lemonx.guards.results import Result

ERROR, WARNING, NOTE = "error", "warning", "note"


@dataclass(frozen=True, repr=False)
class Finding(Result, printer="fsck:print_finding"):
    """An error (the checkpoint is broken), a warning or a note about a file, and what to do."""

    level: str
    file: str
    found: str
    remedy: str


@dataclass(repr=False)
class Report(Result, printer="fsck:print_report"):
    """Everything that was found in a folder, and what was checked.

    `spec`: the family whose rows the tensors were compared with, if there is one; `what`: what it is, if it is no
    ordinary checkpoint; `scanned`: bytes of numbers read; `more`: how many findings there were after the first
    thousand; these are not listed.
    """

    path: Path
    spec: str | None = None
    what: str | None = None
    files: int = 0
    tensors: int = 0
    scanned: int = 0
    findings: list[Finding] = field(default_factory=list)
    more: int = 0

    def add(self, finding: Finding) -> None:
        """List a finding, or only count it if there are already too many to read."""
        if len(self.findings) < MOST_FINDINGS:
            self.findings.append(finding)
        else:
            self.more += 1

    def say(self, error: LemonxError, level: str = ERROR) -> None:
        """List an error under the file that it names."""
        self.add(Finding(level, str(error.file or self.path), error.found, error.remedy))

    @property
    def clean(self) -> bool:
        return not self.more and not any(finding.level == ERROR for finding in self.findings)

    def as_dict(self) -> dict[str, JsonValue]:
        return {**asdict(self), "path": str(self.path), "clean": self.clean}
