"""Expands a tiny model of every type of the installed transformers by the command line, and writes docs/families.md.

    python docs/make/survey.py --record survey.json            measure (hours), and print the counts
    python docs/make/survey.py --record survey.json --write    the same, and put the tables into docs/families.md
    python docs/make/survey.py --from survey.json --write      without measuring anything

Types that the record holds are not measured again. `lemonx survey` measures the same.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pages

from lemonx_lab.cli.show_survey import count_lines, counted, exact_text, share_text, task_name
from lemonx_lab.survey.counting import by_task, count, plain, reasons
from lemonx_lab.survey.rows import COLUMNS, Cell, Row

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
os.environ.setdefault("OMP_NUM_THREADS", "1")
_MOST_REASONS = 30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path, help="a file of what was measured")
    parser.add_argument("--from", dest="recorded", type=Path, help="show this record, and measure nothing")
    parser.add_argument("--jobs", type=int, default=1, help="processes at once")
    parser.add_argument("--type", action="append", help="this model type alone; may be given again")
    parser.add_argument("--write", action="store_true", help="put the table into docs/families.md")
    options = parser.parse_args()

    from lemonx_lab.survey.by_command import recorded, survey

    def tell(done: int, total: int, name: str) -> None:
        print(f"{done} of {total}: {name}", file=sys.stderr)

    if options.recorded:
        found = recorded(options.type, options.recorded)
    else:
        found = survey(options.type, options.record, options.jobs, tell)
    print("\n".join(count_lines(found.rows)))
    if options.write:
        from lemonx_lab.survey.pool import all_jobs

        pages.write("survey", survey_markdown(found.rows, found.transformers, len(all_jobs())))


def survey_markdown(rows: Sequence[Row], transformers: str, jobs: int) -> str:
    """The survey for a page: counts, the reasons by how many types they stop, and a folded table for every task.

    `jobs`: how many rows a whole survey has.
    """
    numbers = {why: number for number, (why, _) in enumerate(reasons(rows).most_common(_MOST_REASONS), 1)}
    measured = f" So far {len(rows)} of {jobs} pairs of a model type and a task are measured, drawn at random."
    share = "" if len(rows) == jobs else measured
    lines = [
        f"Measured with transformers {transformers}.{share}",
        "",
        *_count_table(rows),
        "",
        *_reason_table(rows),
        "",
    ]
    for task, of_task in by_task(sorted(rows, key=lambda row: (row.task, row.model_type))).items():
        ran = [row for row in of_task if row.ran]
        lines += [*_folded(f"{task_name(task)}: {len(ran)} of {len(of_task)} run", ran, numbers), ""]
    if silent := sorted((row for row in rows if not row.ran), key=lambda row: row.model_type):
        lines += ["<details><summary>Not run, and why</summary>", ""]
        lines += [f"- `{row.model_type}` ({task_name(row.task)}): {_line(row.why)}" for row in silent]
        lines += ["", "</details>"]
    return "\n".join(lines).rstrip()


def _count_table(rows: Sequence[Row]) -> list[str]:
    head = ["task", "types", "run", "read", *COLUMNS]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for name, found in {"all types, each once": count(rows), **counted(rows)}.items():
        numbers = (found.surveyed, found.ran, found.read, *(exact_text(found, column) for column in COLUMNS))
        lines.append(f"| {task_name(name)} | {' | '.join(map(str, numbers))} |")
    return lines


def _reason_table(rows: Sequence[Row]) -> list[str]:
    found = reasons(rows).most_common(_MOST_REASONS)
    lines = ["Why types do not grow in some column, by how many:", "", "| | types | reason |", "|---|---|---|"]
    return lines + [f"| {number} | {many} | {_line(why)} |" for number, (why, many) in enumerate(found, 1)]


def _folded(title: str, rows: Sequence[Row], numbers: Mapping[str, int]) -> list[str]:
    head = f"| model type | {' | '.join(COLUMNS)} | read |"
    lines = [f"<details><summary>{title}</summary>", "", head, "|---" * (len(COLUMNS) + 2) + "|"]
    for row in rows:
        cells = (_noted(cell, numbers) for cell in row.cells.values())
        lines.append(f"| `{row.model_type}` | {' | '.join(cells)} | {share_text(row)} |")
    return [*lines, "", "</details>"]


def _noted(cell: Cell, numbers: Mapping[str, int]) -> str:
    number = numbers.get(plain(cell.why))
    return f"{cell.kind} ({number})" if cell.why and number is not None else cell.kind


def _line(text: str) -> str:
    """A message of another library as one line of a page."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")[:200]


if __name__ == "__main__":
    main()
