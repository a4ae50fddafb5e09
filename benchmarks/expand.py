"""How fast, and in how much memory, is an expansion? Beside it: a file copy, and safetensors' own load and save.

Builds a synthetic Llama whose expansion takes about --gb gigabytes, then, round after round in one run, does
each of these in a process of its own; the median over the rounds counts, beside the best, and a ratio to load+save is
taken within each round:

    copy        shutil.copyfile of the output's bytes
    load+save   safetensors load_file and save_file of the output
    lemonx      plan, expansion and writer, without verification, with 1 and with 2 workers
    mergekit    for depth, where it is installed: its passthrough of all blocks twice, which stacks and copies only

Wall and CPU seconds leave out imports and fsync, which lemonx alone does and the disk alone decides. On a shared
machine GB per CPU second is the robust figure. `anon` is the peak of memory without the page cache (Pss_Anon),
with that of workers, torch's own 0.15 GB included. `--memory 1 10` measures that alone, against the size of the output.
"""

from __future__ import annotations

import argparse
import csv
import json
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import shown

HISTORY = Path(__file__).parent / "history.csv"
VOCAB = 32000
WIDTH, FFN, HEADS, KV_HEADS, HEAD_DIM = 2048, 5632, 16, 4, 128
# Half as wide again: a third of what a matrix reads is then zero, so a third of its entries are random.
WIDER = 3072
ITEM = {"bfloat16": 2, "float32": 4}
# By what was done: seconds, and gigabytes of memory.
Figures = dict[str, dict[str, float]]


