"""How well does `lemonx recipe` predict the length that a grown model needs? Every growth predicted from all others.

python benchmarks/prediction.py          print the table, from the results under docs/results and the paper's growths
python benchmarks/prediction.py --write  put it into docs/training.md, and the growths beside the code that uses them
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

import pages

from lemonx.experiments import report
from lemonx.experiments.head_start import measured_growths
from lemonx.experiments.wording import percent
from lemonx.training.advice import EVIDENCE
from lemonx.training.prediction import COVERED, MEASURED, Growth, leave_one_out

ROOT = Path(__file__).resolve().parents[1]
# Within so much of the length needed, a prediction counts as right.
NEAR = 0.15


def growths() -> list[Growth]:
    """The paper's growths, whose sources trained as long as their targets from scratch, and those measured here."""
    found = [Growth(f"paper: {one}", one.kind, one.share, 1.0, 1 - one.fraction) for one in EVIDENCE]
    for path in sorted((ROOT / "docs" / "results").glob("*/result.json")):
        found += measured_growths(report.read(path))
    # Several experiments share runs, and so a growth: it counts once, and a bound only where nothing better is known.
    seen: dict[tuple[str, ...], Growth] = {}
    for one in sorted(found, key=lambda one: (bool(one.bound), -one.ahead)):
        paper = one.name if one.name.startswith("paper") else ""
        seen.setdefault((paper, one.kind, f"{one.share:.4f}", f"{one.trained:.4f}"), one)
    return [one for one in found if one in seen.values()]


def table(found: list[Growth]) -> str:
    rows = [
        "| growth | source's part | its steps | length needed | predicted | interval | error |",
        "|---|---|---|---|---|---|---|",
    ]
    left = leave_one_out(found)
    for one in left:
        g = one.growth
        needed = f"{'at most ' if g.bound == 'at least' else ''}{percent(one.length)} %"
        rows.append(
            f"| {g.name} | {percent(g.share)} % | {percent(g.trained)} % | {needed} | {percent(one.predicted)} % | "
            f"{percent(one.low)} to {percent(one.high)} % | {percent(one.off)} % |"
        )
    near = sum(abs(one.off) <= NEAR for one in left)
    inside = sum(one.low <= one.length <= one.high for one in left)
    right, meant = percent(NEAR), percent(COVERED)
    summary = (
        f"Each of {len(left)} growths was predicted from all others: {near} are within {right} % of the length "
        f"needed,\nand {inside} inside their interval, which is meant to hold {meant} %. All parts are of training "
        "from scratch."
    )
    return "\n".join([summary, "", *rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the table and the growths")
    found = growths()
    text = table(found)
    if parser.parse_args().write:
        MEASURED.write_text(json.dumps([asdict(one) for one in found], indent=1) + "\n")
        pages.write("docs/training.md", "prediction", f"\n{text}\n")
    print(text)


if __name__ == "__main__":
    main()
