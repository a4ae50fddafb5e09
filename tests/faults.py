"""Every way to break a checkpoint that lemonx must meet: the number in the list, how, and what is then said.

The source is a small real Llama in four shards; `damage` breaks a copy of it on disk. The table is read by the tests
(test_faults.py, test_fsck.py) and by docs/make/guarantees.py, which writes docs/guarantees.md from it.
"""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import pico
from commands import BAD_CHECKPOINT, REFUSED

INDEX = "model.safetensors.index.json"
# What the numbers stand for; those without a way to break a folder have tests of their own.
TITLES = {
    1: "truncated shard",
    2: "trailing bytes",
    3: "empty file",
    4: "header length of 2^63, or over 100 MB",
    5: "bad header JSON, duplicate keys",
    6: "overlapping offsets",
    7: "missing shard",
    8: "`../` or absolute path in weight_map",
    9: "symlink that leaves the folder, or dangles",
    10: "index without metadata or weight_map, or of a wrong type",
    11: "index that names the wrong shard, or omits keys",
    12: "one tensor in two shards",
    13: "stale extra shard",
    14: "NaN or Inf",
    15: "integer or quantised dtype",
    16: "shape against config",
    17: "more or fewer layers than the config",
    18: "layer_types of another length",
    19: "unknown model_type, auto_map",
    20: "a malicious .bin, .pt, rng_state, DCP metadata",
    21: "a tensor named `__metadata__`, empty, or with control characters",
    22: "disk full",
    23: "SIGKILL while writing",
    24: "output exists, or is the source, or lies inside it",
    25: "source changed or truncated while it is read",
    26: "unreadable file",
    27: "YAML with unknown keys or tags",
    28: "out of memory during verification",
}

# Where the others are tested.
OWN: dict[int, tuple[str, ...]] = {
    22: ("tests/test_faults_disk.py",),
    23: ("tests/test_faults_kill.py",),
    24: ("tests/test_faults.py::test_bad_outputs",),
    25: ("tests/test_faults.py::test_a_source_that_changes_while_it_is_read",),
    26: ("tests/test_faults.py::test_an_unreadable_file",),
    27: ("tests/lab/test_training.py::test_yaml_that_is_not_read",),
    28: ("tests/test_faults.py::test_memory_that_runs_out_during_verification",),
}


@dataclass(frozen=True)
class Fault:
    """A way to break the folder: `file` is named in the one line that is said, which also matches `says`.

    `values`: only the numbers are wrong, which a plan does not read. `fsck`: the level at which fsck reports it.
    """

    number: int
    name: str
    file: str
    says: str
    damage: Callable[[Path], object]
    code: int = BAD_CHECKPOINT
    options: tuple[str, ...] = ()
    model: str = "llama-tied"
    values: bool = False
    fsck: str = "error"


def save_sharded(name: str, folder: Path) -> Path:
    """A pico model in four shards, with a tokenizer's file beside them."""
    weights = load_file(pico.save(pico.PICO[name](), folder) / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map = {}
    for number in range(4):
        part = {key: weights[key] for key in sorted(weights)[number::4]}
        file = f"model-{number + 1:05d}-of-00004.safetensors"
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    total = sum(tensor.nbytes for tensor in weights.values())
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}))
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    return folder


