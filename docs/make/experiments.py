"""The experiments' results in docs/: tables and figures from the result.json files that `lemonx compare` wrote.

lemonx compare vit -o docs/results/vit       run it (what is in the cache is not run again), and keep its result
python docs/make/experiments.py             print the tables of all results under docs/results
python docs/make/experiments.py --write     put them into docs/experiments.md
python docs/make/experiments.py --report    write docs/report.html: all results on one page, with their curves
"""

from __future__ import annotations

import argparse
import re

import pages

from lemonx_lab.experiments import compare, report, verdict, wording
from lemonx_lab.experiments.answer import forgettings
from lemonx_lab.experiments.result_file import LEMON, SCRATCH, Result
from lemonx_lab.experiments.verdict import answer_line

DOCS = pages.ROOT / "docs"
RESULTS = DOCS / "results"


def section(content: Result) -> str:
    """One experiment in Markdown."""
    experiment = content.experiment
    lines = [
        f"## {experiment.name}: {experiment.title}",
        "",
        f"Claim: {experiment.claim} In the paper: {experiment.paper.finding}",
        "",
        f"**{headline(content)}** Mark: {wording.mark_text(content)}; {wording.seeds_text(content)}. "
        f"`lemonx compare {experiment.name}`",
        "",
        *table(content),
        "",
        *more_tables(content),
    ]
    return "\n".join(lines).rstrip()


def answers(results: list[Result]) -> list[str]:
    """A table with a line for each experiment: what is saved against scratch, and who is ahead of whom."""
    rows = []
    for content in results:
        name = content.experiment.name
        anchor = re.sub(r"[^\w -]", "", f"{name}: {content.experiment.title}".lower()).replace(" ", "-")
        rows.append([f"[{name}](#{anchor})", *answer_line(content)])
    return markdown(["experiment", "steps saved", "source counted", "against the best other method"], rows)


def headline(content: Result) -> str:
    """The fate of the claim, or of each variant where variants of LEMON are compared."""
    found = [] if forgettings(content) else verdict.variants(content)
    said = [verdict.answer(content)[1]] if verdict.claims(content) or not found else []
    for other in dict.fromkeys(c.other for c in found):
        of = [c for c in found if c.other == other]
        by = {word: [c.arm for c in of if verdict.VARIANT[c.outcome] == word] for word in verdict.VARIANT.values()}
        parts = [f"{word}: {' / '.join(arms)}" for word, arms in by.items() if arms]
        said.append(f"Against {other}, {'; '.join(parts)}.")
    return " ".join(said)


def more_tables(content: Result) -> list[str]:
    """Tables of the worth of each source and, beyond the paper's own questions, of the distance between finals.

    Where the question is what is forgotten, that alone.
    """
    names, *rows = wording.forgetting_table(content)
    if rows:
        return [*markdown(names, rows), ""]
    names, *rows = wording.head_start_table(content)
    lines = [*markdown(names, rows), ""] if rows else []
    steps_are_asked = content.experiment.name in PAPER and wording.has_savings(content)
    if steps_are_asked or not (pairs := finals(content)):
        return lines
    better = f"{wording.name(content.experiment.metric)} is better by"
    rows = [
        [
            c.arm,
            c.other,
            wording.steps(c.length or 0),
            f"{wording.metric(c.advantage)}{_noise(c)}",
            verdict.VARIANT[c.outcome],
        ]
        for c in pairs
    ]
    return [*lines, *markdown(["method", "against", "steps", better, "that is"], rows), ""]


def finals(content: Result) -> list[verdict.ArmComparison]:
    """Variants, and other methods against LEMON arms from their source, by final quality at equal lengths."""
    first = verdict.references(content)
    pairs = [(arm, first[arm.source]) for arm in verdict.challengers(content)]
    others = [arm for arm in content.arms if arm.method not in (LEMON, SCRATCH)]
    pairs += [(arm, other) for other in others for arm in verdict.lemons(content) if arm.source == other.source]
    return [
        verdict.at_equal_length(content, arm, other, length)
        for arm, other in pairs
        if arm is not other
        for length in sorted(verdict.common_lengths(arm, other))
    ]


def _noise(c: verdict.ArmComparison) -> str:
    return wording.plus_minus(c.noise, wording.metric)


def markdown(names: list[str], rows: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (names, ["---"] * len(names), *rows)]


def table(content: Result) -> list[str]:
    saved: dict[wording.Saving, str] = {
        "steps": "steps saved",
        "flops": "FLOPs saved",
        "flops_with_source": "source counted",
    }
    names, *rows = wording.table(content, saved)
    return markdown(names, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write docs/experiments.md")
    parser.add_argument("--report", action="store_true", help="write docs/report.html")
    options = parser.parse_args()
    results = [report.read(RESULTS / name) for name in ORDER]
    if options.report:
        print(report.write(results, DOCS / "report.html"))
        return
    text = "\n\n".join(map(section, results))
    print(text)
    if options.write:
        pages.write("answers", "\n".join(answers(results)) + "\n")
        pages.write("results", f"\n{text}\n")


# As in the paper, and what goes beyond it last.
PAPER = ("vit-best-rate", "vit", "bert", "lm", "ligo", "glue")
KINDS = ("-bert", "-vit")
STARTS = tuple(
    f"{question}{kind}" for question in ("start", "start-widths", "free-parameters") for kind in ("", *KINDS)
)
DEPTH = ("depth-alone", "depth-alone-six", "depth-alone-lesa")
DEPTH += tuple(f"depth-alone{kind}{size}" for kind in KINDS for size in ("-four", ""))
BEYOND = ("baselines", "baselines-large", "upcycling", "muon", "muon-large")
INSIDE = tuple(f"growth-inside{size}" for size in ("", "-small", "-large", "-long", "-long-ramp", "-shakespeare"))
FORGETTING = ("without-forgetting", "without-forgetting-large")
ORDER = (*PAPER, *STARTS, *DEPTH, *BEYOND, *INSIDE, *FORGETTING)
assert {*ORDER, "demo"} == set(compare.names())

if __name__ == "__main__":
    main()
