"""Expands a tiny model of every type of the installed transformers by the command line, and writes docs/families.md.

    python benchmarks/survey.py --record survey.json            measure (hours), and print the counts
    python benchmarks/survey.py --record survey.json --write    the same, and put the tables into docs/families.md
    python benchmarks/survey.py --from survey.json --write      without measuring anything

Types that the record holds are not measured again. `lemonx survey` measures the same.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import pages

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
os.environ.setdefault("OMP_NUM_THREADS", "1")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path, help="a file of what was measured")
    parser.add_argument("--from", dest="recorded", type=Path, help="show this record, and measure nothing")
    parser.add_argument("--jobs", type=int, default=1, help="processes at once")
    parser.add_argument("--type", action="append", help="this model type alone; may be given again")
    parser.add_argument("--write", action="store_true", help="put the table into docs/families.md")
    options = parser.parse_args()

    from lemonx_lab.cli.show_survey import count_lines, survey_markdown
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

        pages.write("docs/families.md", "survey", survey_markdown(found.rows, found.transformers, len(all_jobs())))


if __name__ == "__main__":
    main()
