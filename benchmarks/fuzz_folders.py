"""Damages whole folders and runs real commands on them, and counts what came of it: `fuzz.py --folders`.

Commands run in processes forked from one that has made the imports: one that may load a model in a process of its
own, others in one that runs forkserver.KEPT of them. Each is watched from outside: exit code, both streams, CPU time,
memory at its peak above what it began with, and every file around it. What a run may not do is in
tests/fuzzing_folders.py. A run that does it is written to a file, one case a line, and the search goes on;
`--case FILE` runs these cases again, each in a process of its own.
"""

from __future__ import annotations

import collections
import contextlib
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

BATCH = 1000  # after each, every file is read and must hold what it held


@dataclass
class Row:
    """What came of the runs of a target or a command."""

    runs: int = 0
    codes: collections.Counter[int] = field(default_factory=collections.Counter)
    seconds: float = 0.0
    slowest: float = 0.0
    grown: int = 0

    def add(self, code: int, seconds: float, grown: int) -> None:
        self.runs += 1
        self.codes[code] += 1
        self.seconds += seconds
        self.slowest = max(self.slowest, seconds)
        self.grown = max(self.grown, grown)

    def line(self, name: str) -> str:
        codes = "".join(f"{self.codes[code]:>6}" for code in CODES)
        means = f"{self.seconds / self.runs:>8.2f} {self.slowest:>8.2f} {self.grown / 1e6:>6.0f}"
        return f"{name:<24} {self.runs:>6} {codes} {means}"


CODES = (0, 1, 2, 3, 4, 5, 6)


def fuzz(runs: int, seed: int, failed: Path) -> list[str]:
    """So many runs: the lines of a table, or the end of the program if one of them did what it may not."""
    import fuzzing_cases
    import fuzzing_folders

    targets, commands = collections.defaultdict[str, Row](Row), collections.defaultdict[str, Row](Row)
    bad, done = list[str](), 0
    with tempfile.TemporaryDirectory() as parent:
        arena = fuzzing_folders.Arena(Path(parent).resolve() / "arena")
        server, began = arena.serve(), time.perf_counter()

        def one(case: fuzzing_folders.Case) -> None:
            nonlocal done
            ended = arena.run(server, case, kept=True)
            done += 1
            for rows, name in ((targets, case.target), (commands, case.command)):
                rows[name].add(ended.done.code, ended.done.seconds, ended.done.grown)
            if ended.problems:
                bad.append(f"{case.arguments}: {', '.join(ended.problems)}"[:300])
                print(f"{bad[-1]}\n{ended.done.err[-3000:]}", file=sys.stderr, flush=True)
                with failed.open("a") as file:
                    file.write(case.as_json() + "\n")

        with contextlib.suppress(KeyboardInterrupt):  # what was run until then is a record too
            while done < runs and len(bad) < 200:
                for name, share in fuzzing_cases.SHARES.items():
                    search(fuzzing_cases.cases(arena, name), one, share.runs * BATCH // 100, seed * 10**6 + done)
                assert not arena.changed(), arena.changed()
                print(f"{done} runs, {time.perf_counter() - began:.0f} s, {len(bad)} bad", file=sys.stderr, flush=True)
        server.close()
    lines = list(table(targets, commands))
    if bad:
        print(*lines, sep="\n")
        sys.exit(f"{len(bad)} of {done} runs did what they may not: see {failed}, and --case {failed}")
    limits = f"over {fuzzing_folders.SECONDS:.0f} s of CPU time, none over {fuzzing_folders.MEMORY / 1e6:.0f} MB"
    return [*lines, f"{done} runs: no traceback, no run {limits}, nothing outside OUTPUT touched"]


def search(cases: object, one: object, count: int, seed: int) -> None:
    import hypothesis

    once = hypothesis.given(case=cases)(one)  # pyright: ignore
    once = hypothesis.settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),  # pyright: ignore[reportArgumentType]
    )(once)
    hypothesis.seed(seed)(once)()


def table(targets: dict[str, Row], commands: dict[str, Row]) -> Iterator[str]:
    """Both tables: by what was broken, and by the command that was run."""
    codes = "".join(f"{code:>6}" for code in CODES)
    for title, rows in (("broken", targets), ("command", commands)):
        yield f"{title:<24} {'runs':>6} {codes} {'mean s':>8} {'most s':>8} {'MB':>6}"
        yield from (row.line(name) for name, row in sorted(rows.items(), key=lambda item: -item[1].runs))
        yield ""


def again(file: Path) -> None:
    """Run cases that were written down, and print what each does."""
    import fuzzing_folders

    with tempfile.TemporaryDirectory() as parent:
        arena = fuzzing_folders.Arena(Path(parent).resolve() / "arena")
        server = arena.serve()
        for text in file.read_text().splitlines():
            case = fuzzing_folders.Case.from_json(text)
            ended = arena.run(server, case)
            said = f"{ended.done.out[-300:]}{ended.done.err[-3000:]}"
            print(f"{str(case.arguments)[:300]}: {ended.done.code} {ended.problems}\n{said}")
        server.close()
