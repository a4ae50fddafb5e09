"""Computes what a growth on many GPUs takes, on paper: bytes read, memory per process; writes docs/scale.md's table.

A folder of headers stands in for the source: config.json and a safetensors file whose tensors have their sizes and no
content (a sparse file takes no disk), so that `lemonx plan` and this script see the real thing.

    python benchmarks/scale.py                          print the table for Llama 7B to 13B on 8 processes
    python benchmarks/scale.py --write                  put it into docs/scale.md, between its markers
    python benchmarks/scale.py --headers FOLDER         leave the folder there, for `lemonx plan FOLDER ...`
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = {
    **{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 32000, "dtype": "bfloat16"},
    **{"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32},
    **{"intermediate_size": 11008, "rms_norm_eps": 1e-5, "tie_word_embeddings": False},
}
GROWTH = {"width": 5120, "depth": 40, "heads": 40, "kv_heads": 40, "ffn": 13824}
# Weights, gradients and Adam's two moments, in float32 each.
STATE = 16


def headers(folder: Path) -> Path:
    """The source without its numbers: a sparse file with the header of a real one."""
    from lemonx.sharded_expansion import tensors_on_disk
    from lemonx.training.model import empty

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SOURCE, indent=2) + "\n")
    entries, end = {}, 0
    for name, tensor in tensors_on_disk(empty("causal-lm", SOURCE, {})).items():
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
    import math

    import lemonx
    from lemonx.runner import BLOCK
    from lemonx.sharded_expansion import shares

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


def _gb(count: float) -> str:
    return f"{count / 1e9:.1f} GB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--headers", type=Path, help="only make the folder of headers")
    parser.add_argument("--write", action="store_true", help="put the table into docs/scale.md")
    options = parser.parse_args()
    if options.headers:
        print(headers(options.headers))
        return
    with tempfile.TemporaryDirectory() as folder:
        text = table(headers(Path(folder) / "llama-7b"), options.processes)
    print(text)
    if options.write:
        path = ROOT / "docs" / "scale.md"
        pattern = re.compile(r"(<!-- scale -->\n).*?(\n<!-- /scale -->)", re.S)
        content, count = pattern.subn(lambda match: match[1] + text + match[2], path.read_text())
        if count != 1:
            raise SystemExit(f"{path} has no markers <!-- scale --> ... <!-- /scale -->")
        path.write_text(content)


if __name__ == "__main__":
    main()
