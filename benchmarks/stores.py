"""What does an expansion need of each kind of source: memory, temporary disk, seconds?

    python benchmarks/stores.py --gb 2              measure
    python docs/make/measured.py stores --gb 2      and put the table into docs/scale.md

Builds a synthetic Llama in bfloat16, the same in every other form, and doubles its depth in a process of its own,
without verification. `anon` is the peak of memory without the page cache, above that of a process that has imported
torch and lemonx. `temporary` is the most that the folder for temporary files held.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import expand
import shown

WORK = """
import sys, time
import torch, lemonx
from lemonx.models import sources
from lemonx.models import gguf as _gguf
import transformers.integrations.ggml, transformers.modeling_gguf_pytorch_utils
from lemonx.execution import runner
import lemonx.workflows.expanding
print("ready", flush=True)
sys.stdin.readline()
start = time.perf_counter()
lemonx.expand(sys.argv[1], sys.argv[2], depth="2x", verify=False, threads=1, allow_pickle=True)
print(time.perf_counter() - start, flush=True)
sys.stdin.readline()
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=2.0, help="size of the outputs in bfloat16")
    parser.add_argument("--only", nargs="*", choices=FORMS, default=list(FORMS))
    options = parser.parse_args()
    lines = ["| source | is read by | size | output | anon | temporary | GB/s |", "|---|---|---|---|---|---|---|"]
    with tempfile.TemporaryDirectory(prefix="lemonx-stores-") as place:
        base = Path(place, "base")
        expand.build(base, "bfloat16", "depth", options.gb)
        for form in options.only:
            source = FORMS[form](base, Path(place, "source"))
            lines.append(row(form, source, Path(place)))
            print(lines[-1], flush=True)
            shutil.rmtree(Path(place, "source"), ignore_errors=True)
    shown.TABLES["stores"] = "\n".join(lines)


def row(form: str, source: Path, place: Path) -> str:
    """Expand a source, and say what that took."""
    temporary, output = place / "tmp", place / "out"
    temporary.mkdir()
    child = subprocess.Popen(
        [sys.executable, "-c", WORK, str(source), str(output)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        text=True, env={**os.environ, "TMPDIR": str(temporary)},
    )  # fmt: skip
    assert child.stdin and child.stdout
    child.stdout.readline()
    before, most, disk = expand.anonymous(child.pid), 0.0, 0
    child.stdin.write("go\n")
    child.stdin.flush()
    os.set_blocking(child.stdout.fileno(), False)
    seconds = ""
    while not seconds and child.poll() is None:
        most, disk = max(most, expand.anonymous(child.pid)), max(disk, size(temporary))
        time.sleep(0.02)
        seconds = child.stdout.readline()
    child.communicate("end\n")
    written = size(output)
    shutil.rmtree(output, ignore_errors=True)
    shutil.rmtree(temporary)
    speed = f"{written / 1e9 / float(seconds):.2f}" if seconds else "failed"
    gb = [f"{count / 1e9:.2f} GB" for count in (size(source), written)]
    return f"| {form} | {READ[form]} | {gb[0]} | {gb[1]} | {most - before:.2f} GB | {disk / 1e6:.1f} MB | {speed} |"


def size(path: Path) -> int:
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return sum(min(file.stat().st_size, file.stat().st_blocks * 512) for file in files if file.exists())


# ----------------------------------------------------------------- the forms of one model


def tensors(base: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return {name: tensor for file in sorted(base.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def with_config(base: Path, source: Path, **fields: Any) -> Path:
    source.mkdir(exist_ok=True)
    (source / "config.json").write_text(json.dumps({**json.loads((base / "config.json").read_text()), **fields}))
    return source


def plain(base: Path, source: Path) -> Path:
    return base


def eight_bits(base: Path, source: Path) -> Path:
    """Projections in fp8, with a scale for every block of 128 by 128."""
    import torch
    from safetensors.torch import save_file

    settings = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    found = tensors(base)
    for name in [name for name in found if "_proj" in name]:
        rows, columns = found[name].shape
        found[f"{name}_scale_inv"] = torch.full((-(-rows // 128), -(-columns // 128)), 2.0**-7)
        found[name] = (found[name].float() * 128).to(torch.float8_e4m3fn)
    save_file(found, with_config(base, source, quantization_config=settings) / "model.safetensors")
    return source


def pickled(base: Path, source: Path) -> Path:
    import torch

    torch.save(tensors(base), with_config(base, source) / "pytorch_model.bin")
    return source


def adapter(base: Path, source: Path) -> Path:
    """LoRA of rank 16 of every projection."""
    import torch
    from safetensors.torch import save_file

    found, names = {}, [name for name in tensors(base) if "_proj" in name]
    for name, shape in ((name, tensors(base)[name].shape) for name in names):
        module = f"base_model.model.{name.removesuffix('.weight')}"
        found |= {f"{module}.lora_A.weight": torch.randn(16, shape[1]) / 64}
        found |= {f"{module}.lora_B.weight": torch.randn(shape[0], 16) / 64}
    source.mkdir()
    save_file(found, source / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 16, "lora_alpha": 16, "base_model_name_or_path": str(base)}
    targets = sorted({name.split(".")[-2] for name in names})
    (source / "adapter_config.json").write_text(json.dumps({**settings, "target_modules": targets}))
    return source


def distributed(base: Path, source: Path) -> Path:
    from torch.distributed.checkpoint import state_dict_saver

    state_dict_saver.save(tensors(base), checkpoint_id=with_config(base, source), no_dist=True)
    return source


def gguf(base: Path, source: Path) -> Path:
    """Matrices in Q8_0, with the rotary pairs as they are: what it computes does not matter here."""
    import gguf
    import numpy as np

    config = json.loads((base / "config.json").read_text())
    source.mkdir()
    writer = gguf.GGUFWriter(str(source / "model.gguf"), "llama")
    writer.add_context_length(2048)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_vocab_size(config["vocab_size"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    kind = gguf.GGMLQuantizationType.Q8_0
    for name, tensor in tensors(base).items():
        values: Any = tensor.float().numpy()
        found = str(names.get_name(name, try_suffixes=(".weight",)))
        if values.ndim > 1:
            writer.add_tensor(found, gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(found, values.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return source / "model.gguf"


FORMS: dict[str, Callable[[Path, Path], Path]] = {
    "safetensors": plain,
    "fp8 in blocks": eight_bits,
    "pytorch_model.bin": pickled,
    "LoRA adapter and base": adapter,
    "torch's distributed checkpoint": distributed,
    "GGUF, Q8_0": gguf,
}

READ = {
    "safetensors": "rows and columns",
    "fp8 in blocks": "rows, which are scaled",
    "pytorch_model.bin": "rows of the mapped file",
    "LoRA adapter and base": "rows, with A and B of their tensor",
    "torch's distributed checkpoint": "rows and columns",
    "GGUF, Q8_0": "rows; fused experts whole",
}

if __name__ == "__main__":
    main()
