"""Pickled weights as plain tensors and nothing else.

A pickle is a program. torch's weights_only reader executes only the steps that build tensors and plain containers, and
stops at anything else. Files are memory-mapped, so a model larger than memory can be read.
"""

from __future__ import annotations

import os
import re
import warnings
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from lemonx.checkpoints.config import parse_config
from lemonx.checkpoints.folder import CONFIG, PICKLE_INDEX, weight_map
from lemonx.checkpoints.opening import name_of, open_inside, read_inside
from lemonx.checkpoints.safetensors_file import dtype_name
from lemonx.checkpoints.store import InMemory
from lemonx.checkpoints.weight_sets import weights_in
from lemonx.errors import BadCheckpoint, LemonxError
from lemonx.guards.releases import too_old
from lemonx.guards.shown import one_line

if TYPE_CHECKING:
    import torch


class Pickled(InMemory):
    """The weights of a folder that are pickled, memory-mapped where torch can.

    `name`: the file of weights, or their index. `named`: the keys under which it has the weights that are meant.
    """

    def __init__(self, folder: Path, name: str, named: str | None = None) -> None:
        self._text = read_inside(folder, CONFIG)
        config = parse_config(self._text, folder / CONFIG)
        mapping = weight_map(folder, name, "bin") if name == PICKLE_INDEX else None
        weights: dict[str, torch.Tensor] = {}
        files: dict[str, Path] = {}
        for shard in sorted(set(mapping.values())) if mapping else [name]:
            for key, tensor in load_tensors(folder, shard, named).items():
                if key in weights or (mapping is not None and mapping.get(key) != shard):
                    found = f"holds the tensor {key!r}, which its index puts elsewhere"
                    raise BadCheckpoint(found, "save it again", file=folder / shard)
                weights[key], files[key] = tensor, folder / shard
        if missing := sorted(set(mapping or ()) - set(weights)):
            found = f"names the tensor {missing[0]!r}, which no shard holds"
            raise BadCheckpoint(found, "save it again", file=folder / PICKLE_INDEX)
        super().__init__(config, weights, folder / name)
        self.tensors = {key: replace(info, file=files[key]) for key, info in self.tensors.items()}
        self.converted = "pickles, read as plain tensors" + (f" under {named!r}" if named else "")

    @property
    def config_bytes(self) -> bytes:
        return self._text


def load_tensors(folder: Path, shard: str, named: str | None = None) -> dict[str, torch.Tensor]:
    """The tensors of one pickle; BadCheckpoint if it holds, or asks for, anything else."""
    path = folder / shard
    fd = open_inside(folder, shard)
    try:
        content = _unpickle(name_of(fd), path)
    finally:
        os.close(fd)  # what is mapped stays mapped
    content = weights_in(content, named, path)
    if not isinstance(content, dict) or not content:
        raise BadCheckpoint(f"holds a {type(content).__name__}, not tensors by name", "save it again", file=path)
    for name, tensor in content.items():
        problem = _odd(name, tensor)
        if problem:
            raise BadCheckpoint(f"holds {problem}", "save it again with save_pretrained", file=path)
    return content


def _odd(name: Any, tensor: Any) -> str | None:
    import torch

    if not isinstance(name, str) or not name or not name.isprintable() or name == "__metadata__":
        return f"a tensor with the impossible name {str(name)[:80]!a}"
    if not isinstance(tensor, torch.Tensor):
        return f"a {type(tensor).__name__} under {name[:200]!r}, not a tensor"
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
        return f"a sparse or quantised tensor {name[:200]!r}"
    if tensor.nbytes > tensor.untyped_storage().nbytes():
        return f"tensor {name[:200]!r} as a few numbers that are repeated"
    try:
        dtype_name(tensor.dtype)
    except ValueError:
        return f"tensor {name[:200]!r} in {tensor.dtype}, which safetensors cannot hold"
    return None


def read_pickle(real: str | BinaryIO, *, mapped: bool = False) -> Any:
    """What torch.save wrote, if it is tensors in plain containers. Pickles are read nowhere else.

    Before torch 2.6, a pickle could run code in spite of weights_only (CVE-2025-32434).
    """
    import torch

    if old := too_old("torch", "to open a pickled file safely"):
        raise BadCheckpoint(*old)
    _require_stored(real)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what is odd about a pickle is said in one line, or is no matter
        return torch.load(real, map_location="cpu", weights_only=True, mmap=mapped)


def _require_stored(real: str | BinaryIO) -> None:
    """ValueError if a part of the file is compressed: torch never does that, and it could grow a thousandfold."""
    if zipfile.is_zipfile(real):
        with zipfile.ZipFile(real) as archive:
            if any(part.compress_type != zipfile.ZIP_STORED for part in archive.infolist()):
                raise ValueError("it is compressed, which torch does not do")
    if not isinstance(real, str):
        real.seek(0)


def asked_to_run(error: Exception) -> str | None:
    """The function that a pickle tried to call, if that is why it could not be read."""
    asked = re.search(r"GLOBAL ([\w.]+)|Unsupported class ([\w.]+)", str(error))
    return (asked[1] or asked[2]).rstrip(".") if asked else None


def why_unreadable(error: Exception) -> str:
    """Any other reason why it could not be read: one line of torch's message, without its advice to trust the file."""
    told = str(error).partition("WeightsUnpickler error: ")[2].strip() or str(error).strip() or type(error).__name__
    return one_line(told.splitlines()[0])


def _unpickle(real: str, path: Path) -> Any:
    try:
        try:
            return read_pickle(real, mapped=True)
        except RuntimeError as error:
            if "mmap" not in str(error):
                raise
            return read_pickle(real)  # written before torch 1.6: not mappable
    except LemonxError:
        raise
    except Exception as error:  # what a hostile or broken pickle raises is not known in advance
        if what := asked_to_run(error):
            raise BadCheckpoint(
                f"asks to run {what}, which no weights need, so nothing was loaded",
                "get this model as safetensors from someone you trust",
                file=path,
            ) from None
        raise BadCheckpoint(
            f"is not a readable pickle of weights ({why_unreadable(error)})", "download it again", file=path
        ) from None
