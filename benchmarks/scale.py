"""Computes what a growth on many GPUs takes, on paper: bytes read, memory per process.

A folder of headers stands in for the source: config.json and a safetensors file whose tensors have their sizes and no
content (a sparse file takes no disk), so that `lemonx plan` and this script see the real thing.

    python benchmarks/scale.py                          print the tables: Llama 7B to 13B on 8 processes; 8B, 70B, 405B
    python benchmarks/scale.py --table many             one of them: 70B on 64 processes, 405B on 512
    python benchmarks/scale.py --headers FOLDER         leave the folder there, for `lemonx plan FOLDER ...`
    python benchmarks/scale.py --headers FOLDER --model 405B

The times of the second table are its gigabytes over the rate that `python benchmarks/expand.py --record` measured last.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import expand
import shown

SOURCE = {
    **{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 32000, "dtype": "bfloat16"},
    **{"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32},
    **{"intermediate_size": 11008, "rms_norm_eps": 1e-5, "tie_word_embeddings": False},
}
# The shapes of Llama 3: hidden, blocks, heads, FFN.
SHAPES = {"8B": (4096, 32, 32, 14336), "70B": (8192, 80, 64, 28672), "405B": (16384, 126, 128, 53248)}
GROWTH: dict[str, Any] = {"width": 5120, "depth": 40, "heads": 40, "kv_heads": 40, "ffn": 13824}
# Growth by a quarter in width: the blocks of the target, and two meshes, (FSDP, tensor parallelism).
MANY: dict[str, tuple[int, list[tuple[int, int]]]] = {
    "70B": (96, [(64, 1), (8, 8)]),
    "405B": (157, [(512, 1), (64, 8)]),
}
# What a kind of benchmarks/expand.py grows.
GROWTHS = {"width": "width", "depth": "depth", "both": "width and depth"}
# Weights, gradients and Adam's two moments, in float32 each.
STATE = 16


def config_of(model: str) -> dict[str, Any]:
    hidden, blocks, heads, ffn = SHAPES[model]
    return {
        **SOURCE,
        **{"hidden_size": hidden, "num_hidden_layers": blocks, "num_attention_heads": heads, "num_key_value_heads": 8},
        **{"intermediate_size": ffn, "vocab_size": 128256},
    }


def headers(folder: Path, config: dict[str, Any] = SOURCE) -> Path:
    """The source without its numbers: a sparse file with the header of a real one."""
    from lemonx.fsdp import tensors_on_disk
    from lemonx_lab.training.model import empty

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    entries, end = {}, 0
    for name, tensor in tensors_on_disk(empty("causal-lm", config, {})).items():
        size = 2 * tensor.numel()
        entries[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [end, end + size]}
        end += size
    header = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
    header += b" " * (-len(header) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + end)
    return folder


def table(folder: Path, processes: int) -> str:
    """The figures in Markdown."""
    import lemonx
    from lemonx.execution.row_readers import BLOCK
    from lemonx.fsdp import shares

    plan = lemonx.plan(folder, **GROWTH)
    parts, alone = shares(plan, processes), shares(plan, 1)[0]
    source = sum(info.nbytes for info in plan.tensors.values())
    target = sum(math.prod(step.shape) for step in plan.steps)
    block = sum(math.prod(step.shape) for step in plan.steps if step.stack is not None and step.block == 0)
    everyone, most = sum(part.read for part in parts), max(part.read for part in parts)
    rows = [
        ("parameters", f"{source / 2 / 1e9:.2f} billion to {target / 1e9:.2f} billion"),
        ("source, bf16", _gb(source)),
        ("target, bf16", _gb(2 * target)),
        ("read by one process that expands alone", _gb(alone.read)),
        (f"read by each of {processes} processes", f"at most {_gb(most)}"),
        ("read by all together", f"{_gb(everyone)}, {everyone / source:.2f} times the source"),
        ("buffers of an expansion, per thread", f"a few blocks of {BLOCK / 1e6:.1f} MB"),
        (f"weights, gradients, Adam: {STATE} bytes a parameter, in one process", _gb(STATE * target)),
        (f"the same, per process of {processes}", _gb(STATE * math.ceil(target / processes))),
        ("one block gathered (float32), and its gradients", _gb(2 * 4 * block)),
        ("checkpoint of the run: float32 weights and moments", _gb(12 * target)),
    ]  # fmt: skip
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {figure} |" for name, figure in rows)])


def many() -> str:
    """Two growths on many processes: what each reads, sends and holds, and that reads were counted to be just so."""
    from meshes import Mesh, counted, on_paper

    import lemonx

    rate, columns = measured()["lemonx, 1 worker"][0], []
    for model, (depth, meshes) in MANY.items():
        with tempfile.TemporaryDirectory() as name:
            folder = headers(Path(name), config_of(model))
            plan = lemonx.plan(folder, width="5/4x", depth=depth, solve=True)
            source = sum(info.nbytes for info in plan.tensors.values())
            target = sum(math.prod(step.shape) for step in plan.steps)
            column = {"": f"Llama {model} to {target / 1e9:.0f}B, {Mesh(*meshes[0]).processes} processes"}
            column |= {"source, target (bf16)": f"{_gb(source)}, {_gb(2 * target)}"}
            most = everyone = held = 0
            for mesh in (Mesh(*mesh) for mesh in meshes):
                parts = [on_paper(plan, mesh, process) for process in range(mesh.processes)]
                most, everyone, held = max(r for r, _ in parts), sum(r for r, _ in parts), max(h for _, h in parts)
                kind = "FSDP" if mesh.tensor == 1 else f"FSDP over TP of {mesh.tensor}"
                column[f"{kind}: read by each"] = f"at most {_gb(most)}"
                column[f"{kind}: read by all"] = f"{_gb(everyone)}, {everyone / source:.2f} times the source"
                process = mesh.processes // 2 + 5  # in the midst, where copies begin
                found = counted(plan, folder, mesh, process)
                if found != parts[process][0]:
                    raise SystemExit(f"{mesh}: process {process} read {found} bytes, on paper {parts[process][0]}")
                column[f"{kind}: counted"] = f"process {process} read {found:,} bytes, as on paper"
                column[f"{kind}: held by each, bf16"] = _gb(held)
            column["sent by each"] = "0 bytes"
            seconds = held / 1e9 / rate
            column["time to make it, 1 worker"] = f"{seconds:.1f} s"
            column["storage is the limit if it reads slower than"] = (
                f"{most / 1e9 / seconds:.1f} GB/s per process, {everyone / 1e9 / seconds:.0f} GB/s in all"
            )
            columns.append(column)
    lines = [f"| {row} | {' | '.join(column[row] for column in columns)} |" for row in columns[0]]
    return "\n".join([lines[0], "|---|" + "---|" * len(columns), *lines[1:]])


def sizes() -> str:
    """Growth by a quarter in width and in depth, of three sizes: seconds to plan; disk, time, memory to expand."""
    rate = measured()
    lines = [
        "| | source | target | plan | disk | time, 1 worker | time, 2 workers | memory |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for model in SHAPES:
        with tempfile.TemporaryDirectory() as folder:
            headers(Path(folder), config_of(model))
            began = time.perf_counter()
            command = ["plan", folder, "--width", "5/4x", "--depth", str(5 * SHAPES[model][1] // 4), "--json"]
            done = subprocess.run([sys.executable, "-m", "lemonx", *command], capture_output=True, check=True)
            seconds = time.perf_counter() - began
        source, written = json.loads(done.stdout)["bytes"]
        one, two = (_duration(written / 1e9 / rate[f"lemonx, {n}"][0]) for n in ("1 worker", "2 workers"))
        memory = rate["lemonx, 2 workers"][1]
        lines.append(
            f"| Llama {model} | {_gb(source)} | {_gb(written)} | {seconds:.1f} s | {_gb(written)} | {one} | {two} | "
            f"{memory:.2f} GB |"
        )
    return "\n".join(lines)


def speed() -> str:
    """Of each dtype and growth: load+save, and the speed of the others beside it, as a median and its range."""
    found, others = records(), ("copy", "lemonx, 1 worker", "lemonx, 2 workers", "mergekit")
    lines = [f"| | output | load+save | {' | '.join(others)} |", "|---|---|---|" + "---|" * len(others)]
    for dtype, kind in dict.fromkeys(key[:2] for key in found):
        base = found[dtype, kind, "load+save"]
        rows = [found.get((dtype, kind, what)) for what in others]
        ratios = [_range(row) if row else "-" for row in rows]
        rate = float(base["gigabytes"]) / float(base["wall"])
        lines.append(f"| {dtype}, {GROWTHS[kind]} | {base['gigabytes']} GB | {rate:.1f} GB/s | {' | '.join(ratios)} |")
    return "\n".join(lines)


def _range(row: dict[str, str]) -> str:
    """
    >>> _range({"ratio": "0.62", "least": "0.47", "most": "0.7"})
    '62% (47 to 70)'
    """
    ratio, least, most = (100 * float(row[key]) for key in ("ratio", "least", "most"))
    return f"{ratio:.0f}% ({least:.0f} to {most:.0f})"


def measured() -> dict[str, tuple[float, float]]:
    """GB/s and GB of memory of width in bfloat16, the slowest growth, by what was run."""
    return {
        what: (float(row["gigabytes"]) / float(row["wall"]), float(row["anon"]))
        for (dtype, kind, what), row in records().items()
        if (dtype, kind) == ("bfloat16", "width")
    }


def records() -> dict[tuple[str, str, str], dict[str, str]]:
    """The last record of each dtype, kind of growth, and what was run, of those with the ratios of their rounds."""
    with expand.HISTORY.open(newline="") as file:
        return {(row["dtype"], row["kind"], row["what"]): row for row in csv.DictReader(file) if row["rounds"]}


def _duration(seconds: float) -> str:
    """
    >>> _duration(30), _duration(90), _duration(9000)
    ('30 s', '1.5 min', '2.5 h')
    """
    return (
        f"{seconds:.0f} s"
        if seconds < 60
        else f"{seconds / 60:.1f} min"
        if seconds < 3600
        else f"{seconds / 3600:.1f} h"
    )


def _gb(count: float) -> str:
    return f"{count / 1e9:.1f} GB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--headers", type=Path, help="only make the folder of headers")
    parser.add_argument("--model", choices=SHAPES, help="the headers of this model instead of Llama 7B")
    parser.add_argument("--table", action="append", choices=("scale", "many", "sizes", "speed"), help="only this one")
    options = parser.parse_args()
    if options.headers:
        print(headers(options.headers, config_of(options.model) if options.model else SOURCE))
        return
    known = {"scale": lambda: _scale(options.processes), "many": many, "sizes": sizes, "speed": speed}
    for name in options.table or known:
        text = known[name]()
        print(f"{text}\n")
        shown.table(name, text)


def _scale(processes: int) -> str:
    with tempfile.TemporaryDirectory() as folder:
        return table(headers(Path(folder) / "llama-7b"), processes)


if __name__ == "__main__":
    main()
