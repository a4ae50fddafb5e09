"""Predictions of `lemonx recipe` for the length that a grown model needs: every growth predicted from the others.

python docs/make/prediction.py          print the tables, from the results under docs/results and the paper's growths
python docs/make/prediction.py --write  put them into docs/training.md, and the growths beside the code that uses them
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from statistics import geometric_mean, median

import pages
from growths import measured_growths

from lemonx.training.advice import EVIDENCE, SCRATCH
from lemonx.training.prediction import COVERED, MEASURED, Growth, fit, leave_out
from lemonx_lab.experiments import report
from lemonx_lab.experiments.wording import percent

# Within so much of the length needed, a prediction counts as right.
NEAR = 0.15
PAPER = "paper"


def growths() -> list[Growth]:
    """Those measured here, and the paper's, whose sources trained as long as their targets from scratch."""
    results = sorted((pages.ROOT / "docs" / "results").glob("*/result.json"))
    found = measured_growths(list(map(report.read, results)))
    for one in EVIDENCE:
        length = SCRATCH[one.kind].length
        found.append(Growth(one.share, length, length, name=f"{PAPER}: {one}", ahead=length - one.length))
    return found


def summary(found: Sequence[Growth], title: str) -> str:
    """The quality of the predictions, when a growth is left out and when its whole experiment is."""
    lines = [f"*{title}*, {len(found)} growths:", ""]
    for group, what in ((_name, "the growth"), (_experiment, "its whole experiment")):
        left = leave_out(found, group)
        near = sum(abs(one.off) <= NEAR for one in left)
        ahead = sum(abs(one.ahead_off) <= NEAR for one in left)
        inside = sum(one.low <= one.growth.length <= one.high for one in left)
        lines.append(
            f"- {what} left out: {near} are within {percent(NEAR)} % of the length needed (median error "
            f"{percent(median(abs(one.off) for one in left))} %), {ahead} within {percent(NEAR)} % of the head start "
            f"({percent(median(abs(one.ahead_off) for one in left))} %), and {inside} inside their interval, which is "
            f"meant to hold {percent(COVERED)} %"
        )
    lines.append(
        f"- for comparison, the same part of training from scratch for all: {_same(found, _name)} and "
        f"{_same(found, _experiment)} within {percent(NEAR)} % of the length needed"
    )
    if all(one.error for one in found):
        lines.append(f"- were the law perfect, the seeds alone would leave {_best(found):.0f} within {percent(NEAR)} %")
    return "\n".join(lines)


def _name(one: Growth) -> str:
    return one.name


def _experiment(one: Growth) -> str:
    return one.experiment


def _same(found: Sequence[Growth], group: Callable[[Growth], str]) -> int:
    """The number of lengths within NEAR if every head start is taken to be the mean part of scratch of the others."""
    near = 0
    for one in found:
        mean = geometric_mean(other.ahead / other.scratch for other in found if group(other) != group(one))
        near += abs((1 - mean) * one.scratch / one.length - 1) <= NEAR
    return near


def _best(found: Sequence[Growth]) -> float:
    """The number of lengths that a perfect law would have within NEAR, if seeds scatter those measured as they do."""
    return sum(math.erf(NEAR * one.length / (one.error * math.sqrt(2))) for one in found)


def table(found: Sequence[Growth]) -> str:
    rows = [
        "| growth | source's part | its steps | equals scratch of | head start | length needed | predicted | interval "
        "| error | its experiment left out |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for one, harsher in zip(leave_out(found, _name), leave_out(found, _experiment), strict=True):
        g = one.growth
        cells = [
            g.name, f"{percent(g.share)} %", f"{g.steps:,.0f}", f"{g.scratch:,.0f}",
            f"{g.ahead:,.0f}" + (f" ± {g.error:,.0f}" if g.error else ""), f"{g.length:,.0f}", f"{one.predicted:,.0f}",
            f"{max(0, one.low):,.0f} to {one.high:,.0f}", f"{percent(one.off)} %", f"{percent(harsher.off)} %",
        ]  # fmt: skip
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the tables and the growths")
    found = growths()
    here = [one for one in found if one.experiment != PAPER]
    most = f"Fitted to all of them, a source is worth {fit(found).most:.2f} of training from scratch at most."
    text = "\n\n".join((summary(here, "Measured here"), summary(found, "With the paper's"), most, table(found)))
    if parser.parse_args().write:
        rows = ",\n".join(json.dumps(asdict(one)) for one in found)
        MEASURED.write_text(f"[\n{rows}\n]\n")
        pages.write("prediction", f"\n{text}\n")
    print(text)


if __name__ == "__main__":
    main()
