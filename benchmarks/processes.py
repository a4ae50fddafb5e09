"""A command in a process of its own: what it takes of the CPU, of the clock and of memory."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import expand as bench
import shown

# CPU seconds, wall seconds, gigabytes.
Cost = tuple[float, float, float]
STORIES = shown.ROOT / "tests" / "data" / "stories260K"


def command(*words: str, **environment: str) -> Cost:
    """CPU seconds, wall seconds and peak gigabytes of a Python process: of memory that is its own, files apart."""
    began, peak = time.perf_counter(), 0.0
    process = subprocess.Popen([sys.executable, *words], stdout=subprocess.DEVNULL, env={**os.environ, **environment})
    while (ended := os.wait4(process.pid, os.WNOHANG))[0] == 0:
        peak = max(peak, bench.anonymous(process.pid))
        time.sleep(0.01)
    _, status, used = ended
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(words)}: exit code {process.returncode}")
    return used.ru_utime + used.ru_stime, time.perf_counter() - began, peak
