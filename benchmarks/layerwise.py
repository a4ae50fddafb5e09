"""How much memory does `verify --layerwise` take? Beside it: what the models would take in memory.

Builds a synthetic Llama whose expansion (wider and deeper) takes about --gb gigabytes in bf16, expands it, and verifies
it in a process of its own. Printed: the most weights in memory at once, the largest block and the larger model, all in
float64; and the peak of anonymous memory of that process above what its imports take.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import shown

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, nargs="+", default=[1.0, 2.0])
    parser.add_argument("--dir", help="where to put the files: several times --gb, removed at the end")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measured(*options.child)))
        return
    lines = ["  output GB   model f64   block f64   weights at once   anon GB   seconds   blocks   largest difference"]
    print(lines[0])
    for gigabytes in options.gb:
        with tempfile.TemporaryDirectory(prefix="lemonx-bench-", dir=options.dir) as folder:
            row = report(Path(folder), gigabytes)
        lines.append(
            f"{row['output']:>11.2f} {row['model']:>11.2f} {row['block']:>11.2f} {row['weights']:>17.2f} "
            f"{row['anon']:>9.2f} {row['seconds']:>9.0f} {row['blocks']:>8} {row['difference']:>20.1e}"
        )
        print(lines[-1], flush=True)
    shown.printed("layerwise", lines)


def report(folder: Path, gigabytes: float) -> dict[str, float]:
    import expand as bench

    import lemonx

    bench.build(folder / "small", "bfloat16", "both", gigabytes)
    layers = json.loads((folder / "small" / "config.json").read_text())["num_hidden_layers"]
    # Twice as wide: every tensor is then exact in bf16, so no second run measures the source's noise.
    lemonx.expand(folder / "small", folder / "large", width=2 * bench.WIDTH, depth=layers + 2, verify=False)
    command = [sys.executable, __file__, "--child", str(folder / "small"), str(folder / "large")]
    child = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    return {"output": bench.size_of(folder / "large") / 1e9, **json.loads(child.stdout)}


def measured(small: str, large: str) -> dict[str, float]:
    import expand as bench
    import transformers  # noqa: F401  (imported before the clock starts)

    from lemonx import api

    stop, base = threading.Event(), bench.anonymous(os.getpid())
    peak = [base]

    def watch() -> None:
        while not stop.wait(0.05):
            peak.append(max(peak[-1], bench.anonymous(os.getpid())))

    watcher = threading.Thread(target=watch)
    watcher.start()
    began = time.perf_counter()
    found = api.verify(small, large, layerwise=True)
    took = time.perf_counter() - began
    stop.set()
    watcher.join()
    layers = found.layers
    assert found.passed and layers is not None and layers.first is None, found.reason()
    return {
        "model": layers.model / 1e9,
        "block": layers.block / 1e9,
        "weights": layers.weights / 1e9,
        "anon": peak[-1] - base,
        "seconds": took,
        "blocks": len(layers.places),
        "difference": max(place.difference for place in layers.places),
    }


if __name__ == "__main__":
    main()