def save_unknown(folder: Path) -> Path:
    """A model of a family that lemonx has no spec for."""
    from transformers import BioGptConfig, BioGptForCausalLM

    from lemonx.architectures import families

    config = BioGptConfig(
        vocab_size=61, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    assert config.model_type not in families(), "choose another family for this test"
    return pico.save(BioGptForCausalLM(config), folder)


def shards(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("model-*.safetensors"))


def shard_of(folder: Path, tensor: str) -> Path:
    return folder / json.loads((folder / INDEX).read_text())["weight_map"][tensor]


FIRST = "model-00001-of-00004.safetensors"
SECOND = "model-00002-of-00004.safetensors"
NORM, UP = "model.norm.weight", "model.layers.1.mlp.up_proj.weight"


def _bytes(change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    """Rewrite the first shard."""
    return lambda folder: (folder / FIRST).write_bytes(change((folder / FIRST).read_bytes()))


def _header(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    """Rewrite the header of the first shard; the data stays."""

    def rewrite(raw: bytes) -> bytes:
        length = int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8 : 8 + length])
        change(header)
        text = json.dumps(header).encode()
        return len(text).to_bytes(8, "little") + text + raw[8 + length :]

    return _bytes(rewrite)


def _rename_first(name: str) -> Callable[[dict[str, Any]], object]:
    def change(header: dict[str, Any]) -> None:
        first = next(key for key in header if key != "__metadata__")
        header.pop("__metadata__")
        header[name] = header.pop(first)

    return change


def _overlap(header: dict[str, Any]) -> None:
    a, b = [key for key in header if key != "__metadata__"][:2]
    begin, end = header[a]["data_offsets"]
    header[b] |= {"data_offsets": [begin, end], "shape": header[a]["shape"], "dtype": header[a]["dtype"]}


def _twice(raw: bytes) -> bytes:
    length = int.from_bytes(raw[:8], "little")
    text = raw[8 : 8 + length].rstrip()
    name, entry = next((k, v) for k, v in json.loads(text).items() if k != "__metadata__")
    text = text[:-1] + f",{json.dumps(name)}:{json.dumps(entry)}}}".encode()
    return len(text).to_bytes(8, "little") + text + raw[8 + length :]


def _json(name: str, change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    def apply(folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        change(content)
        (folder / name).write_text(json.dumps(content))

    return apply


def _index(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    return _json(INDEX, change)


def _config(**fields: Any) -> Callable[[Path], object]:
    return _json("config.json", lambda content: content.update(fields))


def _weights(tensor: str, change: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], object]:
    """Change the shard that holds a tensor."""

    def apply(folder: Path) -> None:
        path = shard_of(folder, tensor)
        weights = load_file(path)
        change(weights)
        save_file(weights, path, metadata={"format": "pt"})

    return apply


def _link(name: str, target: str) -> Callable[[Path], object]:
    """Put a link in a file's place; the file itself moves to where the link leads, if that is a place at all."""

    def apply(folder: Path) -> None:
        (folder / name).replace(folder / "moved")
        if not target.startswith("nowhere"):
            (folder / "moved").replace(folder / target)
        (folder / name).symlink_to(target)
        (folder / "moved").unlink(missing_ok=True)

    return apply


def _second_copy(folder: Path) -> None:
    weights = load_file(shard_of(folder, NORM))
    other = next(folder / name for name in shards(folder) if name != shard_of(folder, NORM).name)
    save_file({**load_file(other), NORM: weights[NORM]}, other, metadata={"format": "pt"})


def _extra_layer(folder: Path) -> None:
    extra: dict[str, Tensor] = {}
    for name in shards(folder):
        extra |= {k.replace(".1.", ".2."): v for k, v in load_file(folder / name).items() if ".layers.1." in k}
    save_file({**load_file(folder / FIRST), **extra}, folder / FIRST, metadata={"format": "pt"})
    _index(lambda index: index["weight_map"].update(dict.fromkeys(extra, FIRST)))(folder)


class _Evil:
    """What a malicious pickle does: call something. Here it would leave a file named `ran`."""

    def __init__(self, folder: Path) -> None:
        self.command = f"touch {folder.parent / 'ran'}"

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self.command,)


def evil(path: Path) -> None:
    """A file as torch.save writes it, which runs a command when it is unpickled."""
    with path.open("wb") as file:
        torch.save({"weight": torch.ones(2), "evil": _Evil(path.parent)}, file)


def as_pickles(folder: Path, *, sharded: bool = False) -> None:
    """The same weights as pytorch_model.bin, in one file or with an index, and no safetensors."""
    weights: dict[str, Tensor] = {}
    names = shards(folder)
    for number, name in enumerate(names, start=1):
        part = load_file(folder / name)
        weights |= part
        (folder / name).unlink()
        if sharded:
            torch.save(part, folder / f"pytorch_model-{number:05d}-of-{len(names):05d}.bin")
    content = json.loads((folder / INDEX).read_text())
    (folder / INDEX).unlink()
    if sharded:
        renamed = {
            key: name.replace("model-", "pytorch_model-", 1).replace(".safetensors", ".bin")
            for key, name in content["weight_map"].items()
        }
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps({**content, "weight_map": renamed}))
    else:
        torch.save(weights, folder / "pytorch_model.bin")


def _only(name: str, write: Callable[[Path], object]) -> Callable[[Path], object]:
    """No safetensors, and this file instead."""

    def apply(folder: Path) -> None:
        for shard in [*shards(folder), INDEX]:
            (folder / shard).unlink()
        write(folder / name)

    return apply


def _evil_shard(folder: Path) -> None:
    as_pickles(folder, sharded=True)
    evil(folder / "pytorch_model-00003-of-00004.bin")


BIN = "pytorch_model.bin"
FAULTS = [
    Fault(1, "truncated", FIRST, "is truncated: .*download", _bytes(lambda raw: raw[:-100])),
    Fault(1, "cut-in-the-header", FIRST, "is truncated: its header", _bytes(lambda raw: raw[:200])),
    Fault(2, "trailing", FIRST, "7 bytes after its last tensor", _bytes(lambda raw: raw + b"garbage")),
    Fault(3, "empty", FIRST, "is empty", _bytes(lambda raw: b"")),
    Fault(3, "seven-bytes", FIRST, "only 7 bytes", _bytes(lambda raw: raw[:7])),
    Fault(4, "header-2-to-63", FIRST, "claims a header of 9223372036854775808",
          _bytes(lambda raw: (2**63).to_bytes(8, "little") + raw[8:])),
    Fault(4, "header-over-100-MB", FIRST, "claims a header of 100000001",
          _bytes(lambda raw: (10**8 + 1).to_bytes(8, "little") + raw[8:])),
    Fault(5, "header-not-json", FIRST, "broken header", _bytes(lambda raw: raw[:9] + b"'" + raw[10:])),
    Fault(5, "header-duplicate", FIRST, "comes twice", _bytes(_twice)),
    Fault(6, "overlap", FIRST, "overlap", _header(_overlap)),
    Fault(7, "missing-shard", FIRST, "does not exist", lambda folder: (folder / FIRST).unlink()),
    Fault(8, "path-upwards", INDEX, r"names the shard '\.\./m.safetensors', which is not",
          _index(lambda index: index["weight_map"].update({NORM: "../m.safetensors"}))),
    Fault(8, "absolute-path", INDEX, "names the shard '/etc/passwd', which is not",
          _index(lambda index: index["weight_map"].update({NORM: "/etc/passwd"}))),
    Fault(9, "link-out", FIRST, "a link out of its folder", _link(FIRST, "../elsewhere.safetensors")),
    Fault(9, "link-to-nothing", FIRST, "a link to nothing", _link(FIRST, "nowhere")),
    Fault(9, "tokenizer-links-out", "tokenizer.json", "a link out of its folder", _link("tokenizer.json", "../secret")),
    Fault(10, "no-metadata", INDEX, "no 'metadata'", _index(lambda index: index.pop("metadata"))),
    Fault(10, "no-weight-map", INDEX, "no 'weight_map'", _index(lambda index: index.pop("weight_map"))),
    Fault(10, "weight-map-list", INDEX, "no 'weight_map'", _index(lambda index: index.update(weight_map=[NORM]))),
    Fault(10, "weight-map-numbers", INDEX, "no 'weight_map'", _index(lambda index: index["weight_map"].update(x=3))),
    Fault(10, "index-list", INDEX, "holds a list", lambda folder: (folder / INDEX).write_text("[]")),
    Fault(10, "index-not-json", INDEX, "not valid JSON", lambda folder: (folder / INDEX).write_text("{")),
    Fault(11, "wrong-shard", INDEX, f"puts the tensor '{NORM}' in",
          _index(lambda index: index["weight_map"].update({NORM: FIRST if index["weight_map"][NORM] != FIRST else
                                                           SECOND}))),
    Fault(11, "omitted-key", INDEX, f"omits the tensor '{NORM}'", _index(lambda index: index["weight_map"].pop(NORM))),
    Fault(11, "ghost-key", INDEX, "names the tensor 'ghost'",
          _index(lambda index: index["weight_map"].update(ghost=FIRST))),
    Fault(12, "tensor-twice", "model-0000", f"'{NORM}', and so does", _second_copy),
    Fault(13, "stale-shard", "model.safetensors", "is not listed in the index",
          lambda folder: save_file({"old": torch.ones(3)}, folder / "model.safetensors")),
    Fault(14, "nan", "model-0000", f"{UP} holds NaN", _weights(UP, lambda w: w[UP][3, 4].fill_(torch.nan)),
          values=True),
    Fault(14, "inf", "model-0000", f"{NORM} holds NaN or Inf", _weights(NORM, lambda w: w[NORM][3].fill_(-torch.inf)),
          values=True),
    Fault(15, "int8", "model-0000", f"holds {UP} as I8.*dequantise",
          _weights(UP, lambda w: w.update({UP: w[UP].to(torch.int8)}))),
    Fault(15, "fp8", "model-0000", f"holds {UP} as F8_E4M3.*dequantise",
          _weights(UP, lambda w: w.update({UP: w[UP].to(torch.float8_e4m3fn)}))),
    Fault(15, "quantization-config", "config.json", "quantization_config: dequantise",
          _config(quantization_config={"bits": 4}), fsck="warning"),
    Fault(16, "shape", "model-0000", r"with shape \[100, 48\], but config.json makes it \[101, 48\]",
          _config(intermediate_size=101)),
    Fault(17, "more-layers", "config.json", "2 layers .* have an extra model.layers.2", _extra_layer),
    Fault(17, "fewer-layers", "config.json", "3 layers .* lack model.layers.2", _config(num_hidden_layers=3)),
    Fault(17, "far-fewer-layers", "config.json", "4000 layers .* have [0-9]+ tensors in all",
          _config(num_hidden_layers=4000)),
    Fault(18, "layer-types", "config.json", "has 1 entries in layer_types for 2 layers",
          _config(layer_types=["full_attention"]), model="qwen2-sliding"),
    Fault(19, "unknown-model-type", "config.json",
          "has model_type 'llamma', which lemonx does not support: did you mean 'llama'",
          _config(model_type="llamma"), code=REFUSED, fsck="note"),
    Fault(19, "auto-map", "config.json", "has an auto_map, .*never runs",
          _config(auto_map={"AutoModel": "m.M"}), code=REFUSED, fsck="warning"),
    Fault(20, "only-a-bin", BIN, "can run code: use --allow-pickle", as_pickles),
    Fault(20, "malicious-bin", BIN, "can run code: use --allow-pickle", _only(BIN, evil)),
    Fault(20, "malicious-bin-allowed", BIN, "asks to run posix.system, .*nothing was loaded", _only(BIN, evil),
          options=("--allow-pickle",)),
    Fault(20, "malicious-shard-allowed", "pytorch_model-00003-of-00004.bin", "asks to run posix.system", _evil_shard,
          options=("--allow-pickle",)),
    Fault(20, "malicious-legacy-bin", BIN, "asks to run posix.system",
          _only(BIN, lambda path: path.write_bytes(pickle.dumps(_Evil(path.parent), protocol=2))),
          options=("--allow-pickle",)),
    Fault(20, "malicious-newer-pickle", BIN, "not a readable pickle of weights",
          _only(BIN, lambda path: path.write_bytes(pickle.dumps(_Evil(path.parent), protocol=5))),
          options=("--allow-pickle",)),
    Fault(20, "bin-of-garbage", BIN, "not a readable pickle of weights",
          _only(BIN, lambda path: path.write_bytes(b"garbage" * 9)), options=("--allow-pickle",)),
    Fault(20, "bin-of-a-list", BIN, "holds a list, not tensors by name",
          _only(BIN, lambda path: torch.save([torch.ones(2)], path)), options=("--allow-pickle",)),
    Fault(20, "malicious-pt", "model.pt", "asks to run posix.system", _only("model.pt", evil),
          options=("--allow-pickle",)),
    Fault(20, "dcp-metadata", ".metadata", "not the metadata of a distributed checkpoint", _only(".metadata", evil),
          options=("--allow-pickle",)),
    Fault(21, "named-metadata", FIRST, "'__metadata__' that is not text", _header(_rename_first("__metadata__"))),
    Fault(21, "empty-name", FIRST, "impossible name ''", _header(_rename_first(""))),
    Fault(21, "control-character", FIRST, r"impossible name 'a\\nb'", _header(_rename_first("a\nb"))),
]  # fmt: skip
