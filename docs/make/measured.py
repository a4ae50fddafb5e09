"""Runs a benchmark, and puts what it measures into the pages that show it.

python docs/make/measured.py NAME [OPTION ...]    benchmarks/NAME.py with these options
"""

from __future__ import annotations

import runpy
import sys

import pages

BENCHMARKS = pages.ROOT / "benchmarks"


def main() -> None:
    if len(sys.argv) < 2 or not (script := BENCHMARKS / f"{sys.argv[1]}.py").is_file():
        raise SystemExit((__doc__ or "").strip())
    sys.argv[:] = [str(script), *sys.argv[2:]]
    sys.path.insert(0, str(BENCHMARKS))
    import shown

    code: object = 0
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as stop:  # a benchmark that found a fault still shows its table
        code = stop.code
    for name, text in shown.TABLES.items():
        pages.write(name, text)
    sys.exit(code)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