def main() -> None:
    options = parse()
    if options.child:
        print(json.dumps(CHILDREN[options.child](options.dir, options.kind, options.threads)))
        return
    parent = Path(options.dir) if options.dir else None
    with tempfile.TemporaryDirectory(prefix="lemonx-bench-", dir=parent) as folder:
        if options.memory:
            return shown.printed("memory", memory(Path(folder), options.memory))
        for dtype in options.dtype:
            for kind in options.kind:
                report(Path(folder), dtype, kind, options)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=4.0, help="size of the output")
    parser.add_argument("--dtype", nargs="+", choices=ITEM, default=list(ITEM))
    parser.add_argument("--kind", nargs="+", choices=["width", "depth", "both"], default=["width", "depth", "both"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--memory", nargs="+", type=float, metavar="GB", help="only memory, against these sizes")
    parser.add_argument("--dir", help="where to put the files: several times --gb, removed at the end")
    parser.add_argument("--record", action="store_true", help=f"append to {HISTORY.name}")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--threads", type=int, default=1, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        options.kind = options.kind[0]
    return options


def report(folder: Path, dtype: str, kind: str, options: argparse.Namespace) -> None:
    """Measure one combination, print its table, remove its files."""
    try:
        build(folder / "source", dtype, kind, options.gb)
        # The first expansion makes the file that copy and load+save start from; it also warms the page cache.
        run("lemonx", folder, kind, 2)
        (folder / "out").rename(folder / "expanded")
        rounds = [measure(folder, kind) for _ in range(options.rounds)]
        gigabytes = size_of(folder / "expanded") / 1e9
    finally:
        for path in folder.iterdir():
            shutil.rmtree(path)
    show(rounds, dtype, kind, gigabytes)
    if options.record:
        record(rounds, dtype, kind, gigabytes)


def memory(folder: Path, sizes: list[float]) -> list[str]:
    """The peak of anonymous memory of one expansion of each size, width and depth, bfloat16."""
    lines = ["output GB   anon GB, 1 worker   anon GB, 2 workers"]
    print(lines[0])
    for size in sizes:
        build(folder / "source", "bfloat16", "both", size)
        found = []
        for threads in (1, 2):
            found.append(run("lemonx", folder, "both", threads)["anon"])
            written = size_of(folder / "out") / 1e9
            shutil.rmtree(folder / "out")
        shutil.rmtree(folder / "source")
        lines.append(f"{written:>9.2f} {found[0]:>19.2f} {found[1]:>20.2f}")
        print(lines[-1], flush=True)
    return lines


def measure(folder: Path, kind: str) -> Figures:
    """One round: everything once."""
    rows = [
        ("copy", "copy", 1),
        ("load+save", "load_save", 1),
        ("lemonx, 1 worker", "lemonx", 1),
        ("lemonx, 2 workers", "lemonx", 2),
    ]
    if kind == "depth" and find_spec("mergekit"):
        rows.append(("mergekit", "mergekit", 1))
    found = {}
    for name, child, threads in rows:
        found[name] = run(child, folder, kind, threads)
        shutil.rmtree(folder / "out")
    return found


def over_rounds(rounds: list[Figures], key: str, name: str) -> list[float]:
    """One figure of every round, in order of size."""
    return sorted(found[name][key] for found in rounds)


def ratios(rounds: list[Figures], name: str) -> list[float]:
    """The speed beside load+save in each round, in order of size."""
    return sorted(found["load+save"]["wall"] / found[name]["wall"] for found in rounds)


def run(child: str, folder: Path, kind: str, threads: int) -> dict[str, float]:
    """What a process of its own measures, and the peak of its anonymous memory, of which this one takes samples."""
    os.sync()  # what an earlier round wrote is not to be written during this one
    peak = 0.0
    command = [sys.executable, __file__, "--child", child, "--dir", str(folder), "--kind", kind]
    with subprocess.Popen([*command, "--threads", str(threads)], stdout=subprocess.PIPE) as process:
        while process.poll() is None:
            time.sleep(0.05)  # counting pages takes a millisecond, and holds up who is counted
            peak = max(peak, anonymous(process.pid))
        assert process.stdout and process.returncode == 0, f"{child} failed"
        return {**json.load(process.stdout), "anon": peak}


def anonymous(pid: int) -> float:
    """Memory without the page cache of a process and its workers, in GB; what these share counts once."""
    total = 0.0
    try:
        workers = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        for each in (pid, *workers):
            lines = Path(f"/proc/{each}/smaps_rollup").read_text().splitlines()
            total += next((int(line.split()[1]) * 1024 / 1e9 for line in lines if line.startswith("Pss_Anon")), 0.0)
    except OSError:  # no /proc, or no process any more
        pass
    return total


def show(rounds: list[Figures], dtype: str, kind: str, gigabytes: float) -> None:
    print(f"\n{dtype}, {kind}: {gigabytes:.2f} GB written, {len(rounds)} rounds")
    print("                      median: GB/s  GB/CPU-s  of load+save   its range     best: GB/s   anon GB")
    for name in rounds[0]:
        wall, cpu = over_rounds(rounds, "wall", name), over_rounds(rounds, "cpu", name)
        found = ratios(rounds, name)
        print(
            f"{name:<18} {gigabytes / median(wall):>16.2f} {gigabytes / median(cpu):>9.2f} {median(found):>13.0%} "
            f"{found[0]:>6.0%} to{found[-1]:>5.0%} {gigabytes / wall[0]:>14.2f} "
            f"{over_rounds(rounds, 'anon', name)[-1]:>9.2f}",
            flush=True,
        )


def record(rounds: list[Figures], dtype: str, kind: str, gigabytes: float) -> None:
    """Append the medians, with the range of the ratio and the best round; records of before have best rounds alone."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=HISTORY.parent)
    rows = []
    for name in rounds[0]:
        wall, found = over_rounds(rounds, "wall", name), ratios(rounds, name)
        figures = {
            "wall": median(wall),
            "cpu": median(over_rounds(rounds, "cpu", name)),
            "anon": over_rounds(rounds, "anon", name)[-1],
            "best": wall[0],
            "ratio": median(found),
            "least": found[0],
            "most": found[-1],
        }
        rows.append(
            {
                "when": datetime.now(UTC).isoformat(timespec="minutes"),
                "commit": commit.stdout.strip(),
                "machine": f"{platform.machine()} {os.cpu_count()} cores",
                "dtype": dtype,
                "kind": kind,
                "gigabytes": round(gigabytes, 3),
                "what": name,
                **{key: round(value, 3) for key, value in figures.items()},
                "rounds": len(rounds),
            }
        )
    new = not HISTORY.exists()
    with HISTORY.open("a", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        if new:
            writer.writeheader()
        writer.writerows(rows)


def build(folder: Path, dtype: str, kind: str, gigabytes: float) -> None:
    """A Llama with random weights whose expansion takes about `gigabytes`."""
    import torch

    from lemonx.checkpoints import CheckpointWriter
    from lemonx.checkpoints.safetensors_file import dtype_name, torch_dtype
    from lemonx.execution import noise

    scale = WIDER / WIDTH if kind in ("width", "both") else 1.0
    deeper = 2 if kind in ("depth", "both") else 1
    width, ffn = int(WIDTH * scale), int(FFN * scale)
    layer = 2 * width * width + 2 * width * int(KV_HEADS * HEAD_DIM * scale) + 3 * width * ffn
    layers = max(1, round((gigabytes * 1e9 / ITEM[dtype] - 2 * VOCAB * width) / layer / deeper))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": WIDTH,
        "intermediate_size": FFN,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCAB,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "dtype": dtype,
    }
    kind_name = dtype_name(getattr(torch, dtype))
    entries = [(name, kind_name, shape) for name, shape in shapes(layers).items()]
    with CheckpointWriter(folder, entries, max_shard_size=10**9) as writer:
        for name, stored, shape in entries:
            weight = torch.empty(shape, dtype=torch_dtype(stored))
            noise.normal(weight, 0.02, noise.generator(0, name, 0))
            writer.write(name, 0, weight + 1 if len(shape) == 1 else weight)
        writer.add_text("config.json", json.dumps(config))


def shapes(layers: int) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, WIDTH)}
    for index in range(layers):
        layer = f"model.layers.{index}"
        found |= {
            f"{layer}.input_layernorm.weight": (WIDTH,),
            f"{layer}.self_attn.q_proj.weight": (HEADS * HEAD_DIM, WIDTH),
            f"{layer}.self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, WIDTH),
            f"{layer}.self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, WIDTH),
            f"{layer}.self_attn.o_proj.weight": (WIDTH, HEADS * HEAD_DIM),
            f"{layer}.post_attention_layernorm.weight": (WIDTH,),
            f"{layer}.mlp.gate_proj.weight": (FFN, WIDTH),
            f"{layer}.mlp.up_proj.weight": (FFN, WIDTH),
            f"{layer}.mlp.down_proj.weight": (WIDTH, FFN),
        }
    return found | {"model.norm.weight": (WIDTH,), "lm_head.weight": (VOCAB, WIDTH)}


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def warm(folder: str) -> None:
    """Touch as much memory as will be written, and free it again.

    In a virtual machine free memory may have gone back to the host, and page cache in it then costs up to 4 s of
    CPU time a gigabyte, where memory that was used a moment ago costs 0.3: without this, the order decides. It goes
    back within seconds, so the longer a run takes the more it pays.
    """
    path, block = Path(folder, "warm"), os.urandom(1 << 21)
    with path.open("wb") as file:
        for _ in range(int(1.2 * size_of(Path(folder, "expanded"))) >> 21):
            file.write(block)
    path.unlink()


def timed(folder: str, work: Callable[[], Any]) -> dict[str, float]:
    """Seconds of wall and CPU time, and those of the latter that the kernel took."""
    warm(folder)
    wall, before = time.perf_counter(), os.times()
    work()
    wall, after = time.perf_counter() - wall, os.times()
    kernel = after.system + after.children_system - before.system - before.children_system
    return {
        "wall": wall,
        "cpu": kernel + after.user + after.children_user - before.user - before.children_user,
        "kernel": kernel,
    }


def run_copy(folder: str, kind: str, threads: int) -> dict[str, float]:
    out = Path(folder, "out")
    out.mkdir()
    files = sorted(Path(folder, "expanded").glob("*.safetensors"))
    return timed(folder, lambda: [shutil.copyfile(path, out / path.name) for path in files])


def run_load_save(folder: str, kind: str, threads: int) -> dict[str, float]:
    import torch
    from safetensors.torch import load_file, save_file

    torch.set_num_threads(1)
    out = Path(folder, "out")
    out.mkdir()
    files = sorted(Path(folder, "expanded").glob("*.safetensors"))
    return timed(folder, lambda: [save_file(load_file(path), out / path.name) for path in files])


def run_lemonx(folder: str, kind: str, threads: int) -> dict[str, float]:
    import torch  # noqa: F401  (imported before the clock starts, as for load+save)

    from lemonx.checkpoints import Checkpoint, CheckpointWriter
    from lemonx.execution.runner import run_plan
    from lemonx.options.declared import Growth
    from lemonx.planning.plan import make_plan
    from lemonx.planning.request import asked

    source = Path(folder, "source")
    layers = json.loads((source / "config.json").read_text())["num_hidden_layers"]
    sizes: dict[str, Any] = {"width": WIDER} if kind in ("width", "both") else {}
    if kind in ("depth", "both"):
        sizes["depth"] = 2 * layers
    writers = []

    def work() -> None:
        with Checkpoint.open(source) as checkpoint:
            plan = make_plan(checkpoint, asked(Growth(**sizes)))
            entries = [(step.name, step.dtype, step.shape) for step in plan.steps]
            writers.append(CheckpointWriter(Path(folder, "out"), entries, max_shard_size=10**9).__enter__())
            run_plan(plan, checkpoint, writers[0], threads=threads)

    found = timed(folder, work)
    writers[0].__exit__(None, None, None)  # fsync, and a check of the headers: not timed
    return found


def run_mergekit(folder: str, kind: str, threads: int) -> dict[str, float]:
    import torch
    from mergekit.config import MergeConfiguration  # pyright: ignore[reportMissingImports]
    from mergekit.merge import run_merge  # pyright: ignore[reportMissingImports]
    from mergekit.options import MergeOptions  # pyright: ignore[reportMissingImports]

    logging.disable(logging.WARNING)
    torch.set_num_threads(threads)
    source = Path(folder, "source")
    layers = json.loads((source / "config.json").read_text())["num_hidden_layers"]
    part = {"sources": [{"model": str(source), "layer_range": [0, layers]}]}
    config = MergeConfiguration.model_validate({"slices": [part, part], "merge_method": "passthrough"})
    options = MergeOptions(copy_tokenizer=False, out_shard_size=10**9, write_model_card=False, quiet=True)
    return timed(folder, lambda: run_merge(config, str(Path(folder, "out")), options))


CHILDREN = {"copy": run_copy, "load_save": run_load_save, "lemonx": run_lemonx, "mergekit": run_mergekit}

if __name__ == "__main__":
    main()
